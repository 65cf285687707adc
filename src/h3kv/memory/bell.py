"""Two words in shared memory that a thread waits on for news of several kinds: records, I/O that ended, calls."""

from __future__ import annotations

from typing import Final

from h3kv import _native

BELL_BYTES: Final = 8
SPIN_NS: Final = 20_000
"""How long a waiter looks before it sleeps: a fast disk answers in about as much."""


class Bell:
    """Wakes whoever waits, in any process that maps it.

    Args:
        address: of 8 bytes, zero in the beginning, that stay mapped.
    """

    def __init__(self, address: int) -> None:
        self.address = address

    @property
    def signal(self) -> int:
        """Changes with each ring."""
        return _native.bell_signal(self.address)

    def ring(self) -> None:
        """Wake all who wait."""
        _native.bell_ring(self.address)

    def wait(self, seen: int, timeout_ns: int) -> None:
        """Return when `signal` is no longer `seen`, or the time is over; after 0.1 s at the latest."""
        _native.bell_wait(self.address, seen, max(timeout_ns, 0), SPIN_NS)
