"""What gpu_worker measures, for its page of metrics and for `GetStatistics`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

import torch

from h3kv.core.types import StoreStatistics, Tier
from h3kv.core.units import NS_PER_MS
from h3kv.engine.stopping import FinishReason
from h3kv.node import Node
from h3kv.policy.load_or_recompute import Choice
from h3kv.telemetry import names
from h3kv.telemetry.metric import Service
from h3kv.telemetry.metrics_page import MetricsPage
from h3kv.telemetry.names import METRICS
from h3kv.telemetry.recorder import Recorder
from services.gpu_worker.documents_record import State
from services.gpu_worker.quota import TOO_LARGE, USED_UP

INTERVAL_NS: Final = 100 * NS_PER_MS
"""Between two looks at what the node holds: each costs a walk over its segments."""


class WorkerRecorder(Recorder):
    """Keeps all measurements of the node, and shows those of gpu_worker on its page.

    What an embedded tier measures belongs to nvme_io: this process's page has no place for it.
    """

    def __init__(self, page: MetricsPage) -> None:
        super().__init__()
        self._page = page
        self.requests_total = 0

    @property
    def requests(self) -> tuple[int, int, int]:
        """Running, waiting, ended."""
        running, waiting = self.value(names.REQUESTS_IN_FLIGHT), self.value(names.REQUESTS_WAITING)
        return int(running), int(waiting), self.requests_total

    def count(self, name: str, amount: float = 1.0, **labels: str) -> None:
        """See `Telemetry.count`."""
        super().count(name, amount, **labels)
        self.requests_total += name == names.REQUESTS
        if _is_own(name):
            self._page.count(name, amount, **labels)

    def gauge(self, name: str, value: float, **labels: str) -> None:
        """See `Telemetry.gauge`."""
        super().gauge(name, value, **labels)
        if _is_own(name):
            self._page.gauge(name, value, **labels)

    def observe(self, name: str, value: float, **labels: str) -> None:
        """See `Telemetry.observe`."""
        super().observe(name, value, **labels)
        if _is_own(name):
            self._page.observe(name, value, **labels)


@dataclass(frozen=True, slots=True)
class Snapshot:
    """What the node held at one moment, and totals since its start."""

    tiers: Mapping[Tier, StoreStatistics]
    pinned_bytes: Mapping[Tier, int]
    home_pins: int
    """Pins of running sequences on segments in memory."""
    requests_running: int
    requests_waiting: int
    requests_total: int
    prefill_tokens_total: int
    cached_tokens_total: Mapping[Tier, int]
    decode_tokens_total: int
    segments_cached: int
    cold_kv_ratio: float
    recall: float | None
    units_taken_back_total: int


class Observer:
    """Looks at the node between steps. The engine's thread calls `look`, any thread reads `snapshot`.

    Args:
        recorder: of the node.
        node: looked at once at the beginning.
    """

    def __init__(self, recorder: WorkerRecorder, node: Node) -> None:
        self._recorder = recorder
        self._looked_ns: int | None = None
        self._requests = recorder.requests
        self.snapshot = self._take(node)

    def look(self, node: Node, now_ns: int) -> None:
        """Take notice of what changed: of requests at once, of all else now and then."""
        is_early = self._looked_ns is not None and now_ns - self._looked_ns < INTERVAL_NS
        if is_early and self._requests == self._recorder.requests:
            return
        self._looked_ns, self._requests = now_ns, self._recorder.requests
        self.snapshot = self._take(node)

    def _take(self, node: Node) -> Snapshot:
        contents, recorder = node.pool.segments.statistics(), self._recorder
        ratio = contents.cold_blocks / contents.used_blocks if contents.used_blocks else 0.0
        recorder.gauge(names.COLD_KV_RATIO, ratio)
        device = node.stores.device.arena.device
        if device.type == "cuda":
            free, total = torch.cuda.mem_get_info(device)
            recorder.gauge(names.DEVICE_MEMORY_USED, 1 - free / total, device=str(device))
        running, waiting, ended = recorder.requests
        measured = recorder.distribution(names.ATTEND_RECALL)
        return Snapshot(
            tiers=node.statistics(),
            pinned_bytes={node.pool.segments.tier: contents.pinned_bytes},
            home_pins=contents.home_pins,
            requests_running=running,
            requests_waiting=waiting,
            requests_total=ended,
            prefill_tokens_total=int(recorder.value(names.PREFILL_TOKENS)),
            cached_tokens_total={tier: int(recorder.value(names.PREFIX_HIT_TOKENS, tier=tier)) for tier in Tier},
            decode_tokens_total=int(recorder.value(names.DECODE_TOKENS)),
            segments_cached=contents.sealed,
            cold_kv_ratio=ratio,
            recall=None if measured is None else measured.mean,
            units_taken_back_total=int(recorder.value(names.ATTEND_UNITS, by="self_late")),
        )


def prepare(page: MetricsPage) -> None:
    """Series that are zero until something happens, so that rates over them begin at zero."""
    for reason in FinishReason:
        page.count(names.REQUESTS, 0, reason=reason)
    page.gauge(names.CONTROLLER_CONNECTED, 0)
    page.gauge(names.OFFLOAD_WORKERS, 0)
    for who in ("worker", "self", "self_late"):
        page.count(names.ATTEND_UNITS, 0, by=who)
        page.count(names.SCAN_UNITS, 0, by=who)
    for tier in (Tier.HOST, Tier.NVME):
        page.count(names.EVICTED_SEGMENTS, 0, tier=tier)
    for state in State:
        page.gauge(names.DOCUMENTS, 0, state=state)
    page.gauge(names.DOCUMENT_ERASURES, 0)
    page.count(names.FAILED_SEALS, 0, tier=Tier.HOST)
    for choice in Choice:
        page.count(names.LOAD_OR_RECOMPUTE, 0, choice=choice)
        page.count(names.LOAD_OR_RECOMPUTE_TOKENS, 0, choice=choice)
    for refusal in (TOO_LARGE, USED_UP):
        page.count(names.QUOTA_REFUSALS, 0, reason=refusal)
    page.count(names.QUOTA_LOCAL_REQUESTS, 0)


def _is_own(name: str) -> bool:
    return Service.GPU_WORKER in METRICS[name].services
