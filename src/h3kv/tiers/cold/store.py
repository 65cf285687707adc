"""The cold tier: segments of one model on a file or block device, found again after a restart."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path

from h3kv.core.errors import ConfigError, TierBrokenError, TierClosedError
from h3kv.core.layout import CacheLayout
from h3kv.core.ports import EndedReads, FailedRead, Telemetry
from h3kv.core.types import (
    Completion,
    Fetch,
    Move,
    SegmentId,
    SlabKey,
    SlotHandle,
    StoredSegment,
    StoreStatistics,
    Tier,
)
from h3kv.core.units import describe_size
from h3kv.memory.bell import Bell
from h3kv.memory.buddy import extent_class
from h3kv.memory.copies import CopyMeter
from h3kv.tiers.cold.budget import WriteBudget
from h3kv.tiers.cold.codec import Codec
from h3kv.tiers.cold.commit import Commits
from h3kv.tiers.cold.config import ColdStoreConfig
from h3kv.tiers.cold.data_writes import DataWrites
from h3kv.tiers.cold.extents import Extent, Phase
from h3kv.tiers.cold.fetches import Fetches
from h3kv.tiers.cold.geometry import BUDGET_OFFSET, AreaGeometry, ColdLayout, cold_layout, layout_mark
from h3kv.tiers.cold.meter import Meter
from h3kv.tiers.cold.ops import Outcome
from h3kv.tiers.cold.read_back import read_back
from h3kv.tiers.cold.record import TWIN_BYTES
from h3kv.tiers.cold.recovery import belongs
from h3kv.tiers.cold.refusals import budget_spent, given_up, no_room
from h3kv.tiers.cold.room import Room
from h3kv.tiers.cold.seam import EngineFactory
from h3kv.tiers.cold.segments import Segments
from h3kv.tiers.cold.unit_reads import UnitReads
from h3kv.tiers.cold.volume import Volume, open_volume
from h3kv.tiers.io import CHECKSUM_MISMATCH, IoEngine


class ColdStore:
    """Satisfies `PersistentStore` for one model. Other models may have other areas of the same volume."""

    tier = Tier.NVME

    def __init__(
        self,
        volume: Volume,
        layout: CacheLayout | ColdLayout,
        *,
        fingerprint: bytes,
        config: ColdStoreConfig,
        telemetry: Telemetry,
        bell: Bell | None = None,
    ) -> None:
        """Take over an open volume. `open` does it all.

        `bell` is rung whenever something was wrapped or unwrapped, for a caller that waits for other things besides.
        """
        mark = layout_mark(layout)
        self._geometry = AreaGeometry(mark, volume.geometry.area_bytes)
        if self._geometry.units == 0:
            raise ConfigError(
                f"a segment of this model takes {describe_size(self._geometry.unit_bytes)}, more than an area of "
                f"{volume.place.path}, {describe_size(volume.geometry.area_bytes)}: format the store with a larger "
                "`--area`",
                field="nvme.store",
            )
        volume.begin_epoch(config.capacity_bytes, is_ours=lambda entry: belongs(entry, fingerprint, mark))
        ours = [area for area, entry in enumerate(volume.areas) if belongs(entry, fingerprint, mark)]
        twin = b"".join(volume.read_all(BUDGET_OFFSET, TWIN_BYTES))
        self._volume = volume
        self.layout = layout if isinstance(layout, ColdLayout) else cold_layout(layout)
        """What the store knows of the model."""
        self._layers = self.layout.layers
        self._meter = Meter(telemetry, backend=volume.ops.backend)
        self._room = Room(self._geometry, volume.areas, ours)
        self._segments = Segments(self._geometry)
        self._budget = WriteBudget(config.write_bytes_per_day, twin, config.today)
        self._codec = Codec(config.codec_threads, wake=None if bell is None else bell.ring)
        element = self.layout.element_bytes
        writes = DataWrites(volume, self._geometry, element=element)
        self._commits = Commits(
            volume,
            self._room,
            writes,
            self._geometry,
            codec=self._codec if config.wrap == "lz4" else None,
            fingerprint=fingerprint,
            budget=self._budget,
        )
        self._fetches = Fetches(writes, self._geometry, self._codec, element=element)
        self._units = UnitReads(volume.ops, writes, self._segments, check_bytes=mark.check_bytes)
        self._ended: list[Completion] = []
        self._written: list[tuple[Extent, TierBrokenError | None]] = []
        # By their blocks; those that are still read or written included.
        self._erasing: dict[int, Extent] = {}
        self._is_closed = False
        self._kept = self._recover(ours)

    @classmethod
    def open(
        cls,
        place: Path,
        layout: CacheLayout | ColdLayout,
        *,
        fingerprint: bytes,
        config: ColdStoreConfig,
        telemetry: Telemetry,
        buffers: Sequence[tuple[int, int]] = (),
        engine: EngineFactory | None = None,
        bell: Bell | None = None,
    ) -> ColdStore:
        """The store of one model at a place. A place that does not exist is made, if its folder exists.

        Args:
            place: folder (the file in it is `store.h3`), file, or block device with a store.
            layout: of the model's KV.
            fingerprint: `Fingerprint.digest()` of the model.
            config: size and limits.
            telemetry: where counts go.
            buffers: (address, bytes) of memory that is registered with the engine: moves from it and fetches into it
                cost less. Never of a CMA heap.
            engine: makes what reads and writes the descriptors that it is given. None: `IoEngine`.
            bell: rung whenever anything has ended, for a caller that waits for other things besides.

        Raises:
            ConfigError: the cap is missing or too small, or this model's segments do not fit an area.
            StoreBusyError: another process uses it.
            StoreFormatError: what is there is no store, one of another version, damaged, or cut.
            StoreError: it cannot be opened, read, written or made.

        Cost: reads the headers of the model's areas, about 0.1 to 0.3 % of their bytes.
        """

        def make_engine(files: Sequence[int]) -> IoEngine:
            rung = None if bell is None else bell.address
            return IoEngine.open(files, depth=config.depth, buffers=buffers, backend=config.backend, bell=rung)

        volume = open_volume(place, engine or make_engine, capacity_bytes=config.capacity_bytes, layout=layout)
        try:
            return cls(volume, layout, fingerprint=fingerprint, config=config, telemetry=telemetry, bell=bell)
        except BaseException:
            volume.close()
            raise

    @property
    def is_degraded(self) -> bool:
        """See `PersistentStore.is_degraded`."""
        return self._commits.broken is not None

    @property
    def path(self) -> Path:
        """The file or device."""
        return self._volume.place.path

    @property
    def is_direct(self) -> bool:
        """Whether reads and writes bypass the page cache."""
        return self._volume.place.is_direct

    def restore(self, number: Callable[[], SegmentId]) -> list[StoredSegment]:
        """See `PersistentStore.restore`."""
        self._check_open()
        kept, self._kept = self._kept, []
        return [self._segments.show(extent, number()) for extent in kept]

    def reserve(self, blocks: Sequence[int]) -> list[SlotHandle]:
        """See `BlockStore.reserve`."""
        self._check_open()
        self._commits.check_unbroken()
        sizes = [extent_class(size) for size in blocks[:: self._layers]]
        assert [extent_class(size) for size in blocks] == [size for size in sizes for _ in range(self._layers)], (
            f"sizes come segment by segment, the same one for each of {self._layers} layers"
        )
        costs = [size * (self._geometry.block_bytes + self._geometry.header_bytes) for size in sizes]
        if not self._budget.allows(sum(costs)):
            self._meter.count_refusal()
            raise budget_spent(self.path, self._budget, sum(costs))
        offsets = self._room.reserve(sizes)
        if offsets is None:
            raise no_room(self.path, self.statistics(), sum(sizes) * self._geometry.block_bytes)
        handles = []
        for offset, size, cost in zip(offsets, sizes, costs, strict=True):
            extent = self._segments.extents.open(offset, size)
            extent.promised_bytes = cost
            self._budget.promised_bytes += cost
            handles += extent.handles_L
        return handles

    def submit(self, moves: Sequence[Move | Fetch]) -> None:
        """See `BlockStore.submit`."""
        self._check_open()
        writes = [move for move in moves if isinstance(move, Move)]
        if writes:
            self._commits.check_unbroken()
        targets = self._segments.check_moves(writes)
        fetches = [move for move in moves if isinstance(move, Fetch)]
        sources = [self._segments.check_fetch(fetch) for fetch in fetches]
        for move, (extent, layer) in zip(writes, targets, strict=True):
            self._ended += self._segments.join(extent, layer, move)
            if extent.phase is Phase.WRITING:
                self._commits.write(extent)
        reads = []
        for fetch, (extent, layer) in zip(fetches, sources, strict=True):
            if extent.phase is Phase.RETIRED:
                self._ended.append(Completion(fetch, given_up(self.path, fetch.key, extent)))
            else:
                reads.append(self._fetches.read(fetch, extent, layer))
        self._volume.ops.submit_each([read for read in reads if read is not None])
        self._pump()

    def poll(self) -> list[Completion]:
        """See `BlockStore.poll`."""
        self._check_open()
        self._pump()
        written, self._written = self._written, []
        ended, self._ended = self._ended, []
        for extent, error in written:
            ended += self._segments.end_writing(extent, error)
            if extent.owned_layers < self._layers:
                self._commits.undo(extent)
            self._budget.promised_bytes -= extent.take_promise()
            self._free_if_idle(extent)
        for fetch, extent, fault in self._fetches.ended():
            ended.append(Completion(fetch, None if fault is None else self._read_error(fetch.key, extent, fault)))
            self._free_if_idle(extent)
        return ended

    def wait(self, timeout_ns: int) -> None:
        """See `BlockStore.wait`."""
        self._check_open()
        deadline_ns = time.monotonic_ns() + timeout_ns
        while True:
            self._pump()
            left_ns = deadline_ns - time.monotonic_ns()
            if self._ended or self._written or self._fetches.has_ended or left_ns <= 0:
                return
            if self._codec.in_flight:
                self._codec.wait(left_ns)
            elif self._volume.ops.in_flight > self._units.in_engine or self._commits.is_busy:
                self._volume.ops.wait(left_ns, results=self._commits.results_awaited)
            else:
                return

    @property
    def copies(self) -> CopyMeter:
        """What the processor copied of what was fetched."""
        return self._fetches.copies

    def written_bytes(self, handle: SlotHandle) -> int:
        """Bytes that were written into a slab's slot, whole checked units. Raises StaleHandleError."""
        self._check_open()
        return self._segments.extents.find(handle)[0].pieces * self._geometry.mark.check_bytes

    def is_wrapped(self, handle: SlotHandle) -> bool:
        """See `PersistentStore.is_wrapped`."""
        self._check_open()
        extent, layer = self._segments.extents.find(handle)
        return bool(extent.wrapped_L[layer])

    def read_units(self, slabs: Sequence[SlotHandle], reads: memoryview) -> None:
        """See `PersistentStore.read_units`."""
        self._check_open()
        self._units.start(slabs, reads)

    def poll_units(self) -> EndedReads:
        """See `PersistentStore.poll_units`."""
        self._check_open()
        self._pump()
        tags_N, failed = self._units.take_ended()
        failures = (FailedRead(each.tag, each.source, self._read_error(*each.met)) for each in failed)
        return EndedReads(tags_N.data, tuple(failures))

    def wait_units(self, timeout_ns: int, *, reads: int = 1) -> None:
        """See `PersistentStore.wait_units`."""
        self._check_open()
        deadline_ns = time.monotonic_ns() + timeout_ns
        while True:
            left_ns, missing = deadline_ns - time.monotonic_ns(), reads - self._units.ended
            if missing <= 0 or left_ns <= 0 or self._units.in_flight == 0:
                return
            self._volume.ops.wait(left_ns, results=self._units.results_awaited(missing))
            self._pump()

    def lookup(self, key: SlabKey) -> SlotHandle | None:
        """See `BlockStore.lookup`."""
        self._check_open()
        return self._segments.visible.get(key)

    def release(self, handles: Sequence[SlotHandle]) -> None:
        """See `BlockStore.release`."""
        self._give_back(handles, is_erased=False)

    def erase(self, handles: Sequence[SlotHandle]) -> None:
        """See `BlockStore.erase`. The zeros count as written today, and are never refused."""
        self._give_back(handles, is_erased=True)
        self._pump()

    @property
    def erasing(self) -> int:
        """See `PersistentStore.erasing`: counts segments."""
        return len(self._erasing)

    def _give_back(self, handles: Sequence[SlotHandle], *, is_erased: bool) -> None:
        self._check_open()
        for extent in self._segments.release(handles):
            if extent.phase is Phase.RESERVED:
                self._ended += self._segments.end_waiting(extent)
            if is_erased:
                extent.is_erased = True
                self._erasing[extent.block] = extent
            self._commits.undo(extent)
            self._free_if_idle(extent)

    def statistics(self) -> StoreStatistics:
        """See `BlockStore.statistics`. What is being erased counts as used."""
        going = sum(each.blocks * (self._layers - each.owned_layers) for each in self._erasing.values())
        return StoreStatistics(
            tier=self.tier,
            capacity_bytes=self._room.capacity_blocks * self._geometry.block_bytes,
            used_bytes=self._geometry.slab_bytes(self._segments.extents.owned_blocks + going),
            slabs_visible=len(self._segments.visible),
            moves_total=self._segments.moves_total,
            bytes_moved_total=self._segments.bytes_moved_total,
        )

    def check_integrity(self) -> None:
        """See `BlockStore.check_integrity`."""
        self._room.check_integrity()
        self._segments.check_integrity()
        assert sum(extent.blocks for extent in self._segments.extents.extents()) <= self._room.used_blocks

    def close(self) -> None:
        """See `BlockStore.close`. What was released is taken off the disk first, if nothing is being written."""
        if self._is_closed:
            return
        self._is_closed = True
        try:
            self._commits.finish_undoing()
        finally:
            self._volume.close()
            self._codec.close()
            self._segments.visible.clear()

    def _recover(self, ours: Sequence[int]) -> list[Extent]:
        """Take the room of what earlier processes kept, oldest first. Of two copies of a segment the newer stays."""
        found = read_back(self._volume, ours, room=self._room, commits=self._commits, extents=self._segments.extents)
        self._meter.count_corrupt(len(self._volume.damaged_entries) + found.damaged)
        for older in found.replaced:
            self.release(older.handles_L)
        return found.kept

    def _read_error(self, key: SlabKey, extent: Extent, fault: Outcome) -> Exception:
        """What a read that failed means. Damaged bytes end the life of the whole extent."""
        if fault.status != CHECKSUM_MISMATCH:
            self._meter.count_read_error()
            return TierBrokenError(f"cannot read {key} from {self.path}: {fault}", tier=self.tier)
        if extent.phase is not Phase.RETIRED:
            self._meter.count_corrupt()
        if self._segments.retire(extent):
            self._commits.undo(extent, urgent=True)
        return given_up(self.path, key, extent)

    def _free_if_idle(self, extent: Extent) -> None:
        """Hand the room of an extent out again when nobody owns, writes or reads it."""
        if extent.is_idle and not extent.is_free:
            extent.is_free = True
            self._budget.promised_bytes -= extent.take_promise()
            if not extent.is_erased:
                self._room.release([extent.block])
            else:
                self._commits.erase(extent)

    def _pump(self) -> None:
        """Let everything take the steps that it can take without waiting."""
        self._volume.ops.poll()
        self._fetches.hand_over()
        self._codec.poll()
        self._volume.ops.submit_each(self._fetches.land())
        self._written += self._commits.advance()
        for extent in self._commits.take_erased():
            del self._erasing[extent.block]
            self._room.release([extent.block])
        self._units.top_up()
        for extent in self._units.take_idle():
            self._free_if_idle(extent)
        self._meter.update(self._commits, read_bytes=self._fetches.read_bytes + self._units.read_bytes)

    def _check_open(self) -> None:
        if self._is_closed:
            raise TierClosedError("the cold tier was closed: open the store again", tier=self.tier)
