"""What a metric is declared by."""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import Final


class Kind(enum.StrEnum):
    """How a metric behaves."""

    COUNTER = "counter"
    GAUGE = "gauge"
    HISTOGRAM = "histogram"


class Service(enum.StrEnum):
    """A kind of process. An embedded node is all of them in one."""

    GATEWAY = "gateway"
    GPU_WORKER = "gpu_worker"
    NVME_IO = "nvme_io"
    ANN_OFFLOAD = "ann_offload"
    MIGRATION_CONTROLLER = "migration_controller"


EVERY_SERVICE: Final = tuple(Service)


@dataclass(frozen=True, slots=True)
class Metric:
    """One declared metric."""

    name: str
    kind: Kind
    unit: str
    """Base unit, or what is counted."""
    labels: tuple[str, ...]
    sentence: str
    services: tuple[Service, ...]
    """Who emits it."""
    buckets: tuple[float, ...] = ()
    """Upper bounds of a histogram, ascending; the one above all is not named."""

    def __post_init__(self) -> None:
        assert self.services, f"nobody emits {self.name}"
        assert bool(self.buckets) == (self.kind is Kind.HISTOGRAM), f"{self.name}: histograms alone have buckets"
        assert list(self.buckets) == sorted(set(self.buckets)), f"{self.name}: buckets do not ascend"


RATIO_BUCKETS: Final = (0.5, 0.6, 0.7, 0.8, 0.85, 0.9, 0.925, 0.95, 0.975, 0.99, 1.0)
"""Closer where quality is decided."""
REQUEST_BUCKETS: Final = (0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0)
"""Seconds: from a prompt that was found to a long one that is computed."""
STEP_BUCKETS: Final = (0.0025, 0.005, 0.01, 0.015, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.25, 0.5, 1.0, 2.5)
"""Seconds of one decode step."""
MOVE_BUCKETS: Final = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 10.0)
"""Seconds: a segment takes 1 ms in memory and 100 on a slow disk."""
DECISION_BUCKETS: Final = (0.0001, 0.00025, 0.0005, 0.001, 0.002, 0.003, 0.005, 0.01, 0.025, 0.1, 1.0)
"""Seconds; 5 ms is what a decision may take."""
