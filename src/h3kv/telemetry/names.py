"""Every metric that this version emits, declared once. Units and label names follow Prometheus.

Gauges without a label are NaN until they are set. What one machine may lack (a device, a disk) has a label, so that it
is absent there.
"""

from __future__ import annotations

from typing import Final

from h3kv.telemetry.metric import (
    DECISION_BUCKETS,
    EVERY_SERVICE,
    MOVE_BUCKETS,
    RATIO_BUCKETS,
    REQUEST_BUCKETS,
    STEP_BUCKETS,
    Kind,
    Metric,
    Service,
)

TIER_CAPACITY: Final = "h3_tier_capacity_bytes"
TIER_USED: Final = "h3_tier_used_bytes"
TIER_PINNED: Final = "h3_tier_pinned_bytes"
SEGMENTS_CACHED: Final = "h3_segments_cached"
EVICTED_SEGMENTS: Final = "h3_evicted_segments_total"
FAILED_SEALS: Final = "h3_failed_seals_total"
LOST_SEGMENTS: Final = "h3_lost_segments_total"
MOVES: Final = "h3_moves_total"
MOVED_BYTES: Final = "h3_moved_bytes_total"
MOVE_DURATION: Final = "h3_move_duration_seconds"
REQUESTS_IN_FLIGHT: Final = "h3_requests_in_flight"
REQUESTS_WAITING: Final = "h3_requests_waiting"
SUSPENSIONS: Final = "h3_suspensions_total"
REQUESTS: Final = "h3_requests_total"
PREFILL_TOKENS: Final = "h3_prefill_tokens_total"
PREFIX_HIT_TOKENS: Final = "h3_prefix_hit_tokens_total"
DECODE_TOKENS: Final = "h3_decode_tokens_total"
LOAD_OR_RECOMPUTE: Final = "h3_load_or_recompute_total"
LOAD_OR_RECOMPUTE_TOKENS: Final = "h3_load_or_recompute_tokens_total"
DOCUMENTS: Final = "h3_documents"
DOCUMENT_ERASURES: Final = "h3_document_erasures_pending"
QUOTA_REFUSALS: Final = "h3_quota_refusals_total"
QUOTA_LOCAL_REQUESTS: Final = "h3_quota_local_requests_total"
CORRUPT_SLABS: Final = "h3_corrupt_slabs_total"
STORE_DEGRADED: Final = "h3_store_degraded"
STORE_AREAS_TAKEN: Final = "h3_store_areas_taken_total"
IO_BACKEND: Final = "h3_io_backend"
IO_ERRORS: Final = "h3_io_errors_total"
IO_RING_DEPTH: Final = "h3_io_ring_depth"
SSD_RETRIES: Final = "h3_ssd_retry_count_total"
WRITTEN_BYTES: Final = "h3_written_bytes_total"
READ_BYTES: Final = "h3_read_bytes_total"
WRITE_BUDGET_REFUSALS: Final = "h3_write_budget_refusals_total"
DISK_READ_WAIT: Final = "h3_disk_read_wait_seconds"
DEVICE_MEMORY_USED: Final = "h3_device_memory_used_ratio"
RETRIEVAL_READ_BYTES: Final = "h3_retrieval_read_bytes_total"
ATTEND_RECALL: Final = "h3_attend_recall"
COLD_KV_RATIO: Final = "h3_cold_kv_ratio"
INDEX_CAPACITY: Final = "h3_index_capacity_bytes"
INDEX_USED: Final = "h3_index_used_bytes"
PAGE_CACHE_CAPACITY: Final = "h3_page_cache_capacity_bytes"
PAGE_CACHE_TAKEN: Final = "h3_page_cache_taken_pages_total"
PAGE_CACHE_READ_AHEAD: Final = "h3_page_cache_read_ahead_pages_total"
PAGE_CACHE_STALL: Final = "h3_page_cache_stall_seconds_total"
TTFT: Final = "h3_time_to_first_token_seconds"
ITL: Final = "h3_inter_token_seconds"

