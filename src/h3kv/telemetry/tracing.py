"""Spans, where tracing is on; nearly nothing where it is off.

A span is begun and ended by hand or with `with`, and given to what happens below it as `parent`: there is no current
span, since one thread computes for many requests.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from types import TracebackType
from typing import Final, Protocol, Self, TypeAlias

from h3kv.core.errors import ConfigError
from h3kv.core.ports import Telemetry
from h3kv.core.units import NS_PER_S
from h3kv.telemetry.metric import Service
from h3kv.telemetry.spans import ATTRIBUTES, SPANS
from h3kv.telemetry.trace_context import TraceContext

Attributes: TypeAlias = Mapping[str, str | int | float | bool]
"""Values by the names that `telemetry.spans` declares."""

NOTHING: Final[Attributes] = {}

_ENDPOINT: Final = re.compile(r"https?://(?:[A-Za-z0-9.-]{1,253}|\[[0-9A-Fa-f:.]{2,45}\]):[0-9]{1,5}/?")


@dataclass(frozen=True, slots=True)
class TracingConfig:
    """Where spans go, and how many.

    Raises:
        ConfigError: a value is out of its bounds.
    """

    endpoint: str | None = None
    """Of a collector that speaks OTLP over gRPC: `http://jaeger:4317`, or `https:`. None: tracing is off."""
    sampled_fraction: float = 1.0
    """Of the traces that begin here. Those that a caller began are recorded when the caller records them."""
    steps_per_span: int = 32
    """Of so many steps of a request's decode, one has a span."""
    spans_waiting_max: int = 4096
    """Spans that wait to be sent; further ones are dropped."""
    send_interval_ns: int = NS_PER_S
    """How often those are sent that wait."""
    send_timeout_ns: int = 2 * NS_PER_S
    """After which sending is given up: those spans are lost."""

    def __post_init__(self) -> None:
        if self.endpoint is not None and not _ENDPOINT.fullmatch(self.endpoint):
            raise ConfigError(
                f"tracing.endpoint = {self.endpoint!r}: must be http://host:port or https://host:port, such as "
                "http://127.0.0.1:4317",
                field="tracing.endpoint",
            )
        self._require(0.0 <= self.sampled_fraction <= 1.0, "sampled_fraction", "0 to 1")
        for field in ("steps_per_span", "spans_waiting_max", "send_interval_ns", "send_timeout_ns"):
            self._require(getattr(self, field) > 0, field, "more than 0")

    def _require(self, holds: bool, field: str, rule: str) -> None:
        if not holds:
            raise ConfigError(f"tracing.{field} = {getattr(self, field)}: must be {rule}", field=f"tracing.{field}")


OFF: Final = TracingConfig()


class Span(Protocol):
    """Something that takes time. Any thread may use it, one at a time."""

    @property
    def context(self) -> TraceContext | None:
        """What children and other processes need: pass it on. None where there is no trace."""
        ...

    @property
    def is_recording(self) -> bool:
        """Whether attributes are kept: where they cost something to find, ask first."""
        ...

    def set(self, attributes: Attributes) -> None:
        """Add attributes, over those of the same name."""
        ...

    def fail(self, error: BaseException) -> None:
        """Mark it as failed, with the reason of the error."""
        ...

    def end(self) -> None:
        """It ends now. Calling it again does nothing. `with` ends it too, and marks it when an error leaves."""
        ...

    def __enter__(self) -> Self: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...


class Tracer(Protocol):
    """Where spans come from, for any threads."""

    def begin(self, name: str, *, parent: TraceContext | None = None, attributes: Attributes = NOTHING) -> Span:
        """A span that begins now. Without a parent, one that begins no trace is not recorded."""
        ...

    def record(
        self, name: str, *, parent: TraceContext | None, duration_ns: int, attributes: Attributes = NOTHING
    ) -> None:
        """A span that ends now and took so long: for what was measured anyway."""
        ...

    def traces_step(self, step: int, parent: TraceContext | None) -> bool:
        """Whether this step of a request's decode has a span, by its number within the request."""
        ...

    def stop(self, timeout_ns: int) -> bool:
        """Send what waits. Returns whether all of it went in that time. Calling it again does nothing."""
        ...


class UnrecordedSpan:
    """Satisfies `Span` and keeps nothing, but passes on the trace that it belongs to."""

    __slots__ = ("context",)

    is_recording: Final = False

    def __init__(self, context: TraceContext | None) -> None:
        self.context = context

    def set(self, attributes: Attributes) -> None:
        """See `Span.set`."""

    def fail(self, error: BaseException) -> None:
        """See `Span.fail`."""

    def end(self) -> None:
        """See `Span.end`."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        return None


NO_SPAN: Final = UnrecordedSpan(None)


class NullTracer:
    """Satisfies `Tracer` where tracing is off. A trace passes through: processes behind this one can join it."""

    def begin(self, name: str, *, parent: TraceContext | None = None, attributes: Attributes = NOTHING) -> Span:
        """See `Tracer.begin`."""
        del name, attributes
        return NO_SPAN if parent is None else UnrecordedSpan(parent)

    def record(
        self, name: str, *, parent: TraceContext | None, duration_ns: int, attributes: Attributes = NOTHING
    ) -> None:
        """See `Tracer.record`."""

    def traces_step(self, step: int, parent: TraceContext | None) -> bool:
        """See `Tracer.traces_step`."""
        del step, parent
        return False

    def stop(self, timeout_ns: int) -> bool:
        """See `Tracer.stop`."""
        del timeout_ns
        return True


def open_tracer(service: Service, config: TracingConfig, telemetry: Telemetry, *, instance: str) -> Tracer:
    """A tracer that sends spans to the endpoint, or one that records none.

    Args:
        service: whose spans these are.
        config: where they go.
        telemetry: receives how many were recorded, sent and lost.
        instance: tells processes of one service apart: `ann_offload-2`.
    """
    if config.endpoint is None:
        return NullTracer()
    # Opentelemetry costs 100 ms and threads: it is imported only where spans are sent.
    from h3kv.telemetry.otlp_tracer import OtlpTracer

    return OtlpTracer(service, config, telemetry, instance=instance)


def check_attributes(attributes: Attributes) -> None:
    """AssertionError unless all of them are declared."""
    unknown = attributes.keys() - ATTRIBUTES.keys()
    assert not unknown, f"{sorted(unknown)} are not declared in telemetry/spans.py"


def check_span(name: str, service: Service) -> None:
    """AssertionError unless the span is declared, and the service's own."""
    declared = SPANS.get(name)
    assert declared is not None, f"span {name} is not declared in telemetry/spans.py"
    assert declared.service is service, f"span {name} belongs to {declared.service}, not to {service}"
