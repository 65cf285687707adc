"""Thousands of small reads at a time, by the server, straight into this process's slots.

Shapes: N reads, S slabs of a call.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from h3kv.core.errors import H3Error, RequestError, SlabBusyError, SlabCorruptError, TierBrokenError
from h3kv.core.limits import DIRECT_IO_BYTES
from h3kv.core.ports import EndedReads, FailedRead
from h3kv.core.types import SlabKey, SlotHandle, Tier
from h3kv.tiers.cold.extents import Extent, Phase
from h3kv.tiers.cold.unit_reads import UNIT_READ_DTYPE
from h3kv.tiers.remote import records
from h3kv.tiers.remote.exchange import Exchange
from h3kv.tiers.remote.records import Kind, Record
from h3kv.tiers.remote.session import SharedRanges
from h3kv.tiers.remote.slab_mirror import SlabMirror
from h3kv.tiers.remote.submissions import LISTS_MAX
from h3kv.tiers.remote.transfers import lost

READS_MAX: Final = 4096
"""In one record: 128 KiB."""


@dataclass(frozen=True, slots=True, eq=False)
class _Slabs:
    """The slabs of a call, looked up, and their number with the server."""

    handles: Sequence[SlotHandle]
    changes: int
    extents: list[Extent]
    sizes_S: NDArray[np.uint64]
    retired_S: NDArray[np.bool_]
    number: int | None
    """None: the server cannot be asked now."""


@dataclass(slots=True, eq=False)
class _Call:
    slabs: _Slabs
    reads_N: NDArray[np.void]
    left_N: NDArray[np.bool_]


class RemoteUnits:
    """Starts reads of pieces and collects their ends. Not thread-safe.

    Args:
        mirror: whose slabs they are.
        exchange: how the server is reached.
        memory: that it reaches.
    """

    def __init__(self, mirror: SlabMirror, exchange: Exchange, memory: SharedRanges) -> None:
        self._mirror = mirror
        self._exchange = exchange
        self._memory = memory
        self._check_bytes = mirror.geometry.mark.check_bytes
        self._known: dict[int, _Slabs] = {}
        self._next_list = 1
        self._calls: dict[int, _Call] = {}
        self._tags: list[NDArray[np.uint64]] = []
        self._failed: list[FailedRead] = []
        self.in_flight = 0
        self.ended = 0
        """Reads that `take_ended` would give."""

    def start(self, handles: Sequence[SlotHandle], reads: memoryview) -> None:
        """See `PersistentStore.read_units`."""
        slabs = self._look_up(handles)
        reads_N = np.array(np.frombuffer(reads, dtype=UNIT_READ_DTYPE))
        if not reads_N.size:
            return
        assert records.are_sound_reads(reads_N, slabs.sizes_S, check_bytes=self._check_bytes, align=DIRECT_IO_BYTES), (
            "a read goes beyond what was written, or is not of whole pieces at whole sectors"
        )
        self._check_memory(reads_N)
        if slabs.retired_S.any():
            retired_N = slabs.retired_S[reads_N["slab"]]
            self._fail(slabs, reads_N[retired_N], None)
            reads_N = reads_N[~retired_N]
        if slabs.number is None:
            message = "the process that owns the cold store is gone: units can be read again once it is back"
            self._fail(slabs, reads_N, TierBrokenError(message, tier=Tier.NVME))
            return
        # Reads ahead apart from those that are waited for, so that each call ends as a whole.
        for is_ahead in (0, 1):
            part_N = np.ascontiguousarray(reads_N[reads_N["is_ahead"] == is_ahead])
            for at in range(0, part_N.size, READS_MAX):
                self._send(slabs, part_N[at : at + READS_MAX])
        self._exchange.flush()

    def take(self, record: Record) -> bool:
        """Take a completion if it is of reads."""
        call = self._calls.get(record.number)
        if record.kind is Kind.READ:
            index_N = records.items(record, np.dtype("<u4"))
            if call is not None:
                self._end(record.number, call, index_N)
            return True
        if record.kind is not Kind.FAILED or call is None:
            return False
        failure = records.read_failure(record)
        index_N = np.array(failure.reads, dtype=np.uint32)
        if index_N.size and int(index_N.max()) >= call.reads_N.size:
            raise RequestError("the server of the cold store ended a read that nobody asked for")
        segment = call.slabs.extents[0].segment
        assert segment is not None
        error = failure.error(SlabKey(segment, 0))
        self._fail(call.slabs, call.reads_N[index_N], None if isinstance(error, SlabCorruptError) else error)
        self._close_reads(record.number, call, index_N)
        return True

    def take_ended(self) -> EndedReads:
        """Reads that ended since the last call."""
        tags_N = np.concatenate(self._tags) if self._tags else np.empty(0, dtype=np.uint64)
        failed, self._failed, self._tags, self.ended = self._failed, [], [], 0
        return EndedReads(tags_N.data, tuple(failed))

    def leave(self) -> None:
        """The server is gone, and its lists of slabs with it."""
        self._known.clear()

    def end_all(self, error: H3Error) -> None:
        """What was in flight with it ends so."""
        for number, call in list(self._calls.items()):
            index_N = np.flatnonzero(call.left_N).astype(np.uint32)
            self._fail(call.slabs, call.reads_N[index_N], error)
            self._close_reads(number, call, index_N)

    def _send(self, slabs: _Slabs, reads_N: NDArray[np.void]) -> None:
        assert slabs.number is not None
        number = self._exchange.numbers()
        self._calls[number] = _Call(slabs, reads_N, np.ones(reads_N.size, dtype=np.bool_))
        self.in_flight += reads_N.size
        body = slabs.number.to_bytes(8, "little") + reads_N.tobytes()
        self._exchange.send(records.pack(Kind.UNITS, number, body, count=reads_N.size))

    def _check_memory(self, reads_N: NDArray[np.void]) -> None:
        target_N = reads_N["target"]
        low, high = int(target_N.argmin()), int(target_N.argmax())
        for at in (low, high):
            if not self._memory.holds(int(target_N[at]), int(reads_N["size"][at])):
                raise RequestError("the server of the cold store does not reach this memory: use slots of a region")

    def _look_up(self, handles: Sequence[SlotHandle]) -> _Slabs:
        """The slabs behind handles. The same tuple again is not looked up again unless a slab went meanwhile."""
        segments = self._mirror.segments
        known = self._known.get(id(handles))
        if known is not None and known.handles is handles and known.changes == segments.changes:
            return known
        found = [segments.extents.find(handle) for handle in handles]
        theirs: list[SlotHandle] | None = []
        for extent, layer in found:
            assert extent.segment is not None, "nothing was written there"
            if extent.phase not in {Phase.VISIBLE, Phase.RETIRED}:
                key = SlabKey(extent.segment, layer)
                raise SlabBusyError(f"slab {key} is not visible yet", key=key)
            theirs_L = self._mirror.theirs(extent)
            if theirs is not None and extent.phase is Phase.VISIBLE:
                theirs = None if theirs_L is None else [*theirs, theirs_L[layer]]
        retired_S = np.array([extent.phase is Phase.RETIRED for extent, _ in found], dtype=np.bool_)
        is_known = isinstance(handles, tuple)
        slabs = _Slabs(
            handles,
            segments.changes,
            [extent for extent, _ in found],
            self._mirror.sizes(handles),
            retired_S,
            number=None if theirs is None or not self._exchange.is_open else self._tell(found),
        )
        if is_known and slabs.number is not None:
            if len(self._known) >= LISTS_MAX:
                self._known.clear()
            self._known[id(handles)] = slabs
        return slabs

    def _tell(self, found: Sequence[tuple[Extent, int]]) -> int:
        """Send a list of slabs; retired ones, of which nothing is asked, as the place of another."""
        number = self._next_list
        self._next_list += 1
        readable = [(extent, layer) for extent, layer in found if extent.phase is Phase.VISIBLE]
        rows: list[SlotHandle] = []
        for extent, layer in found:
            at, at_layer = (extent, layer) if extent.phase is Phase.VISIBLE or not readable else readable[0]
            theirs_L = self._mirror.theirs(at)
            rows += [] if theirs_L is None else [theirs_L[at_layer]]
        if len(rows) == len(found):
            self._exchange.send(records.pack(Kind.SLABS, number, records.handle_rows(rows), count=len(rows)))
        return number

    def _end(self, number: int, call: _Call, index_N: NDArray[np.uint32]) -> None:
        if index_N.size and int(index_N.max()) >= call.reads_N.size:
            raise RequestError("the server of the cold store ended a read that nobody asked for")
        tags_N = call.reads_N["tag"][index_N]
        self._tags.append(tags_N)
        self.ended += tags_N.size
        self._close_reads(number, call, index_N)

    def _close_reads(self, number: int, call: _Call, index_N: NDArray[np.uint32]) -> None:
        call.left_N[index_N] = False
        self.in_flight -= index_N.size
        if not call.left_N.any():
            del self._calls[number]

    def _fail(self, slabs: _Slabs, reads_N: NDArray[np.void], error: H3Error | None) -> None:
        """End reads without their bytes; None: their segment is given up."""
        segments = self._mirror.segments
        for tag, slab in zip(reads_N["tag"].tolist(), reads_N["slab"].tolist(), strict=True):
            extent, handle = slabs.extents[slab], slabs.handles[slab]
            assert extent.segment is not None
            if error is None and segments.extents.owns(handle):
                segments.retire(extent)
            fault = lost(SlabKey(extent.segment, extent.layer_of(handle))) if error is None else error
            self._failed.append(FailedRead(tag, handle, fault))
        self.ended += reads_N.size
