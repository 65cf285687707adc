"""What the engine tells telemetry."""

from __future__ import annotations

from collections.abc import Mapping

from h3kv.attention.retrieval import RetrievalMeter
from h3kv.core.errors import SlabError
from h3kv.core.ports import Telemetry
from h3kv.core.types import StoreStatistics, Tier
from h3kv.core.units import NS_PER_S
from h3kv.engine.events import RequestStatistics
from h3kv.engine.request import Request, RequestId
from h3kv.engine.segments import SegmentTable
from h3kv.telemetry import names
from h3kv.tiers.index_store import IndexStore


class Reporter:
    """Turns what happens to requests into the metrics of `telemetry.names`."""

    def __init__(self, telemetry: Telemetry) -> None:
        self._telemetry = telemetry
        # Of no client.
        self._reading: set[RequestId] = set()

    def occupancy(self, tiers: Mapping[Tier, StoreStatistics], segments: SegmentTable) -> None:
        """Room was taken or given back."""
        for tier, statistics in tiers.items():
            self._telemetry.gauge(names.TIER_CAPACITY, statistics.capacity_bytes, tier=tier)
            self._telemetry.gauge(names.TIER_USED, statistics.used_bytes, tier=tier)
        contents = segments.statistics()
        self._telemetry.gauge(names.TIER_PINNED, contents.pinned_bytes, tier=segments.tier)
        self._telemetry.gauge(names.SEGMENTS_CACHED, contents.sealed)

    def indexes(self, store: IndexStore | None) -> None:
        """Indexes were kept or given up."""
        if store is not None:
            self._telemetry.gauge(names.INDEX_CAPACITY, store.slots * store.slot_bytes)
            self._telemetry.gauge(names.INDEX_USED, store.used_slots * store.slot_bytes)

    def retrieved(self, before: RetrievalMeter, after: RetrievalMeter) -> None:
        """A sequence read by retrieval, if the meters differ."""
        if after.rows == before.rows:
            return
        reads = {
            "plane": after.plane_bytes - before.plane_bytes,
            "summary": after.summary_bytes - before.summary_bytes,
            "cluster": after.cluster_bytes - before.cluster_bytes,
        }
        for kind, size_bytes in reads.items():
            self._telemetry.count(names.RETRIEVAL_READ_BYTES, size_bytes, kind=kind)
        measured = after.recalls - before.recalls
        if measured:
            self._telemetry.observe(names.ATTEND_RECALL, (after.recall_sum - before.recall_sum) / measured)

    def lost(self, error: SlabError) -> None:
        """A part of a sequence's KV could not be read."""
        self._telemetry.count(names.LOST_SEGMENTS, reason=error.reason)

    def requests(self, *, running: int, waiting: int) -> None:
        """A request came, started or ended."""
        self._telemetry.gauge(names.REQUESTS_IN_FLIGHT, running)
        self._telemetry.gauge(names.REQUESTS_WAITING, waiting)

    def submitted(self, request_id: RequestId, request: Request) -> None:
        """A request was queued."""
        if request.is_reading:
            self._reading.add(request_id)

    def started(self, statistics: RequestStatistics) -> None:
        """A request got its room."""
        for tier, tokens in statistics.cached_tokens.items():
            self._telemetry.count(names.PREFIX_HIT_TOKENS, tokens, tier=tier)

    def suspended(self) -> None:
        """A request gave its room back, and waits to go on."""
        self._telemetry.count(names.SUSPENSIONS)

    def stepped(self, *, prefill_tokens: int, decode_tokens: int) -> None:
        """A sequence advanced."""
        if prefill_tokens:
            self._telemetry.count(names.PREFILL_TOKENS, prefill_tokens)
        if decode_tokens:
            self._telemetry.count(names.DECODE_TOKENS, decode_tokens)

    def ended(self, request_id: RequestId, reason: str, statistics: RequestStatistics | None) -> None:
        """A request ended; statistics of one that ran. One of no client is not counted."""
        if request_id in self._reading:
            self._reading.remove(request_id)
            return
        self._telemetry.count(names.REQUESTS, reason=reason)
        if statistics is None:
            return
        if statistics.time_to_first_token_ns is not None:
            self._telemetry.observe(names.TTFT, statistics.time_to_first_token_ns / NS_PER_S)
        for duration_ns in statistics.inter_token_ns:
            self._telemetry.observe(names.ITL, duration_ns / NS_PER_S)
