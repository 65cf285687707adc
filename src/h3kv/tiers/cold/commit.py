"""How segments get onto the disk: data, flush, headers, flush, and only then a completion.

    old headers undone,     areas claimed        data of all segments     headers          done
    new areas blanked
    ----------------------> -------------------> -----------------------> ---------------> ----
        flush (if needed)     flush (if any)             flush                 flush

One batch at a time; what is submitted meanwhile shares the flushes of the next one. Giving an extent back undoes its
header on the disk. That goes along with the next batch's data, unless this batch writes where such an extent lay: then
it is flushed first. So at any moment the disk holds, for each header that can be read, the data that it tells of, or
zeros: of what is erased, zeros are written along with the data, and its header is undone along with the headers. Then
nobody loses sight of data that still lies there. Where segments are wrapped, other threads do that before the first
step.
"""

from __future__ import annotations

import functools
from collections.abc import Generator, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from h3kv.core.errors import TierBrokenError
from h3kv.core.types import Tier
from h3kv.core.units import NS_PER_MS
from h3kv.tiers.cold.budget import WriteBudget
from h3kv.tiers.cold.codec import Codec
from h3kv.tiers.cold.data_writes import WRAPPED_BYTES, DataWrites, WrapJob
from h3kv.tiers.cold.extents import Extent
from h3kv.tiers.cold.geometry import AreaGeometry
from h3kv.tiers.cold.header import ExtentHeader, pack_header
from h3kv.tiers.cold.ops import Op, Outcome, address_of, aligned_memory, write_of
from h3kv.tiers.cold.record import SECTOR_BYTES
from h3kv.tiers.cold.room import Room
from h3kv.tiers.cold.superblock import AreaEntry
from h3kv.tiers.cold.volume import Volume
from h3kv.tiers.io import ERROR, FLUSH, OK, WRITE, describe

_BLANK_BYTES: Final = 1 << 20
"""Of one write of zeros."""

_STEP_NS: Final = 100 * NS_PER_MS
"""How long one look at the device takes at most. The engine's own deadline bounds the whole."""

BATCH_BYTES_MAX: Final = 256 << 20
"""Of data in one batch, unless one segment is larger: completions do not wait for all of a long queue."""


@dataclass(frozen=True, slots=True)
class _Undo:
    """A header that goes."""

    block: int
    """First block of its extent."""
    cells: int
    """Header cells that are blanked from there on."""
    blocks: int
    """From there on, whose data may belong to it."""


@dataclass(frozen=True, slots=True)
class _Step:
    """What runs side by side."""

    ops: Sequence[Op] = ()
    jobs: Sequence[WrapJob] = ()
    """To be run."""
    data: Sequence[WrapJob] = ()
    """That have ended, and whose writes are to be done."""


@dataclass(slots=True)
class _Batch:
    extents: list[Extent]
    undone: list[_Undo]
    erased: list[Extent]
    failure: Outcome | None = None
    open_ops: int = 0


