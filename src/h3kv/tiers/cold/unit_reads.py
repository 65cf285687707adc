"""Thousands of small reads at a time: pieces of slabs straight into the caller's memory, each checked.

No object is made for a read: a call hands one array to the engine, and results come back as arrays. Shapes: N reads,
S slabs of a call.
"""

from __future__ import annotations

import functools
from collections import deque
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
from h3kv.tiers.cold.ops import ARRAY_OPS_MAX, OpQueue, Outcome
from h3kv.tiers.cold.segments import Segments
from h3kv.tiers.io import CHECKSUM_MISMATCH, OK, OP_DTYPE, describe

UNIT_READ_DTYPE: Final = np.dtype(
    [("tag", "<u8"), ("target", "<u8"), ("slab", "<u4"), ("offset", "<u4"), ("size", "<u4"), ("is_ahead", "<u4")]
)
"""One read, as `PersistentStore.read_units` draws it."""

_KNOWN_MAX: Final = 1024
"""Tuples of slabs that are remembered: as many as the layers of some sequences."""

AHEAD_IN_FLIGHT_MAX: Final = 256
"""Reads ahead that the engine holds: it takes ops in order, so that a read that is waited for stands behind so many at
most, half a millisecond of a fast disk. Further ones are held back here."""

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
        self._held: deque[NDArray[np.void]] = deque()
        self._ahead = 0
        self._tags: list[NDArray[np.uint64]] = []
        self._failed: list[FailedUnit] = []
        self._idle: list[Extent] = []
        self.in_flight = 0
        self._held_count = 0
        self.ended = 0
        """Reads that `take_ended` would give."""
        self.read_bytes = 0
        """In total, by reads that brought what was written."""

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
        call = _Call(slabs, reads_N, used, reads_N.size)
        first_tag = self._ops.open_array(reads_N.size, functools.partial(self._end, call))
        ops_N["tag"] = np.arange(reads_N.size, dtype=np.uint64) + np.uint64(first_tag)
        ops_N["offset"] = slabs.offsets_S[index_N] + offset_N
        ops_N["address"], ops_N["size"] = reads_N["target"], reads_N["size"]
        ops_N["crcs"] = slabs.crcs_S[index_N] + offset_N // self._check_bytes * np.uint64(4)
        ops_N["page_bytes"] = self._check_bytes
        self.in_flight += reads_N.size
        is_ahead_N = reads_N["is_ahead"] != 0
        if not is_ahead_N.any():
            self._ops.submit_array(ops_N)
            return
        urgent_N, ahead_N = ops_N[~is_ahead_N], ops_N[is_ahead_N]
        if urgent_N.size:
            self._ops.submit_array(urgent_N)
        self._held.append(ahead_N)
        self._held_count += ahead_N.size
        self.top_up()

    @property
    def in_engine(self) -> int:
        """Reads in flight that are not held back."""
        return self.in_flight - self._held_count

    def top_up(self) -> None:
        """Begin reads ahead that were held back, as far as the engine has room for them."""
        while self._held and self._ahead < AHEAD_IN_FLIGHT_MAX:
            ops_N, room = self._held.popleft(), AHEAD_IN_FLIGHT_MAX - self._ahead
            if ops_N.size > room:
                self._held.appendleft(ops_N[room:])
                ops_N = np.ascontiguousarray(ops_N[:room])
            self._ahead += ops_N.size
            self._held_count -= ops_N.size
            self._ops.submit_array(ops_N)

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
        assert reads_N.size < ARRAY_OPS_MAX
        assert int(reads_N["slab"].max()) < len(slabs.handles), "a read names a slab that is not there"
        offset_N, size_N = reads_N["offset"].astype(np.uint64), reads_N["size"].astype(np.uint64)
        assert bool((offset_N + size_N <= slabs.sizes_S[reads_N["slab"]]).all()), "a read goes beyond what was written"
        assert not (offset_N % self._check_bytes).any() and not (size_N % self._check_bytes).any(), "not whole pieces"
        assert bool(size_N.all()) and not (reads_N["target"] % DIRECT_IO_BYTES).any(), "a target is not aligned"

    def _end(self, call: _Call, index_N: NDArray[np.int64], results_N: NDArray[np.void]) -> None:
        """Take notice of reads of one call."""
        good_N = results_N["status"] == OK
        read_N = call.reads_N[index_N[good_N]]
        self._tags.append(read_N["tag"].copy())
        self.ended += read_N.size
        self.read_bytes += int(read_N["size"].sum())
        for index, result in zip(index_N[~good_N], results_N[~good_N], strict=True):
            fault = Outcome(int(result["status"]), describe(result))
            self._fail(call.slabs, call.reads_N[index : index + 1], fault)
        self._ahead -= int(np.count_nonzero(call.reads_N["is_ahead"][index_N]))
        self.in_flight -= index_N.size
        call.left -= index_N.size
        if call.left == 0:
            for extent, count in call.used:
                extent.fetches -= count
                self._idle.append(extent)

    def _fail(self, slabs: _Slabs, reads_N: NDArray[np.void], fault: Outcome) -> None:
        self.ended += reads_N.size
        for tag, slab in zip(reads_N["tag"].tolist(), reads_N["slab"].tolist(), strict=True):
            self._failed.append(FailedUnit(tag, slabs.handles[slab], slabs.extents[slab], fault))