REGION_SIZE: Final = "h3_region_size_bytes"
REGION_HOLDERS: Final = "h3_region_holders"
REGION_PINS: Final = "h3_region_pins"
LEASED_UNITS: Final = "h3_leased_units"
HOST_ACCESS: Final = "h3_host_access_seconds"
HOST_ACCESS_JITTER: Final = "h3_host_access_jitter_seconds"
MAILBOX_DEPTH: Final = "h3_mailbox_depth"
ATTEND_UNITS: Final = "h3_attend_units_total"
SCAN_UNITS: Final = "h3_scan_units_total"
OFFLOAD_WORKERS: Final = "h3_offload_workers"
OFFLOAD_UNITS: Final = "h3_offload_units_total"
OFFLOAD_READ_BYTES: Final = "h3_offload_read_bytes_total"
OFFLOAD_BUSY: Final = "h3_offload_busy_seconds_total"
CONTROLLER_CONNECTED: Final = "h3_controller_connected"
REPORTS: Final = "h3_reports_total"
REPORTING_PROCESSES: Final = "h3_reporting_processes"
PROCESS_RESTARTS: Final = "h3_process_restarts_total"
DECISIONS: Final = "h3_decisions_total"
HOLDS: Final = "h3_holds_total"
COMMANDS: Final = "h3_commands_total"
DECISION_DURATION: Final = "h3_decision_duration_seconds"
HTTP_REQUESTS: Final = "h3_http_requests_total"
HTTP_IN_FLIGHT: Final = "h3_http_requests_in_flight"
HTTP_DURATION: Final = "h3_http_request_duration_seconds"

PROCESS_INFO: Final = "h3_process_info"
PROCESS_START: Final = "h3_process_start_time_seconds"
PROCESS_CPU: Final = "h3_process_cpu_seconds_total"
PROCESS_RESIDENT: Final = "h3_process_resident_memory_bytes"
PROCESS_VIRTUAL: Final = "h3_process_virtual_memory_bytes"
PROCESS_DESCRIPTORS: Final = "h3_process_open_fds"
PROCESS_DESCRIPTORS_MAX: Final = "h3_process_max_fds"
TRACE_SPANS: Final = "h3_trace_spans_total"

_GATEWAY = (Service.GATEWAY,)
_WORKER = (Service.GPU_WORKER,)
_STORE = (Service.NVME_IO,)
_OFFLOAD = (Service.ANN_OFFLOAD,)
_CONTROLLER = (Service.MIGRATION_CONTROLLER,)


def _counter(name: str, unit: str, labels: tuple[str, ...], sentence: str, *, by: tuple[Service, ...]) -> Metric:
    return Metric(name, Kind.COUNTER, unit, labels, sentence, services=by)


def _gauge(name: str, unit: str, labels: tuple[str, ...], sentence: str, *, by: tuple[Service, ...]) -> Metric:
    return Metric(name, Kind.GAUGE, unit, labels, sentence, services=by)


def _histogram(
    name: str,
    unit: str,
    labels: tuple[str, ...],
    sentence: str,
    *,
    by: tuple[Service, ...],
    buckets: tuple[float, ...],
) -> Metric:
    return Metric(name, Kind.HISTOGRAM, unit, labels, sentence, services=by, buckets=buckets)


