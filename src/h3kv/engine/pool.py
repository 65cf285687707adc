"""The KV of one model on the tiers of one process: what engine and transformers cache stand on.

tiering off      home = device                        segments are written and read on the device
tiering on       device = windows, home = HOST        sealed segments move between HOST and the cold store
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from h3kv.attention import native
from h3kv.attention.paged import PageKernels
from h3kv.core.errors import ConfigError, SlabCorruptError, SlabError, SlabUnavailableError, TierError, TierFullError
from h3kv.core.layout import CacheLayout
from h3kv.core.limits import BLOCK_TOKENS, EXTENT_CLASSES_BLOCKS, SEGMENT_BLOCKS_MAX, SINK_BLOCKS
from h3kv.core.ports import AddressableStore, Clock, Directory, PersistentStore, Telemetry
from h3kv.core.types import BlockKey, Completion, SlabKey, SlotHandle, StoreStatistics, Tier
from h3kv.core.units import NS_PER_S, describe_size, format_size
from h3kv.engine.capacity import Capacity
from h3kv.engine.indexes import SegmentIndexes
from h3kv.engine.interrupts import interrupts_deferred
from h3kv.engine.page_cache import PageCache
from h3kv.engine.placement import Placer
from h3kv.engine.prefix import Mount, mount_prefix
from h3kv.engine.segment import Segment
from h3kv.engine.segments import SegmentTable
from h3kv.engine.sequence_kv import KvParts, SequenceKv
from h3kv.engine.stream import SLOTS_MIN, Readable, SlabStream
from h3kv.engine.window import ArenaStore, Window
from h3kv.policy.admission import plan_rooms
from h3kv.policy.placement import PlacementConfig
from h3kv.policy.window import CHUNK_BLOCKS_MAX, SEQUENCES_MAX, DevicePlan, plan_device
from h3kv.tiers.host import HostStore
from h3kv.tiers.index_store import IndexStore

SETTLE_NS = 30 * NS_PER_S
"""Longest time that closing waits for what is still to be written."""

STAGING_DIVISOR = 3
"""Staging takes a third of the HOST cap at most, but for the fewest slots that attention can do with."""


@dataclass(frozen=True, slots=True)
class KvNeed:
    """What a sequence needs to start."""

    keys: list[BlockKey]
    """The root key, then those of the prompt's whole blocks."""
    reusable_blocks: int
    """Blocks of the prompt that may be taken from others."""
    prompt_blocks: int
    """Blocks that the prompt fills."""
    blocks: int
    """Blocks of the whole sequence at its longest."""
    retrieves: bool = False
    """Whether it decodes under retrieval, so that its indexes stay in memory."""

    def rooms(self, first_block: int) -> Iterator[int]:
        """Sizes of the segments for the blocks from this one on."""
        return iter(plan_rooms(first_block, self.prompt_blocks, self.blocks))


@dataclass(frozen=True, slots=True)
class TieringConfig:
    """How HOST and the device share the work."""

    window_tokens: int = 1024
    """Newest tokens of a sequence that stay on the device: a multiple of 64."""
    staging_bytes: int = 32 << 20
    """Part of the HOST cap that slabs are read into on their way from NVMe; no more than a third of it, but for four
    slabs of full segments. Enough to keep the disk busy while a layer is computed."""
    index_bytes: int | None = None
    """Cap on indexes of segments whose slabs lie in the cold store alone. None: one for each sequence that may run."""
    page_cache_bytes: int = 0
    """Part of the HOST cap that keeps single pages of the cold store for retrieval; 0: none, where nobody retrieves."""
    reads_pages_ahead: bool = True
    """Whether pages are read into it before they are asked for."""
    chunk_tokens: int = 1024
    """Chunk that a sequence begins with: what the device plan leaves room for."""


