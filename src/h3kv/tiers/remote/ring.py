"""Typed entry to the native ring of records."""

from __future__ import annotations

from h3kv import _native
from h3kv.core.errors import RegionError


class RecordRing:
    """One side of a ring, which `native/include/h3/record_ring.hpp` draws. For one thread.

    Args:
        address: of the ring, cleared before either side is made.
        capacity: bytes of records, a power of two.
        record_bytes_max: of the longest one.
    """

    def __init__(self, address: int, *, capacity: int, record_bytes_max: int) -> None:
        self._native = _native.RecordRing(address, capacity, record_bytes_max)

    def push(self, record: bytes) -> bool:
        """Hand a record over. False: there is no room now.

        Raises:
            RegionError: the other side wrote what cannot be.
        """
        try:
            return self._native.push(record)
        except ValueError as error:
            raise _damaged(error) from error

    def pop(self) -> bytes | None:
        """The oldest record, None where there is none. Raises RegionError as `push` does, or for what is no record."""
        try:
            return self._native.pop()
        except ValueError as error:
            raise _damaged(error) from error


def _damaged(error: ValueError) -> RegionError:
    return RegionError(f"a ring of the cold store's channel is damaged ({error}): register again", region="channel")
