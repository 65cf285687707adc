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

from h3kv import _native
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
    any_retired: bool
    addresses: tuple[int, int, int, int]
    """Of `offsets_S`, `crcs_S` and `sizes_S`, and how many they are."""


@dataclass(slots=True, eq=False)
class _Call:
    """Reads that were started together. Their room is not handed out again before all of them ended."""

    slabs: _Slabs
    reads_N: NDArray[np.void]
    left: int
    ahead: int = 0
    """How many of them are ahead."""
    extents_N: Sequence[Extent] = ()


@dataclass(frozen=True, slots=True)
class FailedUnit:
    """A read that brought nothing."""

    tag: int
    source: SlotHandle
    extent: Extent
    fault: Outcome

    @property
    def met(self) -> tuple[SlabKey, Extent, Outcome]:
        """What was read, and what came of it."""
        assert self.extent.segment is not None
        return SlabKey(self.extent.segment, self.extent.layer_of(self.source)), self.extent, self.fault


class UnitReads:
    """Starts reads of pieces and collects their ends."""

    def __init__(self, ops: OpQueue, writes: DataWrites, segments: Segments, *, check_bytes: int) -> None:
        self._ops = ops
        self._writes = writes
        self._segments = segments
        self._check_bytes = check_bytes
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
        if slabs.any_retired:
            retired_N = slabs.retired_S[reads_N["slab"]]
            self._fail(slabs, reads_N[retired_N], Outcome(CHECKSUM_MISMATCH, "given up before"))
            reads_N = reads_N[~retired_N]
        if reads_N.size:
            self._begin(slabs, reads_N)

    def _begin(self, slabs: _Slabs, reads_N: NDArray[np.void]) -> None:
        """Hand reads to the engine."""
        count = reads_N.size
        assert count < ARRAY_OPS_MAX
        call = _Call(slabs, reads_N, left=count)
        ops_N = np.empty(count, dtype=OP_DTYPE)
        sound, call.ahead = _native.unit_ops(
            reads_N.ctypes.data,
            count,
            *slabs.addresses,
            self._check_bytes,
            self._ops.open_array(count, functools.partial(self._end, call)),
            DIRECT_IO_BYTES,
            ops_N.ctypes.data,
        )
        assert sound == count, f"read {sound} goes beyond what was written, or is not of whole pieces at whole sectors"
        call.extents_N = [slabs.extents[slab] for slab in reads_N["slab"].tolist()]
        for extent in call.extents_N:
            extent.fetches += 1
        self.in_flight += count
        if not call.ahead:
            self._ops.submit_array(ops_N)
            return
        is_ahead_N = reads_N["is_ahead"]
        if call.ahead < count:
            self._ops.submit_array(ops_N[is_ahead_N == 0])
            ops_N = ops_N[is_ahead_N != 0]
        self._held.append(ops_N)
        self._held_count += call.ahead
        self.top_up()

    def results_awaited(self, reads: int) -> int:
        """How many results to wait for until so many reads have ended.

        Where reads are held back it is half of what the engine has at most, so that they follow before it has none.
        """
        return max(1, min(reads, self.in_engine // 2 if self._held else self.in_engine))

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
        offsets_S = np.array([self._writes.slab_offset(*each) for each in found], dtype=np.uint64)
        crcs_S = np.array([extent.crcs_address(layer) for extent, layer in found], dtype=np.uint64)
        sizes_S = np.array([extent.pieces * self._check_bytes for extent, _ in found], dtype=np.uint64)
        retired_S = np.array([extent.phase is Phase.RETIRED for extent, _ in found], dtype=np.bool_)
        slabs = _Slabs(
            tuple(handles),
            self._segments.changes,
            [extent for extent, _ in found],
            offsets_S,
            crcs_S,
            sizes_S=sizes_S,
            retired_S=retired_S,
            any_retired=bool(retired_S.any()),
            addresses=(offsets_S.ctypes.data, crcs_S.ctypes.data, sizes_S.ctypes.data, len(found)),
        )
        if slabs.handles is handles:
            if len(self._known) >= _KNOWN_MAX:
                self._known.clear()
            self._known[id(handles)] = slabs
        return slabs

    def _end(self, call: _Call, index_N: NDArray[np.int64], results_N: NDArray[np.void]) -> None:
        """Take notice of reads of one call."""
        is_whole = index_N.size == call.reads_N.size
        ended_N = call.reads_N if is_whole else call.reads_N[index_N]
        if call.ahead:
            self._ahead -= int(np.count_nonzero(ended_N["is_ahead"]))
        bad_N = results_N["status"] != OK
        if bad_N.any():
            for index, result in zip(index_N[bad_N], results_N[bad_N], strict=True):
                fault = Outcome(int(result["status"]), describe(result))
                self._fail(call.slabs, call.reads_N[index : index + 1], fault)
            ended_N = call.reads_N[index_N[~bad_N]]
        self._tags.append(ended_N["tag"])
        self.ended += ended_N.size
        self.read_bytes += int(ended_N["size"].sum())
        self.in_flight -= index_N.size
        call.left -= index_N.size
        if call.left == 0:
            for extent in call.extents_N:
                extent.fetches -= 1
            self._idle += dict.fromkeys(call.extents_N)

    def _fail(self, slabs: _Slabs, reads_N: NDArray[np.void], fault: Outcome) -> None:
        self.ended += reads_N.size
        for tag, slab in zip(reads_N["tag"].tolist(), reads_N["slab"].tolist(), strict=True):
            self._failed.append(FailedUnit(tag, slabs.handles[slab], slabs.extents[slab], fault))
