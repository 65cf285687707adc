from __future__ import annotations

import http.client
import json
import logging

import pytest

from h3kv.core.errors import AddressInUseError
from h3kv.core.units import NS_PER_S
from h3kv.telemetry import spans
from h3kv.telemetry.event_log import LogFormat, log_event
from h3kv.telemetry.metric import Service
from h3kv.telemetry.metrics_server import MetricsAddress
from h3kv.telemetry.process_telemetry import ProcessTelemetry, TelemetryConfig
from h3kv.telemetry.trace_context import TraceContext
from h3kv.telemetry.tracing import TracingConfig
from h3kv.testing.otlp_receiver import OtlpReceiver

CONTEXT = TraceContext(b"t" * 16, b"s" * 8)
LOGGER = logging.getLogger("h3kv.somewhere")


def test_page_spans_and_log_lines_are_one_processs(capsys: pytest.CaptureFixture[str]) -> None:
    with OtlpReceiver() as receiver:
        config = TelemetryConfig(tracing=TracingConfig(receiver.endpoint), log_format=LogFormat.JSON)
        with ProcessTelemetry(Service.ANN_OFFLOAD, config, instance="ann_offload-2") as telemetry:
            connection = http.client.HTTPConnection("127.0.0.1", telemetry.server.port, timeout=30)
            connection.request("GET", "/metrics")
            page = connection.getresponse().read().decode()
            connection.close()
            with telemetry.tracer.begin(spans.ATTEND, parent=CONTEXT) as span:
                log_event(LOGGER, "unit_refused", {spans.UNITS: 1}, trace=span.context)
            assert telemetry.stop(timeout_ns=30 * NS_PER_S)
        (received,) = receiver.spans
    assert 'h3_process_info{service="ann_offload"' in page
    assert (received.service, received.instance) == ("ann_offload", "ann_offload-2")
    (line,) = capsys.readouterr().err.splitlines()
    fields = json.loads(line)
    assert (fields["service"], fields["event"], fields["h3.unit.count"]) == ("ann_offload-2", "unit_refused", 1)
    assert (fields["trace_id"], fields["span_id"]) == (received.trace_id.hex(), received.span_id.hex())


def test_a_process_that_cannot_open_its_port_leaves_the_log_as_it_was() -> None:
    before = list(logging.getLogger().handlers)
    with ProcessTelemetry(Service.GATEWAY, TelemetryConfig(), instance="gateway") as first:
        config = TelemetryConfig(metrics=MetricsAddress(port=first.server.port))
        with pytest.raises(AddressInUseError):
            ProcessTelemetry(Service.GATEWAY, config, instance="gateway")
    assert logging.getLogger().handlers == before
