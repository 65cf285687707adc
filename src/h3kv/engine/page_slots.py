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
from h3kv.tiers.cold.unit_reads import UNIT_READ_DTYPE

KEY_DTYPE: Final = np.dtype([("segment", "<u8"), ("unit", "<u4"), ("layer", "<u2"), ("reserved", "<u2")])
"""Names one unit, the same 16 bytes as `h3::PageKey`. `unit` counts from the slab's start."""

LOADING: Final = 1
READY: Final = 2
FAILED: Final = 3
"""States of a slot that is pinned."""

SLOTS_MAX: Final = 1 << 24
"""As `kPageSlotsMax`."""

assert KEY_DTYPE.itemsize == 16


@dataclass(frozen=True, slots=True)
class Reads:
    """What has to be read into slots. Valid until the next call of the table."""

    reads_R: NDArray[np.void]
    """UNIT_READ_DTYPE, as `h3::PageRead` has it; `slab` is still to be filled in."""
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


class Pins:
    """Pages of one layer that are pinned for somebody: room that is used again and again, since taking is frequent.

    The native table counts in `pinned_1` what it pins, in the same call: an exception at any moment loses nothing.
    """

    def __init__(self) -> None:
        self._pinned_1 = np.zeros(1, dtype=np.uint64)
        self._reserve(512)

    def __len__(self) -> int:
        return int(self._pinned_1[0])

    def reserve(self, pages: int) -> None:
        """Make room; nothing is pinned now."""
        if pages > len(self._slots_N):
            self._reserve(2 * pages)

    def _reserve(self, pages: int) -> None:
        self._keys_N, self._slots_N = np.zeros(pages, dtype=KEY_DTYPE), np.zeros(pages, dtype=np.uint32)
        self._addresses_N = np.zeros(pages, dtype=np.uint64)
        arrays = (self._keys_N, self._slots_N, self._addresses_N, self._pinned_1)
        keys, slots, addresses, pinned = (array.ctypes.data for array in arrays)
        self.native = (keys, slots, addresses, pinned)
        """Addresses, as `h3::PagesFound` has them."""

    @property
    def keys_N(self) -> NDArray[np.void]:
        """KEY_DTYPE: the unit that holds each. Like the others a view that the next taking writes over."""
        return self._keys_N[: len(self)]

    @property
    def slots_N(self) -> NDArray[np.uint32]:
        """Where the units lie."""
        return self._slots_N[: len(self)]

    @property
    def addresses_N(self) -> NDArray[np.uint64]:
        """Where the pages lie."""
        return self._addresses_N[: len(self)]

    def keep(self, is_kept_N: NDArray[np.bool_]) -> None:
        """Only these are pinned still: the others were given back."""
        kept_N = np.flatnonzero(is_kept_N)
        self._slots_N[: len(kept_N)] = self.slots_N[kept_N]
        self._keys_N[: len(kept_N)] = self.keys_N[kept_N]
        self._pinned_1[0] = len(kept_N)


