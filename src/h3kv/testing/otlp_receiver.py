"""Collects the spans that processes send: a collector for tests, on a port of this machine.

It takes what a real one takes (`opentelemetry.proto.collector.trace.v1.TraceService`), and keeps it in memory.
"""

from __future__ import annotations

import concurrent.futures
import threading
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self

import grpc
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTraceServiceRequest,
    ExportTraceServiceResponse,
)
from opentelemetry.proto.collector.trace.v1.trace_service_pb2_grpc import (
    TraceServiceServicer,
    add_TraceServiceServicer_to_server,
)
from opentelemetry.proto.common.v1.common_pb2 import AnyValue, KeyValue
from opentelemetry.proto.trace.v1.trace_pb2 import Span, Status

from h3kv.core.units import NS_PER_S


@dataclass(frozen=True, slots=True)
class ReceivedSpan:
    """One span as it arrived."""

    name: str
    service: str
    """`service.name` of the process."""
    instance: str
    """`service.instance.id` of it."""
    trace_id: bytes
    span_id: bytes
    parent_id: bytes | None
    """None: it began its trace."""
    start_ns: int
    """Since 1970."""
    end_ns: int
    attributes: dict[str, str | int | float | bool]
    has_failed: bool


class OtlpReceiver:
    """Receives from its making to `close`; `with` closes it too."""

    def __init__(self) -> None:
        self._arrived = threading.Condition()
        self._spans: list[ReceivedSpan] = []
        self._server = grpc.server(
            concurrent.futures.ThreadPoolExecutor(2, thread_name_prefix="otlp"), options=(("grpc.so_reuseport", 0),)
        )
        register: Callable[[TraceServiceServicer, grpc.Server], None] = add_TraceServiceServicer_to_server
        register(_Servicer(self._take), self._server)
        port = self._server.add_insecure_port("127.0.0.1:0")
        self._server.start()
        self.endpoint = f"http://127.0.0.1:{port}"
        """For `TracingConfig.endpoint`."""

    @property
    def spans(self) -> list[ReceivedSpan]:
        """All that arrived, in the order of arrival."""
        with self._arrived:
            return list(self._spans)

    def wait_for(self, *names: str, timeout_ns: int = 30 * NS_PER_S) -> list[ReceivedSpan]:
        """All spans, as soon as there is one of each of these names. AssertionError when the time is over before."""
        with self._arrived:
            is_there = self._arrived.wait_for(lambda: set(names) <= self._names(), timeout_ns / NS_PER_S)
            assert is_there, f"{sorted(set(names) - self._names())} did not arrive; {sorted(self._names())} did"
            return list(self._spans)

    def close(self) -> None:
        """Refuse what comes from now on. Calling it again does nothing."""
        self._server.stop(None).wait()

    def _names(self) -> set[str]:
        return {span.name for span in self._spans}

    def _take(self, request: ExportTraceServiceRequest) -> None:
        received = [
            _received(span, _values(group.resource.attributes))
            for group in request.resource_spans
            for scope in group.scope_spans
            for span in scope.spans
        ]
        with self._arrived:
            self._spans += received
            self._arrived.notify_all()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def parent_of(span: ReceivedSpan, spans: list[ReceivedSpan]) -> ReceivedSpan | None:
    """The span that another is a child of; None for one that began its trace.

    AssertionError when it is not among these, or of another trace.
    """
    if span.parent_id is None:
        return None
    found = [each for each in spans if each.span_id == span.parent_id]
    assert len(found) == 1, f"{span.name} has a parent that did not arrive"
    assert found[0].trace_id == span.trace_id, f"{span.name} and its parent {found[0].name} are of two traces"
    return found[0]


def edges(spans: list[ReceivedSpan]) -> set[tuple[str, str]]:
    """Names of parents and their children. Raises as `parent_of`."""
    pairs = ((parent_of(span, spans), span) for span in spans)
    return {(parent.name, child.name) for parent, child in pairs if parent is not None}


class _Servicer(TraceServiceServicer):
    def __init__(self, take: Callable[[ExportTraceServiceRequest], None]) -> None:
        self._take = take

    def Export(self, request: ExportTraceServiceRequest, context: Any) -> ExportTraceServiceResponse:  # noqa: N802 (the protocol's name)
        del context
        self._take(request)
        return ExportTraceServiceResponse()


def _received(span: Span, resource: dict[str, str | int | float | bool]) -> ReceivedSpan:
    return ReceivedSpan(
        name=span.name,
        service=str(resource["service.name"]),
        instance=str(resource["service.instance.id"]),
        trace_id=span.trace_id,
        span_id=span.span_id,
        parent_id=span.parent_span_id or None,
        start_ns=span.start_time_unix_nano,
        end_ns=span.end_time_unix_nano,
        attributes=_values(span.attributes),
        has_failed=span.status.code == Status.STATUS_CODE_ERROR,
    )


def _values(attributes: Iterable[KeyValue]) -> dict[str, str | int | float | bool]:
    return {entry.key: _value(entry.value) for entry in attributes}


def _value(value: AnyValue) -> str | int | float | bool:
    kind = value.WhichOneof("value")
    assert kind in {"string_value", "int_value", "double_value", "bool_value"}, f"an attribute is a {kind}"
    found: str | int | float | bool = getattr(value, kind)
    return found
