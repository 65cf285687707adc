"""A process that joins traces.

`python traced_process.py nvme_io OTLP SOCKET`, or `python traced_process.py ann_offload OTLP DESCRIPTOR MEMBER EPOCH`.

It says `ready`, works until its standard input closes, then sends what it recorded.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

import grpc

from h3kv.api.nvme_io.v1 import nvme_io_service_pb2 as nvme
from h3kv.api.nvme_io.v1 import nvme_io_service_pb2_grpc as nvme_grpc
from h3kv.core.errors import TierBrokenError
from h3kv.core.types import Tier
from h3kv.core.units import NS_PER_S
from h3kv.memory.mailbox import Mailbox, MailboxGeometry, Member
from h3kv.memory.mapping import Mapping
from h3kv.rpc.addresses import UnixAddress
from h3kv.rpc.call_context import read_context
from h3kv.rpc.server import RpcServer, ServerConfig
from h3kv.telemetry import spans
from h3kv.telemetry.metric import Service
from h3kv.telemetry.process_telemetry import ProcessTelemetry, TelemetryConfig
from h3kv.telemetry.trace_context import PACKED_BYTES, parse_traceparent, unpack_context
from h3kv.telemetry.tracing import Tracer, TracingConfig

GEOMETRY = MailboxGeometry(entries=4, request_bytes=PACKED_BYTES, reply_bytes=1, callers=1, workers=1)
PAGE_BYTES = 4096
PAGES = 3


class TracedNvmeIo(nvme_grpc.NvmeIoServiceServicer):
    """Any call counts as a read of pages; listing what is stored fails."""

    def __init__(self, tracer: Tracer) -> None:
        self._tracer = tracer

    def GetStatistics(
        self, request: nvme.GetStatisticsRequest, context: grpc.ServicerContext
    ) -> nvme.GetStatisticsResponse:
        parent = parse_traceparent(read_context(context.invocation_metadata()).traceparent)
        with self._tracer.begin(spans.READ_PAGES, parent=parent, attributes={spans.TIER_SOURCE: Tier.NVME}) as span:
            span.set({spans.PAGES: PAGES, spans.SIZE_BYTES: PAGES * PAGE_BYTES})
        return nvme.GetStatisticsResponse()

    def ListStored(self, request: nvme.ListStoredRequest, context: grpc.ServicerContext) -> nvme.ListStoredResponse:
        parent = parse_traceparent(read_context(context.invocation_metadata()).traceparent)
        with self._tracer.begin(spans.MOVE_SLABS, parent=parent):
            raise TierBrokenError("the disk is gone: plug it in", tier=Tier.NVME)


def serve_calls(tracer: Tracer, socket: Path) -> None:
    server = RpcServer(ServerConfig(UnixAddress(socket)))
    server.add(nvme_grpc.add_NvmeIoServiceServicer_to_server, TracedNvmeIo(tracer), nvme.DESCRIPTOR)
    server.start()
    server.announce(is_serving=True)
    wait_for_the_end()
    assert server.stop(grace_ns=NS_PER_S)


def serve_mailbox(tracer: Tracer, descriptor: int, member: Member) -> None:
    worker = Mailbox.attach(Mapping(GEOMETRY.size_bytes, fd=descriptor).view()).worker(member)
    sys.stdout.write("ready\n")
    sys.stdout.flush()
    request = worker.take(deadline_ns=time.monotonic_ns() + 30 * NS_PER_S)
    assert request is not None
    attributes = {spans.PAGES: 5, spans.UNITS: 5, spans.TIER_SOURCE: Tier.HOST, spans.SIZE_BYTES: 5 * PAGE_BYTES}
    tracer.record(spans.ATTEND, parent=unpack_context(request.payload), duration_ns=7_000, attributes=attributes)
    assert worker.reply(request, b"\0")
    sys.stdin.read()


def wait_for_the_end() -> None:
    sys.stdout.write("ready\n")
    sys.stdout.flush()
    sys.stdin.read()


if __name__ == "__main__":
    role, endpoint, *rest = sys.argv[1:]
    config = TelemetryConfig(tracing=TracingConfig(endpoint))
    with ProcessTelemetry(Service(role), config, instance=f"{role}-1") as telemetry:
        if role == Service.NVME_IO:
            serve_calls(telemetry.tracer, Path(rest[0]))
        else:
            serve_mailbox(telemetry.tracer, int(rest[0]), Member(int(rest[1]), int(rest[2])))
        assert telemetry.stop(timeout_ns=10 * NS_PER_S), "spans were lost"
