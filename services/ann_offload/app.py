"""Puts a worker together, serves until it is told to end, and takes it apart again.

start   settings -> telemetry -> helping threads -> socket -> health says SERVING
end     NOT_SERVING -> units under way end -> regions and crew are left -> socket -> telemetry
"""

from __future__ import annotations

import contextlib
import logging
import secrets
from collections.abc import Callable

from h3kv.api.ann_offload.v1 import ann_offload_service_pb2 as pb
from h3kv.api.ann_offload.v1 import ann_offload_service_pb2_grpc as pb_grpc
from h3kv.instruction_set import select_isa
from h3kv.rpc.convert import BOOT_TOKEN_BYTES
from h3kv.rpc.reports import ProcessName
from h3kv.rpc.server import RpcServer
from h3kv.rpc.telemetry_reporter import open_reporter
from h3kv.service_process import open_process
from h3kv.telemetry import spans
from h3kv.telemetry.event_log import log_event
from h3kv.telemetry.metric import Service
from h3kv.telemetry.process_telemetry import ProcessTelemetry
from services.ann_offload.metrics import MetricsPump
from services.ann_offload.servicer import AnnOffloadServicer
from services.ann_offload.settings import Settings
from services.ann_offload.worker import OffloadWorker

_log = logging.getLogger(__name__)


def serve() -> None:
    """Run the process to its end.

    Raises:
        H3Error: it cannot start; the message says what to do.
        BaseException: what broke the worker.
    """
    with open_process(Service.ANN_OFFLOAD, Settings) as process, contextlib.ExitStack() as stack:
        server = start(process.settings, process.telemetry, stack, on_failure=process.stop.stop)
        served = {spans.PEER: process.settings.instance, spans.ADDRESS: str(server.address)}
        log_event(_log, "serving", served)
        process.stop.wait()
        server.announce(is_serving=False)
    if process.stop.failure is not None:
        raise process.stop.failure


def start(
    settings: Settings,
    telemetry: ProcessTelemetry,
    stack: contextlib.ExitStack,
    *,
    on_failure: Callable[[BaseException], None],
) -> RpcServer:
    """Begin to help, then to answer. The stack takes all of it apart again.

    Args:
        settings, telemetry: of the process.
        stack: ends what is begun here.
        on_failure: called when the worker broke, by its thread.

    Raises:
        ConfigError, AddressInUseError: it cannot serve there, or this processor lacks the instruction set.
    """
    select_isa(settings.isa, setting="H3_ANN_OFFLOAD_ISA", field="isa")
    identity = ProcessName(settings.instance, secrets.token_bytes(BOOT_TOKEN_BYTES))
    server = RpcServer(settings.server())
    worker = OffloadWorker(
        settings.worker(), boot_token=identity.boot_token, tracer=telemetry.tracer, on_failure=on_failure
    )
    pump = MetricsPump(worker, telemetry.metrics)
    stack.enter_context(
        open_reporter(
            settings.controller, identity, credentials=settings.credentials.read(), telemetry=telemetry.metrics
        )
    )
    pump.start()
    stack.callback(pump.stop)
    worker.start()
    stack.callback(worker.stop, timeout_ns=settings.drain_ns)
    server.add(pb_grpc.add_AnnOffloadServiceServicer_to_server, AnnOffloadServicer(identity, worker), pb.DESCRIPTOR)
    server.start()
    stack.callback(server.stop, grace_ns=0)
    server.announce(is_serving=True)
    return server
