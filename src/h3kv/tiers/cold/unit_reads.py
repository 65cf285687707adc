"""Thousands of small reads at a time: pieces of slabs straight into the caller's memory, each checked.

No object is made for a read: a call hands one array to the engine, and results come back as arrays. Shapes: N reads,
S slabs of a call.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from h3kv.core.errors import SlabBusyError
from h3kv.core.limits import DIRECT_IO_BYTES
from h3kv.core.types import SlabKey, SlotHandle
from h3kv.tiers.cold.data_writes import DataWrites
from h3kv.tiers.cold.extents import Extent, Phase
from h3kv.tiers.cold.ops import UNITS_TAG, OpQueue, Outcome
from h3kv.tiers.cold.segments import Segments
from h3kv.tiers.io import CHECKSUM_MISMATCH, OK, OP_DTYPE, describe

UNIT_READ_DTYPE: Final = np.dtype(
    [("tag", "<u8"), ("target", "<u8"), ("slab", "<u4"), ("offset", "<u4"), ("size", "<u4"), ("is_ahead", "<u4")]
)
"""One read, as `PersistentStore.read_units` draws it."""

_INDEX_BITS: Final = 24
"""Of an op's tag: which read of its call it is. A call has fewer reads, 64 GiB of them."""

_KNOWN_MAX: Final = 1024
"""Tuples of slabs that are remembered: as many as the layers of some sequences."""

assert UNIT_READ_DTYPE.itemsize == 32


@dataclass(frozen=True, slots=True, eq=False)
class _Slabs:
    """The slabs of a call, looked up."""

    handles: tuple[SlotHandle, ...]
    changes: int
    """`Segments.changes` when they were looked up."""
    extents: list[Extent]
    offsets_S: NDArray[np.uint64]
    """In the volume."""
    crcs_S: NDArray[np.uint64]
    """Addresses of the checksums."""
    sizes_S: NDArray[np.uint64]
    """Bytes that were written."""
    retired_S: NDArray[np.bool_]


@dataclass(slots=True, eq=False)
class _Call:
    """Reads that were started together. Their room is not handed out again before all of them ended."""

    slabs: _Slabs
    reads_N: NDArray[np.void]
    used: list[tuple[Extent, int]]
    """Extents, and how many of the reads are of them."""
    left: int


@dataclass(frozen=True, slots=True)
class FailedUnit:
    """A read that brought nothing."""

    tag: int
    source: SlotHandle
    extent: Extent
    fault: Outcome


