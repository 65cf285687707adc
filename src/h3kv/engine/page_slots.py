"""Which units of slabs lie in which slots of the page cache: typed entry to the native table.

A unit is what is read at the least: a page, or 4 KiB where pages are smaller. Shapes: N keys, R reads, S slots.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from h3kv import _native
from h3kv.core.layout import SlabLayout
from h3kv.core.limits import DIRECT_IO_BYTES, SEGMENT_BLOCKS_MAX

KEY_DTYPE: Final = np.dtype([("segment", "<u8"), ("unit", "<u4"), ("layer", "<u2"), ("reserved", "<u2")])
"""Names one unit, the same 16 bytes as `h3::PageKey`. `unit` counts from the slab's start."""

READ_DTYPE: Final = np.dtype(
    [("tag", "<u8"), ("target", "<u8"), ("slab", "<u4"), ("offset", "<u4"), ("size", "<u4"), ("is_ahead", "<u4")]
)
"""One read, as `PersistentStore.read_units` draws it and `h3::PageRead` has it."""

LOADING: Final = 1
READY: Final = 2
FAILED: Final = 3
"""States of a slot that is pinned."""

SLOTS_MAX: Final = 1 << 24
"""As `kPageSlotsMax`."""

assert KEY_DTYPE.itemsize == 16
assert READ_DTYPE.itemsize == 32


@dataclass(frozen=True, slots=True)
class Reads:
    """What has to be read into slots. Valid until the next call of the table."""

    reads_R: NDArray[np.void]
    """READ_DTYPE; `slab` is still to be filled in."""
    segments_R: NDArray[np.uint64]

    def __len__(self) -> int:
        return len(self.reads_R)

    @property
    def ticket(self) -> int:
        """What all tags begin with, tag >> 32; 0 without reads."""
        return int(self.reads_R["tag"][0]) >> 32 if len(self.reads_R) else 0

    def units(self, unit_bytes: int) -> int:
        """Units of all reads."""
        return int(self.reads_R["size"].sum(dtype=np.int64)) // unit_bytes


@dataclass(frozen=True, slots=True)
class PageCounts:
    """Totals in units, but for the last three, which are of this moment."""

    hits: int
    """Taken, and there."""
    useful: int
    """Among the hits: read ahead, and taken for the first time."""
    late: int
    """Taken while they were still being read ahead."""
    misses: int
    """Taken, and neither there nor on their way."""
    wasted: int
    """Read ahead, and given up before anybody took them."""
    read_ahead: int
    evicted: int
    failed: int
    pinned: int
    in_flight: int
    evictable: int