_TIERS = (
    _gauge(TIER_CAPACITY, "bytes", ("tier",), "Cap of a tier, rounded down to whole units.", by=_WORKER + _STORE),
    _gauge(
        TIER_USED, "bytes", ("tier",), "Reserved bytes of a tier, running and cached together.", by=_WORKER + _STORE
    ),
    _gauge(TIER_PINNED, "bytes", ("tier",), "Bytes of a tier that eviction may not take now.", by=_WORKER),
    _gauge(SEGMENTS_CACHED, "segments", (), "Sealed segments that a prompt can reuse.", by=_WORKER),
    _counter(EVICTED_SEGMENTS, "segments", ("tier",), "Segments given up to make room.", by=_WORKER),
    _counter(
        FAILED_SEALS,
        "segments",
        ("tier",),
        "Segments that were not shared: a move failed or was refused.",
        by=_WORKER,
    ),
    _counter(
        LOST_SEGMENTS,
        "segments",
        ("reason",),
        "Segments that could not be read back while a sequence used them: their tokens were computed again.",
        by=_WORKER,
    ),
    _counter(MOVES, "moves", ("source", "target", "reason"), "Segments copied from one tier to another.", by=_WORKER),
    _counter(MOVED_BYTES, "bytes", ("source", "target"), "Bytes copied from one tier to another.", by=_WORKER),
    _histogram(
        MOVE_DURATION,
        "seconds",
        ("source", "target"),
        "From the begin of a segment's move to its end.",
        by=_WORKER,
        buckets=MOVE_BUCKETS,
    ),
    _gauge(
        COLD_KV_RATIO,
        "ratio",
        (),
        "`cold_kv_ratio`: share of the KV of running sequences that lies in the cold store alone.",
        by=_WORKER,
    ),
    _gauge(
        DEVICE_MEMORY_USED,
        "ratio",
        ("device",),
        "Share of an accelerator's memory that is in use, by whomever; absent where the model does not lie on one.",
        by=_WORKER,
    ),
)

_REQUESTS = (
    _gauge(REQUESTS_IN_FLIGHT, "requests", (), "Requests that hold room.", by=_WORKER),
    _gauge(REQUESTS_WAITING, "requests", (), "Requests that wait for room.", by=_WORKER),
    _counter(SUSPENSIONS, "requests", (), "Times that a request gave its room to those before it.", by=_WORKER),
    _counter(REQUESTS, "requests", ("reason",), "Ended requests by finish reason or error reason.", by=_WORKER),
    _counter(PREFILL_TOKENS, "tokens", (), "Prompt tokens that were computed.", by=_WORKER),
    _counter(PREFIX_HIT_TOKENS, "tokens", ("tier",), "Prompt tokens that were found, by where they lay.", by=_WORKER),
    _counter(DECODE_TOKENS, "tokens", (), "Generated tokens.", by=_WORKER),
    _counter(
        LOAD_OR_RECOMPUTE,
        "requests",
        ("choice",),
        "Requests whose prefix ended in the cold store: load where all of it was read, else recompute.",
        by=_WORKER,
    ),
    _counter(LOAD_OR_RECOMPUTE_TOKENS, "tokens", ("choice",), "Tokens of these ends, by what was done.", by=_WORKER),
    _gauge(DOCUMENTS, "documents", ("state",), "Documents that are kept: reading, ready, failed.", by=_WORKER),
    _gauge(DOCUMENT_ERASURES, "documents", (), "Deleted documents of which something is still there.", by=_WORKER),
    _counter(
        QUOTA_REFUSALS,
        "requests",
        ("reason",),
        "Requests refused for a tenant's quota: too_large, used_up.",
        by=_WORKER,
    ),
    _counter(
        QUOTA_LOCAL_REQUESTS, "requests", (), "Requests that no server of quotas counted: it was away.", by=_WORKER
    ),
    _histogram(TTFT, "seconds", (), "From submission to the first token.", by=_WORKER, buckets=REQUEST_BUCKETS),
    _histogram(ITL, "seconds", (), "From one token of an answer to the next.", by=_WORKER, buckets=STEP_BUCKETS),
    _counter(HTTP_REQUESTS, "requests", ("route", "status"), "HTTP requests answered, by status code.", by=_GATEWAY),
    _gauge(HTTP_IN_FLIGHT, "requests", (), "HTTP requests that are being answered.", by=_GATEWAY),
    _histogram(
        HTTP_DURATION,
        "seconds",
        ("route",),
        "From an HTTP request to the end of its answer.",
        by=_GATEWAY,
        buckets=REQUEST_BUCKETS,
    ),
)

