"""One request, three processes, one trace."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from h3kv.api.nvme_io.v1 import nvme_io_service_pb2 as nvme
from h3kv.api.nvme_io.v1 import nvme_io_service_pb2_grpc as nvme_grpc
from h3kv.core.errors import TierBrokenError
from h3kv.core.units import NS_PER_S
from h3kv.memory.mailbox import Mailbox
from h3kv.memory.mapping import Mapping
from h3kv.rpc.addresses import UnixAddress
from h3kv.rpc.call_context import CallContext
from h3kv.rpc.client import PeerChannel
from h3kv.telemetry import spans
from h3kv.telemetry.metric import Service
from h3kv.telemetry.metrics_page import MetricsPage
from h3kv.telemetry.spans import SPANS
from h3kv.telemetry.trace_context import pack_context
from h3kv.telemetry.tracing import Span, Tracer, TracingConfig, open_tracer
from h3kv.testing.otlp_receiver import OtlpReceiver, edges, parent_of

from .traced_process import GEOMETRY, PAGE_BYTES, PAGES

PROGRAM = Path(__file__).with_name("traced_process.py")
WAIT_NS = 30 * NS_PER_S


@contextlib.contextmanager
def process(*arguments: object, pass_fds: tuple[int, ...] = ()) -> Iterator[None]:
    command = [sys.executable, str(PROGRAM), *map(str, arguments)]
    child = subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, pass_fds=pass_fds, env=dict(os.environ)
    )
    assert child.stdin is not None
    assert child.stdout is not None
    try:
        assert child.stdout.readline() == "ready\n"
        yield
    except BaseException:
        child.kill()
        raise
    finally:
        child.stdin.close()
        child.stdout.close()
        assert child.wait(timeout=30) in {0, -9}
    assert child.returncode == 0


@contextlib.contextmanager
def tracer_of(service: Service, receiver: OtlpReceiver) -> Iterator[Tracer]:
    tracer = open_tracer(service, TracingConfig(receiver.endpoint), MetricsPage(service), instance=f"{service}-1")
    yield tracer
    assert tracer.stop(WAIT_NS)


def call(socket: Path, span: Span) -> None:
    """A read, and another call that fails, on behalf of a span."""
    assert span.context is not None
    metadata = CallContext("request-1", span.context.traceparent).metadata
    with PeerChannel(UnixAddress(socket)) as channel:
        stub = nvme_grpc.NvmeIoServiceStub(channel.grpc)
        stub.GetStatistics(nvme.GetStatisticsRequest(), metadata=metadata)
        with pytest.raises(TierBrokenError):
            stub.ListStored(nvme.ListStoredRequest(), metadata=metadata)


@pytest.mark.slow
def test_spans_of_all_processes_arrive_as_one_tree(tmp_path: Path) -> None:
    socket = tmp_path / "h3.sock"
    descriptor = os.memfd_create("mailbox")
    os.ftruncate(descriptor, GEOMETRY.size_bytes)
    mailbox = Mailbox.create(Mapping(GEOMETRY.size_bytes, fd=descriptor).view(), GEOMETRY)
    member, caller = mailbox.register_worker(), mailbox.caller(mailbox.register_caller())
    with (
        OtlpReceiver() as receiver,
        process(Service.NVME_IO, receiver.endpoint, socket),
        process(Service.ANN_OFFLOAD, receiver.endpoint, descriptor, member.id, member.epoch, pass_fds=(descriptor,)),
        tracer_of(Service.GATEWAY, receiver) as gateway,
        tracer_of(Service.GPU_WORKER, receiver) as worker,
    ):
        with (
            gateway.begin(spans.COMPLETE, attributes={spans.REQUEST_ID: "request-1"}) as complete,
            worker.begin(spans.GENERATE, parent=complete.context) as generate,
        ):
            with worker.begin(spans.DECODE_STEP, parent=generate.context, attributes={spans.STEP: 0}) as step:
                ticket = caller.post(pack_context(step.context))
                assert caller.wait(ticket, deadline_ns=time.monotonic_ns() + WAIT_NS) == b"\0"
            with worker.begin(spans.PREFILL, parent=generate.context) as prefill:
                call(socket, prefill)
        found = receiver.wait_for(
            *(spans.COMPLETE, spans.GENERATE, spans.DECODE_STEP, spans.PREFILL),
            *(spans.ATTEND, spans.READ_PAGES, spans.MOVE_SLABS),
        )
    os.close(descriptor)
    mailbox.check_integrity()

    assert len(found) == len({span.span_id for span in found}) == 7
    assert len({span.trace_id for span in found}) == 1
    assert edges(found) == {
        (spans.COMPLETE, spans.GENERATE),
        (spans.GENERATE, spans.PREFILL),
        (spans.GENERATE, spans.DECODE_STEP),
        (spans.DECODE_STEP, spans.ATTEND),
        (spans.PREFILL, spans.READ_PAGES),
        (spans.PREFILL, spans.MOVE_SLABS),
    }
    for span in found:
        parent = parent_of(span, found)
        assert SPANS[span.name].begins_trace if parent is None else parent.name in SPANS[span.name].parents
        assert (span.service, span.instance) == (SPANS[span.name].service, f"{SPANS[span.name].service}-1")
        assert span.start_ns <= span.end_ns
        assert span.has_failed == (span.name == spans.MOVE_SLABS)

    by_name = {span.name: span for span in found}
    assert by_name[spans.READ_PAGES].attributes == {
        spans.PAGES: PAGES,
        spans.SIZE_BYTES: PAGES * PAGE_BYTES,
        spans.TIER_SOURCE: "nvme",
    }
    assert by_name[spans.ATTEND].attributes == {
        spans.PAGES: 5,
        spans.UNITS: 5,
        spans.TIER_SOURCE: "host",
        spans.SIZE_BYTES: 5 * PAGE_BYTES,
    }
    assert by_name[spans.MOVE_SLABS].attributes == {spans.ERROR_REASON: "TIER_BROKEN"}
