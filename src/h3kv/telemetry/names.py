"""Every metric that this version emits, declared once. Units and label names follow Prometheus."""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import Final


class Kind(enum.StrEnum):
    """How a metric behaves."""

    COUNTER = "counter"
    GAUGE = "gauge"
    HISTOGRAM = "histogram"


@dataclass(frozen=True, slots=True)
class Metric:
    """One declared metric."""

    name: str
    kind: Kind
    unit: str
    """Base unit, or what is counted."""
    labels: tuple[str, ...]
    sentence: str


TIER_CAPACITY: Final = "h3_tier_capacity_bytes"
TIER_USED: Final = "h3_tier_used_bytes"
TIER_PINNED: Final = "h3_tier_pinned_bytes"
SEGMENTS_CACHED: Final = "h3_segments_cached"
EVICTED_SEGMENTS: Final = "h3_evicted_segments_total"
FAILED_SEALS: Final = "h3_failed_seals_total"
LOST_SEGMENTS: Final = "h3_lost_segments_total"
MOVES: Final = "h3_moves_total"
MOVED_BYTES: Final = "h3_moved_bytes_total"
REQUESTS_IN_FLIGHT: Final = "h3_requests_in_flight"
REQUESTS_WAITING: Final = "h3_requests_waiting"
REQUESTS: Final = "h3_requests_total"
PREFILL_TOKENS: Final = "h3_prefill_tokens_total"
PREFIX_HIT_TOKENS: Final = "h3_prefix_hit_tokens_total"
DECODE_TOKENS: Final = "h3_decode_tokens_total"
CORRUPT_SLABS: Final = "h3_corrupt_slabs_total"
STORE_DEGRADED: Final = "h3_store_degraded"
STORE_AREAS_TAKEN: Final = "h3_store_areas_taken_total"
IO_BACKEND: Final = "h3_io_backend"
IO_ERRORS: Final = "h3_io_errors_total"
WRITTEN_BYTES: Final = "h3_written_bytes_total"
READ_BYTES: Final = "h3_read_bytes_total"
WRITE_BUDGET_REFUSALS: Final = "h3_write_budget_refusals_total"
RETRIEVAL_READ_BYTES: Final = "h3_retrieval_read_bytes_total"
ATTEND_RECALL: Final = "h3_attend_recall"
INDEX_CAPACITY: Final = "h3_index_capacity_bytes"
INDEX_USED: Final = "h3_index_used_bytes"
PAGE_CACHE_CAPACITY: Final = "h3_page_cache_capacity_bytes"
PAGE_CACHE_TAKEN: Final = "h3_page_cache_taken_pages_total"
PAGE_CACHE_READ_AHEAD: Final = "h3_page_cache_read_ahead_pages_total"
PAGE_CACHE_STALL: Final = "h3_page_cache_stall_seconds_total"
TTFT: Final = "h3_time_to_first_token_seconds"
ITL: Final = "h3_inter_token_seconds"