_STORAGE = (
    _counter(CORRUPT_SLABS, "slabs", ("tier",), "Slabs that were read and did not match their checksums.", by=_STORE),
    _gauge(STORE_DEGRADED, "stores", ("tier",), "1: writing failed, the store is only read; 0: in order.", by=_STORE),
    _counter(
        STORE_AREAS_TAKEN,
        "areas",
        ("tier",),
        "Areas of a store whose KV of another model was dropped to make room for this one's.",
        by=_STORE,
    ),
    _gauge(IO_BACKEND, "engines", ("tier", "backend"), "1 for the engine that reads and writes a tier.", by=_STORE),
    _counter(IO_ERRORS, "operations", ("tier", "kind"), "Reads or batches of writes that failed.", by=_STORE),
    _gauge(IO_RING_DEPTH, "operations", ("tier",), "Operations that the device has now.", by=_STORE),
    _counter(
        SSD_RETRIES,
        "operations",
        ("tier",),
        "`ssd_retry_count`: operations that were begun again: short ones, and those that the kernel sent back.",
        by=_STORE,
    ),
    _counter(WRITTEN_BYTES, "bytes", ("tier",), "Bytes written to a device, tables and headers included.", by=_STORE),
    _counter(READ_BYTES, "bytes", ("tier",), "Bytes of slabs read from a device.", by=_STORE),
    _counter(
        WRITE_BUDGET_REFUSALS,
        "refusals",
        ("tier",),
        "Reservations refused because the bytes of the day are written.",
        by=_STORE,
    ),
    _gauge(
        DISK_READ_WAIT,
        "seconds",
        ("disk",),
        "`r_await`: average time of a read on the disk of the cold store, queueing included, over the last interval.",
        by=_STORE,
    ),
)

_RETRIEVAL = (
    _counter(
        RETRIEVAL_READ_BYTES,
        "bytes",
        ("kind",),
        "Bytes that retrieval read of indexed segments: planes, summaries, chosen clusters.",
        by=_WORKER,
    ),
    _histogram(
        ATTEND_RECALL,
        "ratio",
        (),
        "Share of attention in the tokens that retrieval read, of a sample of steps and layers.",
        by=_WORKER,
        buckets=RATIO_BUCKETS,
    ),
    _gauge(INDEX_CAPACITY, "bytes", (), "Cap of the index region.", by=_WORKER),
    _gauge(INDEX_USED, "bytes", (), "Bytes of indexes of segments that lie in the cold store alone.", by=_WORKER),
    _gauge(PAGE_CACHE_CAPACITY, "bytes", (), "Part of the host cap that single pages from NVMe lie in.", by=_WORKER),
    _counter(
        PAGE_CACHE_TAKEN,
        "pages",
        ("outcome",),
        "Pages from NVMe that layers took: ready, late (still being read ahead), missed (read only then).",
        by=_WORKER,
    ),
    _counter(
        PAGE_CACHE_READ_AHEAD,
        "pages",
        ("outcome",),
        "Pages read ahead: started, useful (there when they were taken), wasted (given up before).",
        by=_WORKER,
    ),
    _counter(PAGE_CACHE_STALL, "seconds", (), "Time in which layers waited for pages from NVMe.", by=_WORKER),
)

_BETWEEN = (
    _gauge(REGION_SIZE, "bytes", ("purpose", "kind"), "Size of a region, by what it is made of.", by=_STORE),
    _gauge(REGION_HOLDERS, "processes", (), "Processes that have the regions mapped.", by=_STORE),
    _gauge(REGION_PINS, "pins", (), "Pins that all holders have in the regions.", by=_STORE),
    _gauge(LEASED_UNITS, "units", ("holder",), "Units of HOST that a holder leases.", by=_STORE),
    _gauge(HOST_ACCESS, "seconds", (), "Mean time of one dependent read of HOST memory.", by=_STORE),
    _gauge(
        HOST_ACCESS_JITTER,
        "seconds",
        (),
        "How much the time of reads of HOST memory varies: standard deviation of short runs.",
        by=_STORE,
    ),
    _gauge(MAILBOX_DEPTH, "requests", ("mailbox",), "Requests that no worker has taken yet.", by=_WORKER + _STORE),
    _counter(
        ATTEND_UNITS,
        "units",
        ("by",),
        "Units of attention by who computed them: worker, self, or self_late where no worker answered in time.",
        by=_WORKER,
    ),
    _counter(
        SCAN_UNITS, "units", ("by",), "Units of index searches by who computed them, as of attention.", by=_WORKER
    ),
    _gauge(OFFLOAD_WORKERS, "processes", (), "Offload workers that take units.", by=_WORKER),
    _counter(
        OFFLOAD_UNITS,
        "units",
        ("outcome",),
        "Units that this worker took: done, or refused (an address outside the regions, a generation that has passed).",
        by=_OFFLOAD,
    ),
    _counter(OFFLOAD_READ_BYTES, "bytes", (), "Bytes of KV that this worker read.", by=_OFFLOAD),
    _counter(OFFLOAD_BUSY, "seconds", (), "Time that this worker spent on units, over all threads.", by=_OFFLOAD),
)

