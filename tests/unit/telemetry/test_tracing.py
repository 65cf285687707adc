import subprocess
import sys

import pytest

from h3kv.core.errors import ConfigError
from h3kv.telemetry import spans
from h3kv.telemetry.metric import Service
from h3kv.telemetry.recorder import Recorder
from h3kv.telemetry.trace_context import TraceContext
from h3kv.telemetry.tracing import OFF, NullTracer, TracingConfig, open_tracer

CONTEXT = TraceContext(b"t" * 16, b"s" * 8)


def test_without_an_endpoint_there_is_nothing_to_record() -> None:
    tracer = open_tracer(Service.NVME_IO, OFF, Recorder(), instance="nvme_io")
    assert isinstance(tracer, NullTracer)
    with tracer.begin(spans.READ_PAGES) as span:
        span.set({spans.PAGES: 1})
        span.fail(OSError())
        span.end()
    assert not span.is_recording
    assert span.context is None
    tracer.record(spans.READ_PAGES, parent=None, duration_ns=1)
    assert not tracer.traces_step(0, CONTEXT)
    assert tracer.stop(0)


def test_a_trace_passes_through_a_process_that_records_nothing() -> None:
    assert NullTracer().begin(spans.GENERATE, parent=CONTEXT).context == CONTEXT


def test_errors_pass_through_a_span_that_is_not_recorded() -> None:
    with pytest.raises(OSError, match="disk"), NullTracer().begin(spans.GENERATE, parent=CONTEXT):
        raise OSError("disk")


@pytest.mark.slow
def test_opentelemetry_and_grpc_are_not_imported_while_tracing_is_off() -> None:
    program = (
        "import sys\n"
        "from h3kv.telemetry.metric import Service\n"
        "from h3kv.telemetry.process_telemetry import ProcessTelemetry, TelemetryConfig\n"
        "with ProcessTelemetry(Service.NVME_IO, TelemetryConfig(), instance='nvme_io') as telemetry:\n"
        "    telemetry.tracer.begin('nvme_io.read_pages').end()\n"
        "assert not {'opentelemetry', 'grpc', 'torch'} & sys.modules.keys()\n"
    )
    subprocess.run([sys.executable, "-W", "error", "-c", program], check=True)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("endpoint", "jaeger:4317"),
        ("endpoint", "http://jaeger"),
        ("endpoint", "http://user:word@jaeger:4317"),
        ("sampled_fraction", -0.1),
        ("sampled_fraction", 1.1),
        ("steps_per_span", 0),
        ("spans_waiting_max", 0),
        ("send_interval_ns", 0),
        ("send_timeout_ns", 0),
    ],
)
def test_bad_values_name_their_setting(field: str, value: object) -> None:
    with pytest.raises(ConfigError) as caught:
        TracingConfig(**{field: value})
    assert caught.value.field == f"tracing.{field}"
