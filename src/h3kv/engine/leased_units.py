"""Units of HOST ahead of their use, so that nobody waits for a call while tokens are made."""

from __future__ import annotations

import concurrent.futures
import contextlib
from collections.abc import Callable, Collection, Sequence

from h3kv.memory.leases import LeasedRoom

Lease = Callable[[int], Collection[int]]
"""Asks the owner of the region for so many units; none where there are not so many. Waits for the answer."""
GiveBack = Callable[[Sequence[int]], bool]
"""Returns units to it; whether it took them."""


class UnitStock:
    """A stock that a thread fills. All methods but the calls to the owner are of one thread.

        owner --lease, on a thread--> stock --more--> LeasedRoom --take_spare--> owner

    Args:
        lease, give_back: of the owner.
        keep: units in stock that are aimed at.
        free: how many units nobody leases, as the region's table says.
    """

    def __init__(self, lease: Lease, give_back: GiveBack, *, keep: int, free: Callable[[], int]) -> None:
        self._lease = lease
        self._give_back = give_back
        self._keep = keep
        self._free = free
        self._stock: list[int] = []
        self._thread = concurrent.futures.ThreadPoolExecutor(1, thread_name_prefix="h3-units")
        self._asked: concurrent.futures.Future[Collection[int]] | None = None
        self._returned: concurrent.futures.Future[bool] | None = None
        self._returning: list[int] = []
        self.waits_total = 0
        """How often a slot had to wait for the owner."""

    def more(self, units: int) -> list[int]:
        """What `LeasedRoom` asks for: from the stock, else from the owner."""
        self._collect()
        missing = units - len(self._stock)
        if missing > 0 and self._free() + len(self._stock) >= units:
            self.waits_total += 1
            if self._asked is not None:
                concurrent.futures.wait([self._asked])
                self._collect()
            missing = units - len(self._stock)
            self._stock += self._lease(missing) if missing > 0 else []
        if len(self._stock) < units:
            return []
        taken, self._stock = self._stock[:units], self._stock[units:]
        return taken

    def tick(self, room: LeasedRoom) -> None:
        """Between two steps: have the stock filled up, and give back what the room has to spare."""
        self._collect()
        wanted = min(self._keep - len(self._stock), self._free())
        if wanted > 0 and self._asked is None:
            self._asked = self._thread.submit(self._lease, wanted)
        if room.free_units > 2 * self._keep and self._returned is None:
            self._returning = room.take_spare(self._keep)
            self._returned = self._thread.submit(self._give_back, self._returning)

    def close(self) -> None:
        """Wait for calls under way. What is in stock goes with this process's lease."""
        self._thread.shutdown(wait=True)

    def _collect(self) -> None:
        if self._asked is not None and self._asked.done():
            with contextlib.suppress(concurrent.futures.CancelledError):
                self._stock += self._asked.result()
            self._asked = None
        if self._returned is not None and self._returned.done():
            if not self._returned.result():
                self._stock += self._returning
            self._returned, self._returning = None, []