_CONTROL = (
    _gauge(
        CONTROLLER_CONNECTED,
        "connections",
        (),
        "1: the stream of reports to the controller is open; 0: it is not, and local rules hold.",
        by=_WORKER + _STORE + _OFFLOAD,
    ),
    _counter(REPORTS, "reports", ("service",), "Reports of telemetry that were applied.", by=_CONTROLLER),
    _gauge(
        REPORTING_PROCESSES, "processes", ("service",), "Processes whose stream of reports is open.", by=_CONTROLLER
    ),
    _counter(
        PROCESS_RESTARTS, "restarts", ("service",), "Processes that came back with another boot token.", by=_CONTROLLER
    ),
    _counter(
        DECISIONS, "decisions", ("direction", "reason"), "Moves that the rules decided, by reason.", by=_CONTROLLER
    ),
    _counter(
        HOLDS,
        "holds",
        ("reason",),
        "How often a segment was not moved, or an event changed nothing, by reason.",
        by=_CONTROLLER,
    ),
    _counter(COMMANDS, "commands", ("outcome",), "Commands by how they ended.", by=_CONTROLLER),
    _histogram(
        DECISION_DURATION,
        "seconds",
        (),
        "From the arrival of a report to the sending of the commands that follow from it.",
        by=_CONTROLLER,
        buckets=DECISION_BUCKETS,
    ),
)

_PROCESS = (
    _gauge(PROCESS_INFO, "processes", ("service", "version"), "1: what this process is.", by=EVERY_SERVICE),
    _gauge(PROCESS_START, "seconds", (), "When the process began, since 1970.", by=EVERY_SERVICE),
    _counter(PROCESS_CPU, "seconds", (), "CPU time used, in user and system mode.", by=EVERY_SERVICE),
    _gauge(PROCESS_RESIDENT, "bytes", (), "Resident memory, shared regions included.", by=EVERY_SERVICE),
    _gauge(PROCESS_VIRTUAL, "bytes", (), "Address space in use.", by=EVERY_SERVICE),
    _gauge(PROCESS_DESCRIPTORS, "descriptors", (), "Open descriptors.", by=EVERY_SERVICE),
    _gauge(PROCESS_DESCRIPTORS_MAX, "descriptors", (), "Descriptors that may be open.", by=EVERY_SERVICE),
    _counter(
        TRACE_SPANS,
        "spans",
        ("outcome",),
        "Spans: recorded, and of those sent or failed. What is neither waits, or was dropped because too many waited.",
        by=EVERY_SERVICE,
    ),
)

_DECLARED = (*_TIERS, *_REQUESTS, *_STORAGE, *_RETRIEVAL, *_BETWEEN, *_CONTROL, *_PROCESS)

METRICS: Final = {metric.name: metric for metric in _DECLARED}
"""All metrics by name."""

assert len(METRICS) == len(_DECLARED), "a metric is declared twice"


def declared(name: str, kind: Kind, labels: dict[str, str]) -> Metric:
    """The declaration that a measurement belongs to. Whatever it does not match is our own mistake: AssertionError."""
    metric = METRICS.get(name)
    assert metric is not None, f"metric {name} is not declared in telemetry/names.py"
    assert metric.kind is kind, f"metric {name} is a {metric.kind}, not a {kind}"
    assert labels.keys() == set(metric.labels), f"metric {name} has labels {metric.labels}, not {tuple(labels)}"
    return metric