class KvPool:
    """Owns segments, placement and stream over stores that the caller closes afterwards. Not thread-safe.

    Args:
        home: where segments are written: the device's store, or HOST's with tiering.
        layout: geometry of all stores.
        page_kernels: of the device.
        directory: which keys are known.
        telemetry: receives counters.
        clock: bounds waiting.
        device: with tiering, where windows lie.
        cold: with tiering, where segments outlive the process.
        index: with a cold store and a clustered encoding, where indexes lie without their slabs.
        tiering: of windows and staging.
        cold_cure: says what makes the cold store hold so many blocks. None: a larger cap.
    """

    def __init__(
        self,
        home: AddressableStore,
        layout: CacheLayout,
        *,
        page_kernels: PageKernels,
        directory: Directory,
        telemetry: Telemetry,
        clock: Clock,
        device: ArenaStore | None = None,
        cold: PersistentStore | None = None,
        index: IndexStore | None = None,
        tiering: TieringConfig | None = None,
        cold_cure: Callable[[int], str] | None = None,
    ) -> None:
        self.layout = layout
        self._home = home
        self._device = device
        self._cold = cold
        self._directory = directory
        self._tiering = tiering or TieringConfig()
        self._slab_bytes = {blocks: layout.slab.size_bytes(blocks) for blocks in EXTENT_CLASSES_BLOCKS}
        self.device_plan = self._plan_device()
        host = home if isinstance(home, HostStore) else None
        is_streaming = cold is not None and host is not None
        self._staging = self._reserve_staging(host) if host is not None and is_streaming else []
        page_slots = self._reserve_pages(host) if host is not None and is_streaming else []
        self._apart = [*self._staging, *page_slots]
        self.capacity = Capacity(
            layout,
            home,
            cold,
            index,
            apart_bytes=sum(layout.slab.size_bytes(slot.blocks) for slot in self._apart),
            sequences_max=None if device is None else self.device_plan.sequences,
            cold_cure=cold_cure or (lambda _: "raise nvme.capacity"),
        )
        self.indexes = SegmentIndexes(layout, index, cold, clock=clock)
        self.segments = SegmentTable(
            home,
            layout,
            directory=directory,
            telemetry=telemetry,
            indexes=self.indexes,
            cold=cold,
            apart_blocks=sum(slot.blocks for slot in self._apart),
        )
        headroom = 0 if cold is None else SEGMENT_BLOCKS_MAX
        config = PlacementConfig(has_nvme=cold is not None, host_free_blocks_min=headroom)
        self.placer = Placer(self.segments, host=host, config=config, telemetry=telemetry, clock=clock)
        self.stream = self._make_stream(host, clock) if host is not None and cold is not None else None
        self.pages: PageCache | None = None
        if cold is not None:
            self.placer.serve_fetches(self._end_fetch)
        if cold is not None and host is not None and page_slots:
            self.pages = PageCache(
                cold,
                host,
                page_slots,
                layout=layout,
                locate=self._locate_cold,
                clock=clock,
                telemetry=telemetry,
                reads_ahead=self._tiering.reads_pages_ahead,
            )
            self.segments.serve_pages(self.pages.forget)
        self._parts = KvParts(
            self.segments,
            page_kernels,
            self.stream,
            self.pages,
            telemetry,
            window_blocks=self._tiering.window_tokens // BLOCK_TOKENS,
            is_sealing=host is not None or page_kernels is native,
            is_eager=cold is None,
            census=self.capacity.census,
        )
        if cold is not None:
            self.segments.adopt(cold.restore(self.segments.number))
            self.placer.tick()

    @property
    def resident_tokens(self) -> int | None:
        """Tokens that HOST holds beside one open segment: more than that is read again for each chunk. None: nothing
        ever is.
        """
        if self._cold is None:
            return None
        return max(self.capacity.home_blocks - SEGMENT_BLOCKS_MAX, 1) * BLOCK_TOKENS

    def open_sequence(self, need: KvNeed, *, is_alone: bool) -> SequenceKv:
        """Room for a sequence, with as much of its beginning reused as is known.

        Args:
            need: of the sequence.
            is_alone: no other sequence will give room back: then reuse is given up piece by piece where the reused
                segments themselves take the room. A partly used segment pins all of its blocks.

        Raises:
            TierFullError: the room is in use by others. Nothing is held then.
        """
        opened: list[SequenceKv] = []
        try:
            with interrupts_deferred():
                opened.append(self._open(need, is_alone=is_alone))
        except BaseException:
            for kv in opened:
                self.close_sequence(kv, ())
            raise
        return opened[0]

    def _open(self, need: KvNeed, *, is_alone: bool) -> SequenceKv:
        mounts = mount_prefix(need.keys[1 : need.reusable_blocks + 1], self._directory, self.segments)
        try:
            self.placer.tick()
            self._load_indexes(mounts, retrieves=need.retrieves)
            return self._start(need, mounts, is_alone=is_alone)
        except BaseException:
            for mount in mounts:
                self.segments.unpin(mount.segment)
            raise

    def _start(self, need: KvNeed, mounts: list[Mount], *, is_alone: bool) -> SequenceKv:
        """A sequence over these mounts, or over fewer of them."""
        while True:
            # A partly used segment pins all of its blocks.
            blocks = need.blocks + sum(mount.segment.room_blocks - mount.blocks for mount in mounts)
            try:
                self.capacity.commit(blocks, retrieves=need.retrieves)
                try:
                    return SequenceKv(
                        self._parts,
                        mounts,
                        need.rooms,
                        keys=list(need.keys),
                        window=self._make_window(),
                        committed_blocks=blocks,
                    )
                except BaseException:
                    self.capacity.uncommit(blocks)
                    raise
            except TierFullError:
                if not (is_alone and mounts):
                    raise
                self.segments.unpin(mounts.pop().segment)

    def lose(self, slab: SlabKey) -> None:
        """A slab cannot be read: its segment is found no more, and whoever holds it computes it again."""
        segment = self.segments.find(slab.segment)
        if segment is not None:
            self.segments.lose(segment)

    def close_sequence(self, kv: SequenceKv, tokens: Sequence[int]) -> None:
        """End a sequence: share what can be, give everything back."""
        with interrupts_deferred():
            try:
                kv.close(tokens)
            finally:
                self.capacity.uncommit(kv.committed_blocks)

    def tick(self) -> None:
        """Between two steps: take notice of moves that ended, and start others."""
        with interrupts_deferred():
            self.placer.tick()
            if self.pages is not None:
                self.pages.report()

    def open_private(self) -> SequenceKv:
        """A sequence of unknown length that shares nothing with others.

        Raises:
            TierFullError: no more sequences fit the device tier.
        """

        def rooms(first_block: int) -> Iterator[int]:
            sinks = [SINK_BLOCKS] if first_block == 0 else []
            return itertools.chain(sinks, itertools.repeat(SEGMENT_BLOCKS_MAX))

        parts = dataclasses.replace(self._parts, is_eager=False)
        self.capacity.commit(0)
        try:
            return SequenceKv(parts, [], rooms, keys=None, window=self._make_window())
        except BaseException:
            self.capacity.uncommit(0)
            raise

    def statistics(self) -> dict[Tier, StoreStatistics]:
        """Occupancy of each tier."""
        stores = (self._device, self._home, self._cold)
        return {store.tier: store.statistics() for store in stores if store is not None}

    @property
    def running(self) -> int:
        """Sequences that were opened and not closed."""
        return self.capacity.census.running

    def check_integrity(self) -> None:
        """Assert that all room belongs to running sequences or to segments."""
        self.segments.check_integrity()
        if self._device is not None:
            self._device.check_integrity()
        if self._cold is not None:
            self._cold.check_integrity()
        if self.stream is not None:
            self.stream.check_integrity()
        if self.pages is not None:
            self.pages.check_integrity()

    def close(self) -> None:
        """Write what is still to be written, as far as the time allows. Sequences have ended before."""
        self.placer.settle(SETTLE_NS)
        if self.stream is not None:
            self.stream.drain()
        if self.pages is not None:
            self.pages.drain()

    def _make_window(self) -> Window | None:
        if self._device is None:
            return None
        assert isinstance(self._home, HostStore)
        return Window(self._device, self._home, self.layout, blocks=self._tiering.window_tokens // BLOCK_TOKENS)

    def _end_fetch(self, completion: Completion) -> bool:
        """Take notice of a fetch that ended, whoever of this pool started it."""
        is_streamed = self.stream is not None and self.stream.end_fetch(completion)
        return is_streamed or self.indexes.end_fetch(completion)

    def _is_wrapped(self, segment: Segment) -> bool:
        """Whether a segment lies in the cold store in a form that is only read whole."""
        assert self._cold is not None or segment.cold_L is None
        return self._cold is not None and segment.cold_L is not None and self._cold.is_wrapped(segment.cold_L[0])

    def _load_indexes(self, mounts: list[Mount], *, retrieves: bool) -> None:
        """Have the indexes in memory that a sequence over these mounts needs. Mounts from one on whose index cannot be
        read are given up: their tokens are computed again.
        """
        for at, mount in enumerate(mounts):
            segment = mount.segment
            is_partial = mount.blocks < segment.clustered_blocks
            if not (retrieves or is_partial):
                continue
            try:
                if retrieves and segment.clustered_blocks and self._is_wrapped(segment):
                    key = SlabKey(segment.id, 0)
                    raise SlabUnavailableError(f"single pages of segment {key} cannot be read: it is wrapped", key=key)
                self.indexes.load([mount.segment], poll=self.placer.poll_cold)
            except (TierError, SlabError) as error:
                if isinstance(error, SlabCorruptError):
                    self.lose(error.key)
                while len(mounts) > at:
                    self.segments.unpin(mounts.pop().segment)
                return

    def _plan_device(self) -> DevicePlan:
        tiering = self._tiering
        if self._device is None:
            return DevicePlan(sequences=SEQUENCES_MAX, chunk_blocks=CHUNK_BLOCKS_MAX)
        block_bytes = self.layout.block_bytes
        capacity = self._device.statistics().capacity_bytes // block_bytes
        window, chunk = tiering.window_tokens // BLOCK_TOKENS, tiering.chunk_tokens // BLOCK_TOKENS
        return plan_device(capacity, window, chunk, block_bytes=block_bytes)

    def _reserve_staging(self, host: HostStore) -> list[SlotHandle]:
        slab_bytes = self.layout.slab.size_bytes(SEGMENT_BLOCKS_MAX)
        capacity_bytes = host.statistics().capacity_bytes
        slots = max(min(self._tiering.staging_bytes, capacity_bytes // STAGING_DIVISOR) // slab_bytes, SLOTS_MIN)
        needed_bytes = slots * slab_bytes + SEGMENT_BLOCKS_MAX * self.layout.block_bytes
        if needed_bytes > capacity_bytes:
            raise ConfigError(
                f"the host cap is {describe_size(capacity_bytes)}, but {describe_size(needed_bytes)} are needed: "
                f"{slots} staging slots of {describe_size(slab_bytes)} + one open segment of "
                f"{SEGMENT_BLOCKS_MAX} blocks; raise host.kv_bytes to at least {format_size(needed_bytes)}",
                field="host.kv_bytes",
            )
        return host.reserve([SEGMENT_BLOCKS_MAX] * slots)

    def _reserve_pages(self, host: HostStore) -> list[SlotHandle]:
        """Room of the page cache: what the configuration says, of what one open segment leaves."""
        if self._tiering.page_cache_bytes == 0 or not self.layout.slab.page.encoding.is_clustered:
            return []
        slab_bytes = self.layout.slab.size_bytes(SEGMENT_BLOCKS_MAX)
        free_bytes = host.statistics().free_bytes - SEGMENT_BLOCKS_MAX * self.layout.block_bytes
        slots = min(self._tiering.page_cache_bytes, free_bytes) // slab_bytes
        if slots < 1:
            needed_bytes = host.statistics().capacity_bytes - free_bytes + slab_bytes
            raise ConfigError(
                f"staging and one open segment leave no room for a page cache in HOST; raise host.kv_bytes to at least "
                f"{format_size(needed_bytes)}",
                field="host.kv_bytes",
            )
        return host.reserve([SEGMENT_BLOCKS_MAX] * slots)

    def _locate_cold(self, slab: SlabKey) -> SlotHandle | None:
        """Where a slab lies in the cold store."""
        segment = self.segments.find(slab.segment)
        return None if segment is None or segment.cold_L is None else segment.cold_L[slab.layer]

    def _make_stream(self, host: HostStore, clock: Clock) -> SlabStream:
        assert self._cold is not None
        return SlabStream(self._cold, host, self._staging, locate=self._locate, poll=self.placer.poll_cold, clock=clock)

    def _locate(self, slab: SlabKey) -> Readable:
        segment = self.segments.find(slab.segment)
        if segment is None:
            return Readable(None, False, None, 0)
        size_bytes = self._slab_bytes[segment.room_blocks]
        if segment.addresses_L is not None:
            return Readable(segment.addresses_L[slab.layer], False, None, size_bytes)
        arrival = segment.arrival
        if arrival is not None and arrival.error is None:
            arrived = slab.layer in arrival.arrived
            return Readable(arrival.addresses_L[slab.layer] if arrived else None, not arrived, None, size_bytes)
        return Readable(None, False, None if segment.cold_L is None else segment.cold_L[slab.layer], size_bytes)