class Commits:
    """Writes whole segments batch by batch, step by step; no call waits.

    Args:
        volume: where they go.
        room: whose areas are claimed on the disk before anything is written into them.
        writes: makes the ops of slabs.
        geometry: of this model's areas.
        codec: wraps the segments; None: they are written as they are.
        fingerprint: of this model.
        budget: counts what is written.
    """

    def __init__(
        self,
        volume: Volume,
        room: Room,
        writes: DataWrites,
        geometry: AreaGeometry,
        *,
        codec: Codec | None,
        fingerprint: bytes,
        budget: WriteBudget,
    ) -> None:
        self._volume = volume
        self._room = room
        self._writes = writes
        self._codec = codec
        self._batch_bytes_max = BATCH_BYTES_MAX if codec is None else WRAPPED_BYTES
        self._geometry = geometry
        self._fingerprint = fingerprint
        self._budget = budget
        self._queue: list[Extent] = []
        self._undo: list[_Undo] = []
        self._undo_is_urgent = False
        self._erasures: list[Extent] = []
        self._erased: list[Extent] = []
        self._batch: _Batch | None = None
        self._steps: Generator[_Step, None, None] | None = None
        self._serial = volume.superblock.epoch << 32
        self.broken: TierBrokenError | None = None
        """Why nothing more is written."""
        self.written_bytes = 0
        """In total, headers and tables included."""
        self.areas_taken = 0
        """Areas in which KV of another model lay, now given to this one."""

    @property
    def is_busy(self) -> bool:
        """Whether a batch is running or can start."""
        is_wanted = bool(self._queue or self._erasures) or self._undo_is_urgent
        return self._batch is not None or (self.broken is None and is_wanted)

    def check_unbroken(self) -> None:
        """Raise TierBrokenError where writing failed."""
        if self.broken is not None:
            # A new one each time: the first is in completions, and would gather the traces of all who meet it.
            raise TierBrokenError(str(self.broken), tier=Tier.NVME)

    @property
    def open_ops(self) -> int:
        """Ops and jobs of the running step that have not ended."""
        return 0 if self._batch is None else self._batch.open_ops

    @property
    def results_awaited(self) -> int:
        """How many results it takes before anything can end: a step of a batch goes on with the last of its own."""
        return self.open_ops if self.open_ops == self._volume.ops.in_flight else 1

    def write(self, extent: Extent) -> None:
        """Queue an extent whose slabs were all submitted."""
        self._queue.append(extent)

    def undo(self, extent: Extent, *, urgent: bool = False) -> None:
        """Have an extent's header taken from the disk: with the next batch, or in one of its own."""
        if extent.is_on_disk and self.broken is None and not extent.is_erased:
            extent.is_on_disk = False
            self.undo_header(extent.block, cells=extent.blocks, blocks=extent.blocks)
            self._undo_is_urgent |= urgent

    def erase(self, extent: Extent) -> None:
        """Have zeros over an idle extent's data, and then its header undone: see `take_erased`."""
        self._erasures.append(extent)

    def take_erased(self) -> list[Extent]:
        """Extents of `erase` of which nothing is left on the disk, since the last call."""
        erased, self._erased = self._erased, []
        return erased

    def undo_header(self, block: int, *, cells: int, blocks: int) -> None:
        """Have the header at a block taken from the disk with the next batch.

        Args:
            block: the first of its extent.
            cells: that it takes in the header table. All of them are blanked, so that in an area each cell is zero, or
                a part of a whole header, or damaged.
            blocks: whose data may belong to it.
        """
        self._undo.append(_Undo(block, cells, blocks))

    def finish_undoing(self) -> None:
        """Take off the disk what waits for that, and wait for it. Does nothing while segments are being written."""
        if self._batch is not None or self._queue:
            return
        self._undo_is_urgent = bool(self._undo)
        while self._advance_and_look():
            self._volume.ops.wait(_STEP_NS)
            self._volume.ops.poll()

    def advance(self) -> list[tuple[Extent, TierBrokenError | None]]:
        """Take every step that can be taken now. Extents whose writing ended, the oldest first, each with its error."""
        ended: list[tuple[Extent, TierBrokenError | None]] = []
        while self._batch is None or self._batch.open_ops == 0:
            if self._batch is None and not self._start():
                break
            assert self._batch is not None
            if not self._step(self._batch):
                ended += [(extent, self.broken) for extent in self._batch.extents]
                self._erased += [] if self.broken is not None else self._batch.erased
                self._batch = None
        if self.broken is not None:
            ended += [(extent, self.broken) for extent in self._queue]
            self._queue.clear()
        return ended

    def _advance_and_look(self) -> bool:
        """Advance; whether a batch is running."""
        self.advance()
        return self._batch is not None

    def _start(self) -> bool:
        """Begin the next batch, if there is anything for it."""
        if not self.is_busy:
            return False
        self._batch = _Batch(self._fitting(self._queue), self._undo, self._fitting(self._erasures))
        self._undo, self._undo_is_urgent = [], False
        self._steps = self._run(self._batch)
        return True

    def _fitting(self, queue: list[Extent]) -> list[Extent]:
        """The oldest segments, as many as fit one batch; taken out of the queue."""
        size, count = 0, 0
        for extent in queue:
            size += extent.blocks * self._geometry.block_bytes
            if count and size > self._batch_bytes_max:
                break
            count += 1
        taken = queue[:count]
        del queue[:count]
        return taken

    def _step(self, batch: _Batch) -> bool:
        """Submit the batch's next ops. False: it has ended."""
        assert self._steps is not None
        step = None if batch.failure is not None else next(self._steps, None)
        if batch.failure is not None:
            self.broken = TierBrokenError(
                f"writing to {self._volume.place.path} failed: {batch.failure}; what it holds can still be read. Check "
                "the device and its free space, and open the store again",
                tier=Tier.NVME,
            )
        if step is None:
            # Memory that the batch had is given back here, however it ended.
            self._steps.close()
            return False
        data_N = np.concatenate([job.ops_N for job in step.data]) if step.data else None
        batch.open_ops = len(step.ops) + len(step.jobs) + (0 if data_N is None else data_N.size)
        if step.ops:
            self.written_bytes += sum(op.size for op in step.ops)
            self._volume.ops.submit(step.ops, lambda outcome: self._note(batch, outcome))
        if data_N is not None:
            self.written_bytes += int(data_N["size"].sum())
            first_tag = self._volume.ops.open_array(data_N.size, functools.partial(self._note_array, batch))
            data_N["tag"] = np.arange(data_N.size, dtype=np.uint64) + np.uint64(first_tag)
            self._volume.ops.submit_array(data_N)
        for job in step.jobs:
            assert self._codec is not None
            self._codec.start(job)
        return True

    def _wrap_jobs(self, batch: _Batch) -> list[WrapJob]:
        def note(failure: Exception | None) -> None:
            batch.open_ops -= 1
            if failure is not None and batch.failure is None:
                batch.failure = Outcome(ERROR, f"a slab could not be made ready ({failure!r})")

        return [WrapJob(self._writes, extent, note) for extent in batch.extents if extent.owned_layers]

    def _note(self, batch: _Batch, outcome: Outcome) -> None:
        batch.open_ops -= 1
        if not outcome.is_good and batch.failure is None:
            batch.failure = outcome

    def _note_array(self, batch: _Batch, _: NDArray[np.int64], results_N: NDArray[np.void]) -> None:
        batch.open_ops -= results_N.size
        bad_N = results_N[results_N["status"] != OK]
        if bad_N.size and batch.failure is None:
            batch.failure = Outcome(int(bad_N[0]["status"]), describe(bad_N[0]))

    def _run(self, batch: _Batch) -> Generator[_Step, None, None]:
        """The steps of a batch; each is submitted when all of the one before has succeeded."""
        jobs = [] if self._codec is None else self._wrap_jobs(batch)
        if jobs:
            yield _Step(jobs=jobs)
        first = [self._undo_write(undo) for undo in batch.undone]
        claimed, early_bytes = self._room.take_claims(), 0
        if claimed or _overlap(batch.extents, batch.undone):
            first += [op for area in claimed for op in self._blank_writes(area)]
            early_bytes = sum(op.size for op in first)
            yield _Step(first)
            yield _Step([Op(kind=FLUSH)])
            first = [self._claim_write(area) for area in claimed]
        if claimed:
            yield _Step(first)
            yield _Step([Op(kind=FLUSH)])
            first = []
        wanted = [extent for extent in batch.extents if extent.owned_layers]
        data = [op for extent in wanted for op in self._writes.plain(extent)] if self._codec is None else []
        first += [op for extent in batch.erased for op in self._zero_writes(extent)]
        if first or data or jobs:
            size = sum(op.size for op in [*first, *data]) + sum(int(job.ops_N["size"].sum()) for job in jobs)
            cells = sum(extent.blocks for extent in [*wanted, *batch.erased])
            headers_bytes = cells * self._geometry.header_bytes
            spent = self._budget.spend(early_bytes + size + headers_bytes + SECTOR_BYTES)
            try:
                yield _Step([*first, *data, spent], data=jobs)
            finally:
                for job in jobs:
                    job.give_back()
            yield _Step([Op(kind=FLUSH)])
        whole = [extent for extent in wanted if extent.owned_layers == len(extent.handles_L)]
        if whole or batch.erased:
            gone = [self._undo_write(_Undo(extent.block, extent.blocks, extent.blocks)) for extent in batch.erased]
            yield _Step([*gone, *(self._header_write(extent) for extent in whole)])
            yield _Step([Op(kind=FLUSH)])

    def _header_write(self, extent: Extent) -> Op:
        self._serial += 1
        extent.is_on_disk = True
        header = ExtentHeader(
            self._fingerprint,
            self._serial,
            extent.blocks,
            extent.pieces,
            extent.label,
            wrapped_L=extent.wrapped_L,
            crcs_LC=extent.crcs_LC,
        )
        return write_of(self._header_offset(extent.block), pack_header(header, self._geometry))

    def _undo_write(self, undo: _Undo) -> Op:
        return write_of(self._header_offset(undo.block), bytes(undo.cells * self._geometry.header_bytes))

    def _header_offset(self, block: int) -> int:
        area, block = divmod(block, self._geometry.blocks)
        return self._volume.geometry.area_offset(area) + self._geometry.header_offset(block)

    def _blank_writes(self, area: int) -> list[Op]:
        """Zeros over an area's header table: what its owner before left there is gone before the area is ours."""
        return _zeros(self._volume.geometry.area_offset(area), self._geometry.table_bytes)

    def _zero_writes(self, extent: Extent) -> list[Op]:
        """Zeros over all slabs of an extent, which lie one after the other."""
        area, block = divmod(extent.block, self._geometry.blocks)
        first = self._geometry.slab_offset(block, 0, blocks=extent.blocks)
        size = self._geometry.slab_bytes(extent.blocks) * len(extent.handles_L)
        return _zeros(self._volume.geometry.area_offset(area) + first, size)

    def _claim_write(self, area: int) -> Op:
        self._serial += 1
        epoch = self._volume.superblock.epoch
        before = self._volume.areas[area]
        self.areas_taken += before is not None and before.fingerprint != self._fingerprint
        entry = AreaEntry(self._fingerprint, self._geometry.mark, claimed=self._serial, used=epoch)
        return self._volume.area_write(area, entry)


def _zeros(offset: int, size: int) -> list[Op]:
    """Writes of zeros over a range of whole sectors."""
    zeros = aligned_memory(min(_BLANK_BYTES, size))
    address = address_of(zeros)
    return [
        Op(kind=WRITE, offset=offset + at, address=address, size=min(_BLANK_BYTES, size - at), keep=zeros)
        for at in range(0, size, _BLANK_BYTES)
    ]


def _overlap(extents: Sequence[Extent], undone: Sequence[_Undo]) -> bool:
    """Whether an extent to be written lies where one lay whose header is still on the disk."""
    return any(
        extent.block < undo.block + undo.blocks and undo.block < extent.block + extent.blocks
        for extent in extents
        for undo in undone
    )
