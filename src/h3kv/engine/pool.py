"""The KV of one model on the tiers of one process: what engine and transformers cache stand on.

tiering off      home = device                        segments are written and read on the device
tiering on       device = windows, home = HOST        sealed segments move between HOST and the cold store
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Iterator, Sequence

from h3kv.attention import native
from h3kv.attention.batch import PagedBatch
from h3kv.attention.page_seams import PageKernels
from h3kv.attention.recall import RecallSample
from h3kv.attention.touches import TouchSample
from h3kv.core.errors import ConfigError, TierFullError
from h3kv.core.layout import CacheLayout
from h3kv.core.limits import BLOCK_TOKENS, SEGMENT_BLOCKS_MAX, SINK_BLOCKS
from h3kv.core.ports import AddressableStore, Clock, Directory, Offload, PersistentStore, Telemetry
from h3kv.core.retrieval import RetrievalSetting
from h3kv.core.types import SlabKey, StoreStatistics, Tier
from h3kv.core.units import NS_PER_S
from h3kv.engine.capacity import Capacity
from h3kv.engine.cold_endings import ColdEndings
from h3kv.engine.cold_reads import ColdReads, ReadableStores
from h3kv.engine.host_shares import HostShares, reserve_shares
from h3kv.engine.indexes import SegmentIndexes
from h3kv.engine.interrupts import interrupts_deferred
from h3kv.engine.kv_parts import KvParts
from h3kv.engine.needs import KvNeed, TieringConfig
from h3kv.engine.page_cache import PageCache
from h3kv.engine.placement import Placer
from h3kv.engine.prefix import Mount, held_prefix, mount_prefix
from h3kv.engine.segment import held_home_blocks
from h3kv.engine.segments import SegmentTable
from h3kv.engine.sequence_kv import SequenceKv
from h3kv.engine.speeds import Speeds
from h3kv.engine.stream import SlabStream
from h3kv.engine.window import ArenaStore, Window
from h3kv.policy.admission import ANSWER_BLOCKS_RESERVED
from h3kv.policy.placement import PlacementConfig
from h3kv.policy.window import CHUNK_BLOCKS_MAX, SEQUENCES_MAX, DevicePlan, plan_device
from h3kv.tiers.host import RegionStore
from h3kv.tiers.index_store import IndexStore

assert SEQUENCES_MAX <= native.LINEAR_ROWS_MAX, "rows of one pass are the same whoever else is in it, up to so many"

SETTLE_NS = 30 * NS_PER_S
"""Longest time that closing waits for what is still to be written."""


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
        self.device_plan = self._plan_device()
        shares = self._reserve_shares(host := home if isinstance(home, RegionStore) else None)
        self.capacity = Capacity(
            layout,
            home,
            cold,
            index,
            apart_bytes=layout.slab.size_bytes(shares.blocks),
            sequences_max=self.device_plan.sequences,
            cold_cure=cold_cure or (lambda _: "raise nvme.capacity"),
        )
        self.indexes = SegmentIndexes(layout, index, cold, clock=clock)
        self.segments = SegmentTable(
            home,
            layout,
            directory=directory,
            telemetry=telemetry,
            indexes=self.indexes,
            clock=clock,
            cold=cold,
            apart_blocks=shares.blocks,
        )
        self.capacity.serve_held(
            lambda: self.segments.held_blocks, in_home=lambda: held_home_blocks(self.segments.sealed())
        )
        self.speeds = Speeds(clock)
        self._endings = ColdEndings(
            self.segments, directory, self.speeds, telemetry=telemetry, is_choosing=self._tiering.recomputes
        )
        config = PlacementConfig(cold is not None, host_free_blocks_min=0 if cold is None else SEGMENT_BLOCKS_MAX)
        self.placer = Placer(self.segments, host=host, config=config, telemetry=telemetry, clock=clock)
        self.reads = self._open_reads(host, shares, clock, telemetry)
        self._parts = self._make_parts(page_kernels, telemetry)
        if cold is not None:
            self.segments.adopt(cold.restore(self.segments.number))
            self.placer.tick()

    def attend_with(self, offload: Offload) -> None:
        """Who attends to what is not on the device, for sequences that begin from now on."""
        self._parts = dataclasses.replace(self._parts, offload=offload)

    @property
    def home(self) -> AddressableStore:
        """Where segments are written and read."""
        return self._home

    @property
    def stream(self) -> SlabStream | None:
        """Gives slabs that lie in the cold store; None where there is none."""
        return None if self.reads is None else self.reads.stream

    @property
    def pages(self) -> PageCache | None:
        """Keeps single pages that lie there; None where nobody retrieves."""
        return None if self.reads is None else self.reads.pages

    @property
    def recall_sample(self) -> RecallSample:
        """What retrieval has caught in each layer, over all sequences so far."""
        return self._parts.recall_sample

    @property
    def touch_sample(self) -> TouchSample:
        """How much attention segments draw, when someone asks."""
        return self._parts.touch_sample

    @property
    def resident_tokens(self) -> int | None:
        """Tokens that HOST holds beside one open segment: more than that is read again for each chunk. None: nothing
        ever is.
        """
        if self._cold is None:
            return None
        return max(self.capacity.home_blocks - SEGMENT_BLOCKS_MAX, 1) * BLOCK_TOKENS

    def check_retrieval(self, setting: RetrievalSetting) -> None:
        """See that sequences can decode under this setting, wherever their pages come to lie.

        Raises:
            ConfigError: the cold store's single pages have no room, or too little.
        """
        if self._cold is None or not self.layout.slab.page.encoding.is_clustered:
            return
        if self.pages is None:
            raise ConfigError(
                "retrieval reads single pages of the cold store, and there is no room for them: give the tiering "
                "page_cache_bytes",
                field="page_cache_bytes",
            )
        self.pages.check_budget(setting.budget_tokens)

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
        mounts = mount_prefix(need.lookup_keys[1:], self._directory, self.segments)
        try:
            ending = self._endings.choose(mounts)
            self.placer.tick()
            if self.reads is not None:
                self.reads.load_indexes(mounts, retrieves=need.retrieves)
            kv = self._start(need, mounts, is_alone=is_alone)
        except BaseException:
            for mount in mounts:
                self.segments.unpin(mount.segment)
            raise
        self._endings.began(kv, ending)
        return kv

    def _start(self, need: KvNeed, mounts: list[Mount], *, is_alone: bool) -> SequenceKv:
        """A sequence over these mounts, or over fewer of them."""
        while True:
            blocks = need.reserved_blocks + sum(mount.blocks_beside for mount in mounts)
            try:
                self.capacity.commit(blocks, retrieves=need.retrieves)
                try:
                    return SequenceKv(
                        self._parts,
                        mounts,
                        need.rooms,
                        keys=list(need.keys),
                        window=self._make_window(),
                        blocks_max=need.blocks,
                        reserved_blocks=need.reserved_blocks,
                        committed_blocks=blocks,
                        retrieves=need.retrieves,
                    )
                except BaseException:
                    self.capacity.uncommit(blocks)
                    raise
            except TierFullError:
                if not (is_alone and mounts):
                    raise
                self.segments.unpin(mounts.pop().segment)

    def held_blocks(self, need: KvNeed) -> int:
        """Blocks of a prompt that documents hold, so that it needs no room for them."""
        return held_prefix(need.lookup_keys[1:], self._directory, self.segments)

    def grow(self, kv: SequenceKv) -> None:
        """See that a sequence is sure of room for its next token.

        Raises:
            TierFullError: those that run leave none.
        """
        if kv.tokens < kv.reserved_blocks * BLOCK_TOKENS:
            return
        more = min(ANSWER_BLOCKS_RESERVED, kv.blocks_max - kv.reserved_blocks)
        assert more > 0, "a sequence outgrows its longest"
        self.capacity.extend(more)
        kv.reserved_blocks += more
        kv.committed_blocks += more

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
                self._endings.ended(kv)

    def tick(self) -> None:
        """Between two steps: take notice of moves that ended, and start others."""
        with interrupts_deferred():
            self.placer.tick()
            if self.reads is not None:
                self.reads.report()

    def batch(self, sequences: Sequence[SequenceKv]) -> PagedBatch:
        """The next token of each of these sequences, which are prepared for it."""
        return PagedBatch([kv.cache for kv in sequences], self.layout, offload=self._parts.offload)

    def read_ahead(self, sequences: Sequence[SequenceKv], *, repeats: bool) -> bool:
        """Begin to read what sequences that attend together need from the cold store, layer by layer.

        `repeats` says that the step after is expected to read the same again. Returns whether there is anything.
        """
        slabs = [slab for kv in sequences for slab in kv.cache.cold_slabs()]
        if slabs and self.stream is not None:
            in_order = sorted(dict.fromkeys(slabs), key=lambda slab: slab.layer)
            self.stream.plan(in_order, repeats=repeats)
        return bool(slabs)

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
        if self.reads is not None:
            self.reads.check_integrity()
        self._endings.check_integrity(self.running)

    def close(self) -> None:
        """Write what is still to be written, as far as the time allows. Sequences have ended before."""
        self.placer.settle(SETTLE_NS)
        if self.reads is not None:
            self.reads.drain()

    def _make_parts(self, page_kernels: PageKernels, telemetry: Telemetry) -> KvParts:
        return KvParts(
            self.segments,
            page_kernels,
            self.stream,
            self.pages,
            telemetry,
            window_blocks=self._tiering.window_tokens // BLOCK_TOKENS,
            is_sealing=isinstance(self._home, RegionStore) or page_kernels is native,
            is_eager=self._cold is None,
            census=self.capacity.census,
        )

    def _make_window(self) -> Window | None:
        if self._device is None:
            return None
        assert isinstance(self._home, RegionStore)
        return Window(self._device, self._home, self.layout, blocks=self._tiering.window_tokens // BLOCK_TOKENS)

    def _plan_device(self) -> DevicePlan:
        tiering = self._tiering
        if self._device is None:
            return DevicePlan(sequences=SEQUENCES_MAX, chunk_blocks=CHUNK_BLOCKS_MAX)
        block_bytes = self.layout.block_bytes
        capacity = self._device.statistics().capacity_bytes // block_bytes
        window, chunk = tiering.window_tokens // BLOCK_TOKENS, tiering.chunk_tokens // BLOCK_TOKENS
        return plan_device(capacity, window, chunk, block_bytes=block_bytes)

    def _reserve_shares(self, host: RegionStore | None) -> HostShares:
        """What HOST sets aside for reading the cold store."""
        if host is None or self._cold is None:
            return HostShares()
        tiering = self._tiering
        return reserve_shares(
            host, self.layout, staging_bytes=tiering.staging_bytes, page_cache_bytes=tiering.page_cache_bytes
        )

    def _open_reads(
        self, host: RegionStore | None, shares: HostShares, clock: Clock, telemetry: Telemetry
    ) -> ColdReads | None:
        if host is None or self._cold is None:
            return None
        reads = ColdReads(
            ReadableStores(self._cold, host, shares),
            self.segments,
            self.indexes,
            self.layout,
            poll=self.placer.poll_cold,
            clock=clock,
            telemetry=telemetry,
            speeds=self.speeds,
            reads_pages_ahead=self._tiering.reads_pages_ahead,
        )
        self.placer.serve_fetches(reads.end_fetch)
        return reads
