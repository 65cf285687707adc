from __future__ import annotations

import socket
from collections.abc import Iterator

import pytest

from h3kv.core.errors import TierBrokenError
from h3kv.core.types import Tier
from h3kv.core.units import NS_PER_MS, NS_PER_S
from h3kv.telemetry import names, spans
from h3kv.telemetry.metric import Service
from h3kv.telemetry.metrics_page import MetricsPage
from h3kv.telemetry.otlp_tracer import OtlpTracer
from h3kv.telemetry.trace_context import TraceContext
from h3kv.telemetry.tracing import TracingConfig
from h3kv.testing.otlp_receiver import OtlpReceiver, parent_of

WAIT_NS = 30 * NS_PER_S
CONTEXT = TraceContext(b"t" * 16, b"s" * 8)


class Rig:
    """A tracer of gpu_worker."""

    def __init__(self, config: TracingConfig) -> None:
        self.page = MetricsPage(Service.GPU_WORKER)
        self.tracer = OtlpTracer(Service.GPU_WORKER, config, self.page, instance="gpu_worker")

    def outcome(self, outcome: str) -> float:
        return self.page.value(names.TRACE_SPANS, outcome=outcome)


@pytest.fixture
def receiver() -> Iterator[OtlpReceiver]:
    with OtlpReceiver() as receiver:
        yield receiver


def rig_of(receiver: OtlpReceiver, **config: float) -> Rig:
    return Rig(TracingConfig(receiver.endpoint, **config))


def test_spans_that_wait_are_sent_when_the_tracer_stops(receiver: OtlpReceiver) -> None:
    rig = rig_of(receiver, send_interval_ns=3600 * NS_PER_S)
    with rig.tracer.begin(spans.GENERATE) as parent, rig.tracer.begin(spans.PREFILL, parent=parent.context):
        pass
    assert rig.tracer.stop(WAIT_NS)
    assert rig.tracer.stop(WAIT_NS)
    child, root = receiver.spans
    assert (child.name, root.name) == (spans.PREFILL, spans.GENERATE)
    assert parent_of(child, receiver.spans) == root
    assert rig.outcome("recorded") == rig.outcome("sent") == 2
    assert rig.outcome("failed") == 0


def test_a_span_ends_once(receiver: OtlpReceiver) -> None:
    rig = rig_of(receiver)
    span = rig.tracer.begin(spans.GENERATE)
    span.end()
    span.end()
    assert rig.tracer.stop(WAIT_NS)
    assert len(receiver.spans) == 1


def test_what_was_measured_anyway_becomes_a_span_of_that_length(receiver: OtlpReceiver) -> None:
    rig = rig_of(receiver)
    rig.tracer.record(spans.PREFILL, parent=CONTEXT, duration_ns=NS_PER_S, attributes={spans.TOKENS: 64})
    assert rig.tracer.stop(WAIT_NS)
    (span,) = receiver.spans
    assert span.end_ns - span.start_ns >= NS_PER_S
    assert (span.trace_id, span.parent_id) == (CONTEXT.trace_id, CONTEXT.span_id)
    assert span.attributes == {spans.TOKENS: 64}


@pytest.mark.parametrize(
    ("error", "reason"),
    [(TierBrokenError("gone: mend it", tier=Tier.NVME), "TIER_BROKEN"), (KeyError("slot"), "INTERNAL")],
)
def test_an_error_that_leaves_a_span_marks_it(receiver: OtlpReceiver, error: Exception, reason: str) -> None:
    rig = rig_of(receiver)
    with pytest.raises(type(error)), rig.tracer.begin(spans.GENERATE):
        raise error
    assert rig.tracer.stop(WAIT_NS)
    (span,) = receiver.spans
    assert span.has_failed
    assert span.attributes == {spans.ERROR_REASON: reason}


def test_a_stream_that_its_reader_closes_has_not_failed(receiver: OtlpReceiver) -> None:
    rig = rig_of(receiver)

    def stream() -> Iterator[int]:
        with rig.tracer.begin(spans.GENERATE):
            yield 1

    events = stream()
    next(events)
    events.close()
    assert rig.tracer.stop(WAIT_NS)
    assert [span.has_failed for span in receiver.spans] == [False]


def test_a_span_without_its_parent_belongs_to_a_request_that_nobody_traces(receiver: OtlpReceiver) -> None:
    rig = rig_of(receiver)
    span = rig.tracer.begin(spans.PREFILL)
    assert not span.is_recording
    assert span.context is None
    assert rig.outcome("recorded") == 0
    assert rig.tracer.stop(WAIT_NS)


def test_what_is_not_sampled_is_not_recorded_anywhere_below(receiver: OtlpReceiver) -> None:
    rig = rig_of(receiver, sampled_fraction=0.0)
    root = rig.tracer.begin(spans.GENERATE)
    assert not root.is_recording
    assert root.context is not None
    assert root.context.traceparent.endswith("-00")
    child = rig.tracer.begin(spans.PREFILL, parent=root.context)
    assert not child.is_recording
    assert child.context == root.context
    assert not rig.tracer.traces_step(0, root.context)
    root.end()
    child.end()
    assert rig.tracer.stop(WAIT_NS)
    assert receiver.spans == []


def test_a_caller_that_records_decides_for_all_below(receiver: OtlpReceiver) -> None:
    rig = rig_of(receiver, sampled_fraction=0.0)
    rig.tracer.begin(spans.GENERATE, parent=CONTEXT).end()
    assert rig.tracer.stop(WAIT_NS)
    assert [span.trace_id for span in receiver.spans] == [CONTEXT.trace_id]


def test_one_step_of_many_has_a_span(receiver: OtlpReceiver) -> None:
    rig = rig_of(receiver, steps_per_span=4)
    assert [step for step in range(10) if rig.tracer.traces_step(step, CONTEXT)] == [0, 4, 8]
    assert not rig.tracer.traces_step(0, None)
    assert rig.tracer.stop(WAIT_NS)


def test_spans_that_nobody_takes_are_counted_as_lost_and_the_end_is_bounded() -> None:
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        endpoint = f"http://127.0.0.1:{bound.getsockname()[1]}"
        rig = Rig(TracingConfig(endpoint, send_timeout_ns=200 * NS_PER_MS, send_interval_ns=3600 * NS_PER_S))
        for _ in range(3):
            rig.tracer.begin(spans.GENERATE).end()
        assert not rig.tracer.stop(100 * NS_PER_MS)
    assert rig.outcome("failed") == 3
    assert rig.outcome("sent") == 0


def test_nothing_is_sent_once_the_time_to_end_is_over(receiver: OtlpReceiver) -> None:
    rig = rig_of(receiver, send_interval_ns=3600 * NS_PER_S)
    rig.tracer.begin(spans.GENERATE).end()
    assert not rig.tracer.stop(0)
    assert receiver.spans == []
    assert rig.outcome("failed") == 1


def test_undeclared_names_are_our_own_mistake(receiver: OtlpReceiver) -> None:
    rig = rig_of(receiver)
    with pytest.raises(AssertionError, match="not declared"):
        rig.tracer.begin("gpu_worker.surprise")
    with pytest.raises(AssertionError, match="belongs to nvme_io"):
        rig.tracer.begin(spans.READ_PAGES)
    with rig.tracer.begin(spans.GENERATE) as span, pytest.raises(AssertionError, match="not declared"):
        span.set({"h3.surprise": 1})
    assert rig.tracer.stop(WAIT_NS)