@dataclass(frozen=True, slots=True)
class Taking:
    """What it takes until pages that were pinned are there."""

    reads: Reads
    """What the caller has to read."""
    missing: int
    """Units of these reads."""
    loading: int
    """Pages that are not there yet, those included that were on their way before."""


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
        page_bytes: size of a page, of which several may share a unit.
        run_units: longest row of neighbours that is read at once.
    """

    def __init__(self, addresses_S: NDArray[np.uint64], *, unit_bytes: int, page_bytes: int, run_units: int) -> None:
        assert 0 < len(addresses_S) <= SLOTS_MAX and addresses_S.dtype == np.uint64
        self._native = _native.PageCache(addresses_S.ctypes.data, len(addresses_S), unit_bytes, run_units)
        self._page_bytes = page_bytes
        self._room = 0
        self._make_room(512)

    def take(self, keys_N: NDArray[np.void]) -> tuple[NDArray[np.uint32], Reads] | None:
        """Pin these units, which may repeat one another where they are neighbours, and make room for what is missing.

        Returns:
            Their slots, and what the caller has to read into them; None, and nothing changed, where there is no room:
            the slots are pinned, or something is being read into them.
        """
        slots_N = np.empty(len(keys_N), dtype=np.uint32)
        self._make_room(len(keys_N))
        started = self._native.take(_address(keys_N), len(keys_N), slots_N.ctypes.data, *self._reads_addresses)
        return None if started < 0 else (slots_N, self._reads(started))

    def keys(self, layer: int, wanted_N: NDArray[np.void]) -> NDArray[np.void]:
        """The units that hold pages of a layer (`attention.retriever.WANTED_DTYPE`): KEY_DTYPE."""
        keys_N = np.empty(len(wanted_N), dtype=KEY_DTYPE)
        self._native.name(_address(wanted_N), len(wanted_N), layer, self._page_bytes, keys_N.ctypes.data)
        return keys_N

    def take_present(self, layer: int, wanted_N: NDArray[np.void], pins: Pins) -> bool:
        """Pin the pages of a layer (`attention.retriever.WANTED_DTYPE`) if all of them are there; or change nothing.

        Those that share a unit are neighbours in `wanted_N`.
        """
        pins.reserve(len(wanted_N))
        address = _address(wanted_N)
        return self._native.take_present(address, len(wanted_N), layer, self._page_bytes, pins.native)

    def take_pages(self, layer: int, wanted_N: NDArray[np.void], pins: Pins) -> Taking | None:
        """Pin the pages of a layer, and make room for what is missing; None, and nothing changed, without room."""
        count = len(wanted_N)
        pins.reserve(count)
        self._make_room(count)
        started, missing, loading = self._native.take_pages(
            _address(wanted_N), count, layer, self._page_bytes, pins.native, *self._reads_addresses
        )
        return None if started < 0 else Taking(self._reads(started), missing, loading)

    def give_back_pins(self, pins: Pins) -> None:
        """Take back whatever is pinned for somebody; a second time nothing is."""
        self._native.give_back_taken(pins.native)

    def present(self, keys_N: NDArray[np.void]) -> int:
        """How many of these, from the first one on, are there or on their way."""
        return self._native.read_ahead(_address(keys_N), len(keys_N), 0, *self._reads_addresses)[1]

    def read_ahead(self, keys_N: NDArray[np.void], *, units: int) -> tuple[Reads, int]:
        """Make room for what is missing of these units, the first ones, so many at most.

        Returns:
            What to read, and how many of the keys were dealt with.
        """
        self._make_room(len(keys_N))
        started, looked_at = self._native.read_ahead(_address(keys_N), len(keys_N), units, *self._reads_addresses)
        return self._reads(started), looked_at

    def end(self, tags_R: NDArray[np.uint64], *, well: bool, ticket: int = 0) -> int:
        """Reads have ended, all of them well or none. Returns how many have this ticket."""
        tags_R = np.ascontiguousarray(tags_R, dtype=np.uint64)
        return self._native.end(tags_R.ctypes.data, len(tags_R), well, ticket) if len(tags_R) else 0

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
    def uses(self) -> int:
        """Units that were taken or read ahead, in total. What was given back stays at least until as many were used
        since as there are slots that nobody pins.
        """
        return self._native.uses

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

    def _reads(self, started: int) -> Reads:
        return Reads(self._reads_R[:started], self._segments_R[:started])

    def _make_room(self, reads: int) -> None:
        if self._room < reads:
            self._room = 2 * reads
            self._reads_R = np.zeros(self._room, dtype=UNIT_READ_DTYPE)
            self._segments_R = np.zeros(self._room, dtype=np.uint64)
            self._reads_addresses = (self._reads_R.ctypes.data, self._segments_R.ctypes.data)


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


def _address(records_N: NDArray[np.void]) -> int:
    assert records_N.itemsize == KEY_DTYPE.itemsize and records_N.flags.c_contiguous
    return records_N.ctypes.data
