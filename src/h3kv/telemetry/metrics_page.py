"""The metrics of one process as Prometheus reads them."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Final, TypeAlias

import prometheus_client
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, ProcessCollector
from prometheus_client.exposition import choose_encoder

from h3kv import __version__
from h3kv.telemetry import names
from h3kv.telemetry.metric import Kind, Metric, Service
from h3kv.telemetry.names import METRICS, declared

_Instrument: TypeAlias = Counter | Gauge | Histogram

_disable_created: Callable[[], None] = prometheus_client.disable_created_metrics

_COLLECTED: Final = {
    names.PROCESS_START,
    names.PROCESS_CPU,
    names.PROCESS_RESIDENT,
    names.PROCESS_VIRTUAL,
    names.PROCESS_DESCRIPTORS,
    names.PROCESS_DESCRIPTORS_MAX,
}
"""Read from the system when the page is asked for."""


class MetricsPage:
    """Satisfies `Telemetry`, for any threads. Has every metric that its service emits from the beginning, and no other.

    A name, kind or label that is not declared is our own mistake, and so is a metric of another service:
    AssertionError. Memory grows with the number of label values, not of measurements.
    """

    def __init__(self, service: Service) -> None:
        # Times of creation would be half of all series, and none of them is declared.
        _disable_created()
        self.service = service
        self._registry = CollectorRegistry()
        self._instruments = {
            metric.name: _instrument(metric, self._registry)
            for metric in METRICS.values()
            if service in metric.services and metric.name not in _COLLECTED
        }
        ProcessCollector(namespace="h3", registry=self._registry)
        self.gauge(names.PROCESS_INFO, 1, service=service, version=__version__)

    def count(self, name: str, amount: float = 1.0, **labels: str) -> None:
        """See `Telemetry.count`."""
        assert amount >= 0, f"counter {name} cannot go down"
        counter = self._series(name, Kind.COUNTER, labels)
        assert isinstance(counter, Counter)
        counter.inc(amount)

    def gauge(self, name: str, value: float, **labels: str) -> None:
        """See `Telemetry.gauge`."""
        gauge = self._series(name, Kind.GAUGE, labels)
        assert isinstance(gauge, Gauge)
        gauge.set(value)

    def observe(self, name: str, value: float, **labels: str) -> None:
        """See `Telemetry.observe`."""
        histogram = self._series(name, Kind.HISTOGRAM, labels)
        assert isinstance(histogram, Histogram)
        histogram.observe(value)

    def value(self, name: str, **labels: str) -> float:
        """A counter or gauge now: 0 before the first measurement with these labels, NaN for a gauge that has none.

        Cost: looks through the whole page.
        """
        metric = declared(name, METRICS[name].kind, labels)
        assert metric.kind is not Kind.HISTOGRAM, f"{name} is a histogram: it has no one value"
        return self._registry.get_sample_value(name, labels) or 0.0

    def render(self, accept: str = "") -> tuple[bytes, str]:
        """The page, and its content type: the best of those that an `Accept` header names."""
        encode, content_type = choose_encoder(accept)
        return encode(self._registry), content_type

    def _series(self, name: str, kind: Kind, labels: dict[str, str]) -> _Instrument:
        metric = declared(name, kind, labels)
        instrument = self._instruments.get(name)
        assert instrument is not None, f"{self.service} does not emit {name}: telemetry/names.py says who does"
        return instrument.labels(**labels) if metric.labels else instrument


def _instrument(metric: Metric, registry: CollectorRegistry) -> _Instrument:
    if metric.kind is Kind.COUNTER:
        return Counter(metric.name, metric.sentence, metric.labels, registry=registry)
    if metric.kind is Kind.HISTOGRAM:
        return Histogram(metric.name, metric.sentence, metric.labels, buckets=metric.buckets, registry=registry)
    gauge = Gauge(metric.name, metric.sentence, metric.labels, registry=registry)
    if not metric.labels:
        gauge.set(math.nan)
    return gauge