_DECLARED = (
    Metric(TIER_CAPACITY, Kind.GAUGE, "bytes", ("tier",), "Cap of a tier, rounded down to whole units."),
    Metric(TIER_USED, Kind.GAUGE, "bytes", ("tier",), "Reserved bytes of a tier, running and cached together."),
    Metric(TIER_PINNED, Kind.GAUGE, "bytes", ("tier",), "Bytes of a tier that eviction may not take now."),
    Metric(SEGMENTS_CACHED, Kind.GAUGE, "segments", (), "Sealed segments that a prompt can reuse."),
    Metric(EVICTED_SEGMENTS, Kind.COUNTER, "segments", ("tier",), "Segments given up to make room."),
    Metric(
        FAILED_SEALS,
        Kind.COUNTER,
        "segments",
        ("tier",),
        "Segments that were not shared: a move failed or was refused.",
    ),
    Metric(
        LOST_SEGMENTS,
        Kind.COUNTER,
        "segments",
        ("reason",),
        "Segments that could not be read back while a sequence used them: their tokens were computed again.",
    ),
    Metric(MOVES, Kind.COUNTER, "moves", ("source", "target", "reason"), "Segments copied from one tier to another."),
    Metric(MOVED_BYTES, Kind.COUNTER, "bytes", ("source", "target"), "Bytes copied from one tier to another."),
    Metric(REQUESTS_IN_FLIGHT, Kind.GAUGE, "requests", (), "Requests that hold room for their worst case."),
    Metric(REQUESTS_WAITING, Kind.GAUGE, "requests", (), "Requests that wait for room."),
    Metric(REQUESTS, Kind.COUNTER, "requests", ("reason",), "Ended requests by finish reason or error reason."),
    Metric(PREFILL_TOKENS, Kind.COUNTER, "tokens", (), "Prompt tokens that were computed."),
    Metric(PREFIX_HIT_TOKENS, Kind.COUNTER, "tokens", ("tier",), "Prompt tokens that were found, by where they lay."),
    Metric(DECODE_TOKENS, Kind.COUNTER, "tokens", (), "Generated tokens."),
    Metric(CORRUPT_SLABS, Kind.COUNTER, "slabs", ("tier",), "Slabs that were read and did not match their checksums."),
    Metric(STORE_DEGRADED, Kind.GAUGE, "stores", ("tier",), "1: writing failed, the store is only read; 0: in order."),
    Metric(
        STORE_AREAS_TAKEN,
        Kind.COUNTER,
        "areas",
        ("tier",),
        "Areas of a store whose KV of another model was dropped to make room for this one's.",
    ),
    Metric(IO_BACKEND, Kind.GAUGE, "engines", ("tier", "backend"), "1 for the engine that reads and writes a tier."),
    Metric(IO_ERRORS, Kind.COUNTER, "operations", ("tier", "kind"), "Reads or batches of writes that failed."),
    Metric(WRITTEN_BYTES, Kind.COUNTER, "bytes", ("tier",), "Bytes written to a device, tables and headers included."),
    Metric(READ_BYTES, Kind.COUNTER, "bytes", ("tier",), "Bytes of slabs read from a device."),
    Metric(
        WRITE_BUDGET_REFUSALS,
        Kind.COUNTER,
        "refusals",
        ("tier",),
        "Reservations refused because the bytes of the day are written.",
    ),
    Metric(
        RETRIEVAL_READ_BYTES,
        Kind.COUNTER,
        "bytes",
        ("kind",),
        "Bytes that retrieval read of indexed segments: planes, summaries, chosen clusters.",
    ),
    Metric(
        ATTEND_RECALL,
        Kind.HISTOGRAM,
        "ratio",
        (),
        "Share of attention in the tokens that retrieval read, of a sample of steps and layers.",
    ),
    Metric(INDEX_CAPACITY, Kind.GAUGE, "bytes", (), "Cap of the index region."),
    Metric(INDEX_USED, Kind.GAUGE, "bytes", (), "Bytes of indexes of segments that lie in the cold store alone."),
    Metric(PAGE_CACHE_CAPACITY, Kind.GAUGE, "bytes", (), "Part of the host cap that single pages from NVMe lie in."),
    Metric(
        PAGE_CACHE_TAKEN,
        Kind.COUNTER,
        "pages",
        ("outcome",),
        "Pages from NVMe that layers took: ready, late (still being read ahead), missed (read only then).",
    ),
    Metric(
        PAGE_CACHE_READ_AHEAD,
        Kind.COUNTER,
        "pages",
        ("outcome",),
        "Pages read ahead: started, useful (there when they were taken), wasted (given up before).",
    ),
    Metric(PAGE_CACHE_STALL, Kind.COUNTER, "seconds", (), "Time in which layers waited for pages from NVMe."),
    Metric(TTFT, Kind.HISTOGRAM, "seconds", (), "From submission to the first token."),
    Metric(ITL, Kind.HISTOGRAM, "seconds", (), "From one token of an answer to the next."),
)

METRICS: Final = {metric.name: metric for metric in _DECLARED}
"""All metrics by name."""

assert len(METRICS) == len(_DECLARED), "a metric is declared twice"
