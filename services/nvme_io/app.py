"""Puts nvme_io together, serves until it is told to end, and takes it apart again.

start   settings -> telemetry -> regions of a forerunner -> socket -> loop -> health says SERVING
end     NOT_SERVING -> streams -> socket -> loop -> store -> regions -> telemetry
"""

from __future__ import annotations

import contextlib
import logging
import os
import secrets
import time
from pathlib import Path
from typing import Final

from h3kv.api.common.v1 import types_pb2
from h3kv.api.nvme_io.v1 import nvme_io_service_pb2 as pb
from h3kv.api.nvme_io.v1 import nvme_io_service_pb2_grpc as pb_grpc
from h3kv.core.units import NS_PER_S
from h3kv.rpc.convert import BOOT_TOKEN_BYTES
from h3kv.rpc.reports import HostAccess, ProcessName, Report, TierRoom
from h3kv.rpc.server import RpcServer
from h3kv.rpc.telemetry_reporter import open_reporter
from h3kv.service_process import StopSignal, open_process
from h3kv.telemetry import spans
from h3kv.telemetry.event_log import log_event
from h3kv.telemetry.metric import Service
from h3kv.telemetry.process_telemetry import ProcessTelemetry
from services.nvme_io.metrics import Observer, tier_statistics
from services.nvme_io.node_loop import NodeLoop, StorePlace
from services.nvme_io.node_regions import NodeRegions, RegionCaps
from services.nvme_io.relay import Relay
from services.nvme_io.servicer import NvmeIoServicer
from services.nvme_io.settings import Settings

AUTOGROUP: Final = Path("/proc/self/autogroup")

_log = logging.getLogger(__name__)


def serve() -> None:
    """Run the process to its end.

    Raises:
        H3Error: it cannot start; the message says what to do.
    """
    with open_process(Service.NVME_IO, Settings) as process, contextlib.ExitStack() as stack:
        _run(process.settings, process.stop, process.telemetry, stack)


def _run(settings: Settings, stop: StopSignal, telemetry: ProcessTelemetry, stack: contextlib.ExitStack) -> None:
    _stand_back(settings.nice)
    identity = ProcessName(settings.instance, secrets.token_bytes(BOOT_TOKEN_BYTES))
    server = RpcServer(settings.server())
    regions = NodeRegions(
        settings.regions_path,
        boot_token=identity.boot_token,
        caps=RegionCaps(settings.host_bytes, settings.index_bytes, helpers=settings.offload_threads),
        group=settings.socket_group,
    )
    stack.callback(regions.close)
    adopted = regions.start(round(settings.adopt_seconds * NS_PER_S))
    log_event(_log, "regions_adopted" if adopted else "regions_awaited", {spans.PEER: settings.instance})
    relay = Relay(time.monotonic_ns)
    observer = Observer(telemetry.metrics, settings.store)
    stack.callback(observer.close)
    reporter = stack.enter_context(
        open_reporter(
            settings.controller, identity, credentials=settings.credentials.read(), telemetry=telemetry.metrics
        )
    )

    def look(loop: NodeLoop) -> None:
        observer.look(loop)
        if reporter is not None:
            reporter.report(_report(loop, observer))

    place = None if settings.store is None else StorePlace(settings.store, settings.cold_store())
    loop = NodeLoop(regions, place, relay=relay, telemetry=telemetry.metrics, tracer=telemetry.tracer, look=look)
    stack.callback(loop.close)
    message = types_pb2.ProcessIdentity(name=identity.name, boot_token=identity.boot_token)
    servicer = NvmeIoServicer(loop, relay, message, telemetry.tracer)
    server.add(pb_grpc.add_NvmeIoServiceServicer_to_server, servicer, pb.DESCRIPTOR)
    server.start()
    stack.callback(server.stop, grace_ns=settings.drain_ns)
    stack.callback(relay.close)
    server.announce(is_serving=True)
    log_event(_log, "serving", {spans.PEER: settings.instance, spans.ADDRESS: str(server.address)})
    loop.run(lambda: stop.came)
    server.announce(is_serving=False)


def _stand_back(nice: int) -> None:
    """Let others go first, for this thread and those that it begins: moves take no core from a step of decode."""
    # Less than what whoever started this process chose takes a privilege, and is not wanted.
    os.setpriority(os.PRIO_PROCESS, 0, max(nice, os.getpriority(os.PRIO_PROCESS, 0)))
    # Where the kernel shares cores between sessions, it goes by this number instead. Only a session of our own is ours.
    if os.getsid(0) == os.getpid():
        with contextlib.suppress(OSError):
            AUTOGROUP.write_text(str(nice))


def _report(loop: NodeLoop, observer: Observer) -> Report:
    """What the controller is told of this process: room of its tiers, and what an access to HOST costs."""
    rooms = tuple(
        TierRoom(
            each.tier,
            each.capacity_bytes,
            each.used_bytes,
            slabs_visible=each.slabs_visible,
            moves_total=each.moves_total,
            bytes_moved_total=each.bytes_moved_total,
        )
        for each in tier_statistics(loop)
    )
    access = observer.access
    return Report(tiers=rooms, host_access=None if access is None else HostAccess(access.mean_ns, access.jitter_ns))
