"""Puts the controller together, serves until it is told to end, and takes it apart again.

start   settings -> telemetry -> directory -> loop -> watch of moves -> socket -> health says SERVING
end     NOT_SERVING -> socket -> watch -> loop -> directory -> telemetry
"""

from __future__ import annotations

import contextlib
import logging
import secrets
from typing import Final

from h3kv.api.migration_controller.v1 import migration_controller_service_pb2 as pb
from h3kv.api.migration_controller.v1 import migration_controller_service_pb2_grpc as pb_grpc
from h3kv.core.units import NS_PER_S
from h3kv.directory.factory import open_directory
from h3kv.engine.clock import MonotonicClock
from h3kv.rpc.client import PeerChannel
from h3kv.rpc.convert import BOOT_TOKEN_BYTES
from h3kv.rpc.reports import ProcessName
from h3kv.rpc.server import RpcServer
from h3kv.service_process import open_process
from h3kv.telemetry import spans
from h3kv.telemetry.event_log import log_event
from h3kv.telemetry.metric import Service
from h3kv.telemetry.process_telemetry import ProcessTelemetry
from services.migration_controller.decisions import DecisionLog
from services.migration_controller.directory_keeper import DirectoryKeeper
from services.migration_controller.garbage import GarbageBreaks
from services.migration_controller.inbox import Inbox
from services.migration_controller.loop import ControllerLoop
from services.migration_controller.metrics import ControllerMetrics
from services.migration_controller.moves_watch import MovesWatch
from services.migration_controller.peers import Executor, Peer
from services.migration_controller.servicer import ControllerServicer
from services.migration_controller.settings import Settings
from services.migration_controller.view import NodeView
from services.migration_controller.view_pages import ViewPages

END_NS: Final = NS_PER_S
"""For each thread to end."""

_log = logging.getLogger(__name__)


def serve() -> None:
    """Run the process to its end.

    Raises:
        H3Error: it cannot start; the message says what to do.
    """
    with open_process(Service.MIGRATION_CONTROLLER, Settings) as process, contextlib.ExitStack() as stack:
        server = start(process.settings, process.telemetry, stack)
        served = {spans.PEER: process.settings.instance, spans.ADDRESS: str(server.address)}
        log_event(_log, "serving", served)
        process.stop.wait()
        server.announce(is_serving=False)


def start(settings: Settings, telemetry: ProcessTelemetry, stack: contextlib.ExitStack) -> RpcServer:
    """Begin to decide, then to answer. The stack takes all of it apart again.

    Raises:
        ConfigError, AddressInUseError: it cannot serve there.
    """
    clock = MonotonicClock()
    identity = ProcessName(settings.instance, secrets.token_bytes(BOOT_TOKEN_BYTES))
    rules = settings.rules.config()
    server = RpcServer(settings.server())
    credentials = settings.credentials.read()
    addresses = {Executor.NVME_IO: settings.nvme_io, Executor.GPU_WORKER: settings.gpu_worker}
    channels = {
        name: stack.enter_context(PeerChannel(address, credentials=credentials)) for name, address in addresses.items()
    }
    inbox, decisions = Inbox(), DecisionLog(settings.decisions_kept)
    view = NodeView(segments_max=rules.segments_max, processes_max=rules.owners_max, silence_ns=settings.silence)
    directory = DirectoryKeeper(open_directory(settings.directory, clock), node=settings.node)
    garbage = GarbageBreaks(clock)
    stack.callback(garbage.restore)
    loop = ControllerLoop(
        clock,
        rules,
        boot_token=identity.boot_token,
        inbox=inbox,
        view=view,
        decisions=decisions,
        peers={
            name: Peer(name, channel, boot_token=identity.boot_token, answered=inbox.put)
            for name, channel in channels.items()
        },
        directory=directory,
        metrics=ControllerMetrics(telemetry.metrics),
        tracer=telemetry.tracer,
        rest=garbage.take,
    )
    pages = ViewPages(view, lambda: loop.state)
    servicer = ControllerServicer(clock, identity, inbox=inbox, decisions=decisions, pages=pages)
    server.add(pb_grpc.add_MigrationControllerServiceServicer_to_server, servicer, pb.DESCRIPTOR)
    watch = MovesWatch(channels[Executor.NVME_IO], inbox.put)
    for part in (directory, loop, watch):
        part.start()
        stack.callback(part.stop, timeout_ns=END_NS)
    server.start()
    stack.callback(server.stop, grace_ns=settings.drain_ns)
    server.announce(is_serving=True)
    return server
