"""All ways in which a pool reads what lies in the cold store: slabs by streaming, single pages, indexes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from h3kv.core.errors import SlabCorruptError, SlabError, TierError
from h3kv.core.layout import CacheLayout
from h3kv.core.limits import EXTENT_CLASSES_BLOCKS
from h3kv.core.ports import Clock, PersistentStore, Telemetry
from h3kv.core.types import Completion, Fetch, SlabKey, SlotHandle
from h3kv.engine.host_shares import HostShares
from h3kv.engine.indexes import SegmentIndexes
from h3kv.engine.page_cache import PageCache
from h3kv.engine.prefix import Mount
from h3kv.engine.segment import Segment
from h3kv.engine.segments import SegmentTable
from h3kv.engine.speeds import Speeds
from h3kv.engine.stream import Readable, SlabStream
from h3kv.telemetry import names
from h3kv.tiers.host import RegionStore

WRAPPED: Final = "WRAPPED"
"""Reason for which a segment is lost to retrieval."""


@dataclass(frozen=True, slots=True)
class ReadableStores:
    """Where is read from, and into."""

    cold: PersistentStore
    host: RegionStore
    shares: HostShares


class ColdReads:
    """Owns stream and page cache. Not thread-safe.

    Args:
        stores: cold store and HOST; the caller closes them after `drain`.
        segments: whose slabs are read.
        indexes: of these.
        layout: of the model's KV.
        poll: takes notice of what the cold store has ended, and passes ended fetches to `end_fetch`.
        clock: bounds waiting.
        telemetry: receives totals.
        speeds: are told of waits and of what came.
        reads_pages_ahead: whether single pages are read before they are asked for.
    """

    def __init__(
        self,
        stores: ReadableStores,
        segments: SegmentTable,
        indexes: SegmentIndexes,
        layout: CacheLayout,
        *,
        poll: Callable[[], None],
        clock: Clock,
        telemetry: Telemetry,
        speeds: Speeds,
        reads_pages_ahead: bool,
    ) -> None:
        self._cold = stores.cold
        self._segments = segments
        self._indexes = indexes
        self._poll = poll
        self._telemetry = telemetry
        self._speeds = speeds
        self._slab_bytes = {blocks: layout.slab.content_bytes(blocks) for blocks in EXTENT_CLASSES_BLOCKS}
        shares = stores.shares
        self.stream = SlabStream(
            stores.cold, stores.host, shares.staging, locate=self._locate, poll=poll, clock=clock, speeds=speeds
        )
        self.pages: PageCache | None = None
        if shares.pages:
            self.pages = PageCache(
                stores.cold,
                stores.host,
                shares.pages,
                layout=layout,
                locate=self._locate_cold,
                clock=clock,
                telemetry=telemetry,
                reads_ahead=reads_pages_ahead,
            )
            segments.serve_pages(self.pages.forget)

    def end_fetch(self, completion: Completion) -> bool:
        """Take notice of a fetch that ended. Returns whether it was started here."""
        if completion.error is None and isinstance(completion.move, Fetch):
            self._speeds.fetched(completion.move.target.nbytes)
        return self.stream.end_fetch(completion) or self._indexes.end_fetch(completion)

    def load_indexes(self, mounts: list[Mount], *, retrieves: bool) -> None:
        """Have the indexes in memory that a sequence over these mounts needs.

        Mounts from one on whose index cannot be read, or whose pages cannot be read one by one, are unpinned and taken
        off the list: their tokens are computed again. What can never be read one by one is given up, so that this
        happens once.

        Args:
            mounts: pinned.
            retrieves: whether the sequence will decode under retrieval.
        """
        for at, mount in enumerate(mounts):
            is_partial = mount.blocks < mount.segment.clustered_blocks
            if not (retrieves or is_partial):
                continue
            if retrieves and self._is_wrapped(mount.segment):
                self._telemetry.count(names.LOST_SEGMENTS, reason=WRAPPED)
                self._give_up(mounts, at, is_lost=True)
                return
            try:
                self._indexes.load([mount.segment], poll=self._poll)
            except (TierError, SlabError) as error:
                self._give_up(mounts, at, is_lost=isinstance(error, SlabCorruptError))
                return

    def check_integrity(self) -> None:
        """Assert that every slot has one use."""
        self.stream.check_integrity()
        if self.pages is not None:
            self.pages.check_integrity()

    def report(self) -> None:
        """Pass on what was counted since the last time: between steps."""
        if self.pages is not None:
            self.pages.report()

    def drain(self) -> None:
        """Wait until nothing is written into HOST any more, as long as a read may take."""
        self.stream.drain()
        self._indexes.drain(poll=self._poll)
        if self.pages is not None:
            self.pages.drain()

    def _give_up(self, mounts: list[Mount], at: int, *, is_lost: bool) -> None:
        """Unpin the mounts from one on; nobody finds that one any more if it is lost."""
        if is_lost:
            self._segments.lose(mounts[at].segment)
        while len(mounts) > at:
            self._segments.unpin(mounts.pop().segment)

    def _is_wrapped(self, segment: Segment) -> bool:
        """Whether it has clusters that can only be read with the whole of their slab."""
        return segment.clustered_blocks > 0 and any(map(self._cold.is_wrapped, segment.cold_L or ()))

    def _locate_cold(self, slab: SlabKey) -> SlotHandle | None:
        segment = self._segments.find(slab.segment)
        return None if segment is None or segment.cold_L is None else segment.cold_L[slab.layer]

    def _locate(self, slab: SlabKey) -> Readable:
        segment = self._segments.find(slab.segment)
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