class PageSlots:
    """The table. It reads nothing: it says what to read, and is told what came. Not thread-safe.

    Args:
        addresses_S: of the slots, at most `SLOTS_MAX`.
        unit_bytes: size of each.
        run_units: longest row of neighbours that is read at once.
    """

    def __init__(self, addresses_S: NDArray[np.uint64], *, unit_bytes: int, run_units: int) -> None:
        assert 0 < len(addresses_S) <= SLOTS_MAX and addresses_S.dtype == np.uint64
        self._native = _native.PageCache(addresses_S.ctypes.data, len(addresses_S), unit_bytes, run_units)
        self._reads_R = np.zeros(1024, dtype=READ_DTYPE)
        self._segments_R = np.zeros(1024, dtype=np.uint64)

    def take(self, keys_N: NDArray[np.void]) -> tuple[NDArray[np.uint32], Reads] | None:
        """Pin these units, which may repeat one another where they are neighbours, and make room for what is missing.

        Returns:
            Their slots, and what the caller has to read into them; None, and nothing changed, where there is no room:
            the slots are pinned, or something is being read into them.
        """
        slots_N = np.empty(len(keys_N), dtype=np.uint32)
        self._make_room(len(keys_N))
        started = self._native.take(
            _address(keys_N), len(keys_N), slots_N.ctypes.data, self._reads_R.ctypes.data, self._segments_R.ctypes.data
        )
        return None if started < 0 else (slots_N, Reads(self._reads_R[:started], self._segments_R[:started]))

    def read_ahead(self, keys_N: NDArray[np.void], *, units: int) -> tuple[Reads, int]:
        """Make room for what is missing of these units, the first ones, so many at most.

        Returns:
            What to read, and how many of the keys were dealt with.
        """
        self._make_room(len(keys_N))
        started, looked_at = self._native.read_ahead(
            _address(keys_N), len(keys_N), units, self._reads_R.ctypes.data, self._segments_R.ctypes.data
        )
        return Reads(self._reads_R[:started], self._segments_R[:started]), looked_at

    def end(self, tags_R: NDArray[np.uint64], *, well: bool) -> None:
        """Reads have ended, all of them well or none."""
        if len(tags_R):
            tags_R = np.ascontiguousarray(tags_R, dtype=np.uint64)
            self._native.end(tags_R.ctypes.data, len(tags_R), well)

    def spare(self, tags_R: NDArray[np.uint64]) -> None:
        """Of what these reads went ahead for, nobody is expected to take the rest: it makes room first."""
        if len(tags_R):
            self._native.spare(tags_R.ctypes.data, len(tags_R))

    def give_back(self, slots_N: NDArray[np.uint32]) -> None:
        """Take one pin from each."""
        self._native.give_back(slots_N.ctypes.data, len(slots_N))

    def loading(self, slots_N: NDArray[np.uint32]) -> int:
        """How many of these are still being read into."""
        return self._native.loading(slots_N.ctypes.data, len(slots_N))

    def states(self, slots_N: NDArray[np.uint32]) -> NDArray[np.uint8]:
        """LOADING, READY or FAILED of each, all of them pinned."""
        states_N = np.empty(len(slots_N), dtype=np.uint8)
        self._native.states(slots_N.ctypes.data, len(slots_N), states_N.ctypes.data)
        return states_N

    def forget(self, segment: int) -> None:
        """A segment's units are found no more. What is pinned stays readable."""
        self._native.forget(segment)

    @property
    def in_flight(self) -> int:
        """Units that are being read."""
        return self._native.in_flight

    def counts(self) -> PageCounts:
        """Totals now."""
        return PageCounts(**self._native.counts())

    def check_integrity(self) -> None:
        """Assert that index, list and slots agree."""
        fault = self._native.fault()
        assert not fault, fault

    def _make_room(self, reads: int) -> None:
        if reads > len(self._reads_R):
            self._reads_R = np.zeros(2 * reads, dtype=READ_DTYPE)
            self._segments_R = np.zeros(2 * reads, dtype=np.uint64)


def unit_bytes(slab: SlabLayout) -> int:
    """Bytes that are read at the least for one page of a slab."""
    return max(slab.page.size_bytes, DIRECT_IO_BYTES)


def carve(slabs: Sequence[int], layout: SlabLayout) -> NDArray[np.uint64]:
    """Addresses of the units that fit slots for slabs of full segments, of which the addresses are given."""
    size = unit_bytes(layout)
    offsets = np.arange(layout.size_bytes(SEGMENT_BLOCKS_MAX) // size, dtype=np.uint64) * np.uint64(size)
    addresses_S: NDArray[np.uint64] = np.add.outer(np.array(slabs, dtype=np.uint64), offsets).ravel()
    return addresses_S


def slots_of(tag: int) -> range:
    """The slots that a read fills, from its tag: ticket << 32 | count << 24 | first slot."""
    first = tag & (SLOTS_MAX - 1)
    return range(first, first + (tag >> 24 & 0xFF))


def _address(keys_N: NDArray[np.void]) -> int:
    assert keys_N.dtype == KEY_DTYPE and keys_N.flags.c_contiguous
    return keys_N.ctypes.data
