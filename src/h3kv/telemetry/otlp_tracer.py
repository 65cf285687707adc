"""Spans over opentelemetry, sent by OTLP over gRPC.

begin ... end --> bounded queue --> thread --> batches --> collector
                     full: dropped                fails: lost, counted
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from types import TracebackType
from typing import Final, Self, cast

from opentelemetry import trace
from opentelemetry.context import Context
from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter, SpanExportResult
from opentelemetry.sdk.trace.sampling import ParentBased, TraceIdRatioBased

from h3kv import __version__
from h3kv.core.errors import H3Error, InternalError
from h3kv.core.ports import Telemetry
from h3kv.core.units import NS_PER_MS, NS_PER_S
from h3kv.telemetry import names, spans
from h3kv.telemetry.metric import Service
from h3kv.telemetry.trace_context import TraceContext
from h3kv.telemetry.tracing import (
    NO_SPAN,
    NOTHING,
    Attributes,
    Span,
    TracingConfig,
    UnrecordedSpan,
    check_attributes,
    check_span,
)

BATCH_MAX: Final = 512
"""Spans in one message: some 200 KB."""

_DIRECT: Final = cast("tuple[tuple[str, str]]", (("grpc.enable_http_proxy", 0),))
"""A collector is in reach: a proxy of the environment is for other things. The exporter's annotation knows texts only,
gRPC wants a number."""


class OtlpTracer:
    """Satisfies `Tracer`. See `open_tracer`."""

    def __init__(self, service: Service, config: TracingConfig, telemetry: Telemetry, *, instance: str) -> None:
        assert config.endpoint is not None, "tracing is off"
        self._service = service
        self._steps_per_span = config.steps_per_span
        self._telemetry = telemetry
        self._sender = _Sender(config.endpoint, config.send_timeout_ns, telemetry)
        self._provider = TracerProvider(
            # Built directly: what the environment says to other programs of this machine is not ours.
            resource=Resource(
                {"service.name": service.value, "service.version": __version__, "service.instance.id": instance}
            ),
            sampler=ParentBased(TraceIdRatioBased(config.sampled_fraction)),
            shutdown_on_exit=False,
        )
        self._provider.add_span_processor(
            BatchSpanProcessor(
                self._sender,
                max_queue_size=config.spans_waiting_max,
                schedule_delay_millis=config.send_interval_ns / NS_PER_MS,
                max_export_batch_size=min(BATCH_MAX, config.spans_waiting_max),
            )
        )
        self._tracer = self._provider.get_tracer("h3kv", __version__)
        self._is_stopped = False

    def begin(self, name: str, *, parent: TraceContext | None = None, attributes: Attributes = NOTHING) -> Span:
        """See `Tracer.begin`."""
        return self._begin(name, parent, attributes, start_ns=None)

    def record(
        self, name: str, *, parent: TraceContext | None, duration_ns: int, attributes: Attributes = NOTHING
    ) -> None:
        """See `Tracer.record`."""
        self._begin(name, parent, attributes, start_ns=time.time_ns() - duration_ns).end()

    def traces_step(self, step: int, parent: TraceContext | None) -> bool:
        """See `Tracer.traces_step`."""
        return parent is not None and parent.is_sampled and step % self._steps_per_span == 0

    def stop(self, timeout_ns: int) -> bool:
        """See `Tracer.stop`. A message that is under way may take its own timeout beyond this one."""
        if not self._is_stopped:
            self._is_stopped = True
            self._sender.end_ns = time.monotonic_ns() + timeout_ns
            self._provider.shutdown()
        return self._sender.has_sent_all

    def _begin(self, name: str, parent: TraceContext | None, attributes: Attributes, *, start_ns: int | None) -> Span:
        check_span(name, self._service)
        check_attributes(attributes)
        if parent is None and not spans.SPANS[name].begins_trace:
            return NO_SPAN
        if parent is not None and not parent.is_sampled:
            return UnrecordedSpan(parent)
        span = self._tracer.start_span(name, _context(parent), attributes=attributes, start_time=start_ns)
        if not span.is_recording():
            return UnrecordedSpan(_known(span))
        self._telemetry.count(names.TRACE_SPANS, outcome="recorded")
        return _OtlpSpan(span)


class _OtlpSpan:
    """Satisfies `Span`."""

    __slots__ = ("_has_ended", "_span", "context")

    is_recording: Final = True

    def __init__(self, span: trace.Span) -> None:
        self._span = span
        self._has_ended = False
        self.context: TraceContext | None = _known(span)

    def set(self, attributes: Attributes) -> None:
        """See `Span.set`."""
        check_attributes(attributes)
        self._span.set_attributes(attributes)

    def fail(self, error: BaseException) -> None:
        """See `Span.fail`."""
        reason = error.reason if isinstance(error, H3Error) else InternalError.reason
        self._span.set_attribute(spans.ERROR_REASON, reason)
        self._span.set_status(trace.Status(trace.StatusCode.ERROR, reason))

    def end(self) -> None:
        """See `Span.end`."""
        if not self._has_ended:
            self._has_ended = True
            self._span.end()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        # A generator that its reader closes ended as it should.
        if error is not None and not isinstance(error, GeneratorExit):
            self.fail(error)
        self.end()


class _Sender(SpanExporter):
    """Counts what the exporter sends, and sends nothing after the tracer's end."""

    def __init__(self, endpoint: str, timeout_ns: int, telemetry: Telemetry) -> None:
        # With http: the exporter sends plain text, with https: by TLS.
        self._exporter = OTLPSpanExporter(endpoint, timeout=timeout_ns / NS_PER_S, channel_options=_DIRECT)
        self._telemetry = telemetry
        self.end_ns: int | None = None
        """Set when the tracer ends: from then on nothing more is sent."""
        self.has_sent_all = True
        """Whether nothing was lost since the tracer began to end."""

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        """See `SpanExporter.export`."""
        is_late = self.end_ns is not None and time.monotonic_ns() >= self.end_ns
        result = SpanExportResult.FAILURE if is_late else self._exporter.export(spans)
        is_sent = result is SpanExportResult.SUCCESS
        if not is_sent and self.end_ns is not None:
            self.has_sent_all = False
        self._telemetry.count(names.TRACE_SPANS, len(spans), outcome="sent" if is_sent else "failed")
        return result

    def shutdown(self) -> None:
        """See `SpanExporter.shutdown`."""
        self._exporter.shutdown(timeout_millis=0)


def _context(parent: TraceContext | None) -> Context:
    """What opentelemetry knows a parent by. Always a new one: what its own current span is does not count."""
    if parent is None:
        return Context()
    known = trace.SpanContext(
        int.from_bytes(parent.trace_id, "big"),
        int.from_bytes(parent.span_id, "big"),
        is_remote=True,
        trace_flags=trace.TraceFlags(trace.TraceFlags.SAMPLED),
    )
    return trace.set_span_in_context(trace.NonRecordingSpan(known), Context())


def _known(span: trace.Span) -> TraceContext:
    known = span.get_span_context()
    return TraceContext(known.trace_id.to_bytes(16, "big"), known.span_id.to_bytes(8, "big"), known.trace_flags.sampled)
