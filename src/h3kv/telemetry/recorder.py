"""Measurements kept in this process: what an embedded node and the tests read."""

from __future__ import annotations

from dataclasses import dataclass

from h3kv.telemetry.metric import Kind
from h3kv.telemetry.names import METRICS, declared

_Series = tuple[str, tuple[tuple[str, str], ...]]


@dataclass(frozen=True, slots=True)
class Distribution:
    """Summary of a histogram's observations."""

    count: int
    total: float
    largest: float

    @property
    def mean(self) -> float:
        """Average observation; there is at least one."""
        return self.total / self.count


class Recorder:
    """Satisfies `Telemetry`. Memory grows with the number of label values, not of measurements.

    A name, kind or label that `telemetry.names` does not declare is our own mistake: AssertionError.
    """

    def __init__(self) -> None:
        self._values: dict[_Series, float] = {}
        self._distributions: dict[_Series, Distribution] = {}

    def count(self, name: str, amount: float = 1.0, **labels: str) -> None:
        """See `Telemetry.count`."""
        assert amount >= 0, f"counter {name} cannot go down"
        series = _series(name, Kind.COUNTER, labels)
        self._values[series] = self._values.get(series, 0.0) + amount

    def gauge(self, name: str, value: float, **labels: str) -> None:
        """See `Telemetry.gauge`."""
        self._values[_series(name, Kind.GAUGE, labels)] = value

    def observe(self, name: str, value: float, **labels: str) -> None:
        """See `Telemetry.observe`."""
        series = _series(name, Kind.HISTOGRAM, labels)
        seen = self._distributions.get(series)
        self._distributions[series] = (
            Distribution(1, value, value)
            if seen is None
            else Distribution(seen.count + 1, seen.total + value, max(seen.largest, value))
        )

    def value(self, name: str, **labels: str) -> float:
        """A counter or gauge now; 0 before the first measurement."""
        return self._values.get(_series(name, METRICS[name].kind, labels), 0.0)

    def distribution(self, name: str, **labels: str) -> Distribution | None:
        """A histogram now; None before the first observation."""
        return self._distributions.get(_series(name, Kind.HISTOGRAM, labels))


def _series(name: str, kind: Kind, labels: dict[str, str]) -> _Series:
    """The time series that a measurement belongs to."""
    declared(name, kind, labels)
    return name, tuple(sorted(labels.items()))