class UnitReads:
    """Starts reads of pieces and collects their ends."""

    def __init__(self, ops: OpQueue, writes: DataWrites, segments: Segments, *, check_bytes: int) -> None:
        self._ops = ops
        self._writes = writes
        self._segments = segments
        self._check_bytes = np.uint64(check_bytes)
        self._known: dict[int, _Slabs] = {}
        self._calls: dict[int, _Call] = {}
        self._next_call = 0
        self._tags: list[NDArray[np.uint64]] = []
        self._failed: list[FailedUnit] = []
        self._idle: list[Extent] = []
        self.in_flight = 0
        self.ended = 0
        """Reads that `take_ended` would give."""
        self.read_bytes = 0
        """In total, by reads that brought what was written."""
        ops.serve_units(self._end)

    def start(self, handles: Sequence[SlotHandle], reads: memoryview) -> None:
        """See `PersistentStore.read_units`."""
        slabs = self._look_up(handles)
        reads_N = np.array(np.frombuffer(reads, dtype=UNIT_READ_DTYPE))
        if not reads_N.size:
            return
        self._check(slabs, reads_N)
        retired_N = slabs.retired_S[reads_N["slab"]]
        if retired_N.any():
            self._fail(slabs, reads_N[retired_N], Outcome(CHECKSUM_MISMATCH, "given up before"))
            reads_N = reads_N[~retired_N]
        if reads_N.size:
            self._begin(slabs, reads_N)

    def _begin(self, slabs: _Slabs, reads_N: NDArray[np.void]) -> None:
        """Hand reads to the engine."""
        index_N, offset_N = reads_N["slab"], reads_N["offset"].astype(np.uint64)
        counts = np.bincount(index_N, minlength=len(slabs.handles))
        used = [(slabs.extents[slab], int(counts[slab])) for slab in np.flatnonzero(counts).tolist()]
        for extent, count in used:
            extent.fetches += count
        ops_N = np.zeros(reads_N.size, dtype=OP_DTYPE)
        ops_N["tag"] = np.arange(reads_N.size, dtype=np.uint64) + np.uint64(UNITS_TAG | self._next_call << _INDEX_BITS)
        ops_N["offset"] = slabs.offsets_S[index_N] + offset_N
        ops_N["address"], ops_N["size"] = reads_N["target"], reads_N["size"]
        ops_N["crcs"] = slabs.crcs_S[index_N] + offset_N // self._check_bytes * np.uint64(4)
        ops_N["page_bytes"] = self._check_bytes
        self._calls[self._next_call] = _Call(slabs, reads_N, used, reads_N.size)
        self._next_call += 1
        self.in_flight += reads_N.size
        self._ops.submit_units(ops_N)

    def take_ended(self) -> tuple[NDArray[np.uint64], list[FailedUnit]]:
        """Tags of reads that came whole since the last call, and what failed."""
        tags_N = np.concatenate(self._tags) if self._tags else np.empty(0, dtype=np.uint64)
        failed, self._failed, self._tags, self.ended = self._failed, [], [], 0
        return tags_N, failed

    def take_idle(self) -> list[Extent]:
        """Extents of which calls ended since the last call."""
        idle, self._idle = self._idle, []
        return idle

    def _look_up(self, handles: Sequence[SlotHandle]) -> _Slabs:
        """The slabs behind handles. The same tuple again is not looked up again unless a slab went meanwhile."""
        known = self._known.get(id(handles))
        if known is not None and known.handles is handles and known.changes == self._segments.changes:
            return known
        found = [self._segments.extents.find(handle) for handle in handles]
        for extent, layer in found:
            assert extent.segment is not None, "nothing was written there"
            if extent.phase not in {Phase.VISIBLE, Phase.RETIRED}:
                key = SlabKey(extent.segment, layer)
                raise SlabBusyError(f"slab {key} is not visible yet", key=key)
            assert not extent.wrapped_L[layer], "a wrapped slab is read whole"
        slabs = _Slabs(
            tuple(handles),
            self._segments.changes,
            [extent for extent, _ in found],
            np.array([self._writes.slab_offset(*each) for each in found], dtype=np.uint64),
            np.array([extent.crcs_address(layer) for extent, layer in found], dtype=np.uint64),
            sizes_S=np.array([extent.pieces * int(self._check_bytes) for extent, _ in found], dtype=np.uint64),
            retired_S=np.array([extent.phase is Phase.RETIRED for extent, _ in found], dtype=np.bool_),
        )
        if slabs.handles is handles:
            if len(self._known) >= _KNOWN_MAX:
                self._known.clear()
            self._known[id(handles)] = slabs
        return slabs

    def _check(self, slabs: _Slabs, reads_N: NDArray[np.void]) -> None:
        assert reads_N.size < 1 << _INDEX_BITS
        assert int(reads_N["slab"].max()) < len(slabs.handles), "a read names a slab that is not there"
        offset_N, size_N = reads_N["offset"].astype(np.uint64), reads_N["size"].astype(np.uint64)
        assert bool((offset_N + size_N <= slabs.sizes_S[reads_N["slab"]]).all()), "a read goes beyond what was written"
        assert not (offset_N % self._check_bytes).any() and not (size_N % self._check_bytes).any(), "not whole pieces"
        assert bool(size_N.all()) and not (reads_N["target"] % DIRECT_IO_BYTES).any(), "a target is not aligned"

    def _end(self, results_N: NDArray[np.void]) -> None:
        """Take notice of results, all of them with the mark of these reads in their tags."""
        tags_N = results_N["tag"] ^ np.uint64(UNITS_TAG)
        number_N = tags_N >> np.uint64(_INDEX_BITS)
        index_N = (tags_N & np.uint64((1 << _INDEX_BITS) - 1)).astype(np.int64)
        for number in np.unique(number_N).tolist():
            mine_N = number_N == number
            self._end_of_call(number, index_N[mine_N], results_N[mine_N])

    def _end_of_call(self, number: int, index_N: NDArray[np.int64], results_N: NDArray[np.void]) -> None:
        call = self._calls[number]
        good_N = results_N["status"] == OK
        read_N = call.reads_N[index_N[good_N]]
        self._tags.append(read_N["tag"].copy())
        self.ended += read_N.size
        self.read_bytes += int(read_N["size"].sum())
        for index, result in zip(index_N[~good_N], results_N[~good_N], strict=True):
            fault = Outcome(int(result["status"]), describe(result))
            self._fail(call.slabs, call.reads_N[index : index + 1], fault)
        self.in_flight -= index_N.size
        call.left -= index_N.size
        if call.left == 0:
            del self._calls[number]
            for extent, count in call.used:
                extent.fetches -= count
                self._idle.append(extent)

    def _fail(self, slabs: _Slabs, reads_N: NDArray[np.void], fault: Outcome) -> None:
        self.ended += reads_N.size
        for tag, slab in zip(reads_N["tag"].tolist(), reads_N["slab"].tolist(), strict=True):
            self._failed.append(FailedUnit(tag, slabs.handles[slab], slabs.extents[slab], fault))
