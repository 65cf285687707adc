"""A server and a channel to it in one process, over a real socket."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import grpc

from h3kv.api.migration_controller.v1 import migration_controller_service_pb2 as controller
from h3kv.api.migration_controller.v1 import migration_controller_service_pb2_grpc as controller_grpc
from h3kv.api.nvme_io.v1 import nvme_io_service_pb2 as nvme
from h3kv.api.nvme_io.v1 import nvme_io_service_pb2_grpc as nvme_grpc
from h3kv.core.units import NS_PER_S
from h3kv.rpc.addresses import UnixAddress
from h3kv.rpc.client import PeerChannel
from h3kv.rpc.server import RpcServer, ServerConfig

Answer = Callable[[grpc.ServicerContext], None]


def answer_at_once(_: grpc.ServicerContext) -> None:
    """Nothing goes wrong."""


class ScriptedNvmeIo(nvme_grpc.NvmeIoServiceServicer):
    """Does what a test wants before it answers."""

    def __init__(self, script: Answer = answer_at_once) -> None:
        self.script = script
        self.stored: list[nvme.StoredSegment] = []
        self.watch_ended = threading.Event()

    def GetStatistics(
        self, request: nvme.GetStatisticsRequest, context: grpc.ServicerContext
    ) -> nvme.GetStatisticsResponse:
        self.script(context)
        return nvme.GetStatisticsResponse()

    def ListStored(self, request: nvme.ListStoredRequest, context: grpc.ServicerContext) -> nvme.ListStoredResponse:
        return nvme.ListStoredResponse(segments=self.stored)

    def WatchMoves(
        self, request: nvme.WatchMovesRequest, context: grpc.ServicerContext
    ) -> Iterator[nvme.WatchMovesResponse]:
        try:
            yield nvme.WatchMovesResponse(event=1)
            self.script(context)
            yield nvme.WatchMovesResponse(event=2)
        finally:
            self.watch_ended.set()


class ScriptedController(controller_grpc.MigrationControllerServiceServicer):
    """Counts reports; then does what a test wants."""

    def __init__(self, script: Answer = answer_at_once) -> None:
        self.script = script
        self.between: Answer = answer_at_once
        """Called after each report, before the next is asked for."""
        self.caught: list[Exception] = []
        self.report_came = threading.Event()

    def ReportTelemetry(
        self, request_iterator: Iterator[controller.ReportTelemetryRequest], context: grpc.ServicerContext
    ) -> controller.ReportTelemetryResponse:
        reports = 0
        try:
            for _ in request_iterator:
                reports += 1
                self.report_came.set()
                self.between(context)
        except Exception as error:
            self.caught.append(error)
            raise
        self.script(context)
        return controller.ReportTelemetryResponse(reports=reports)


class Loopback:
    """One server with both services, started."""

    def __init__(self, config: ServerConfig) -> None:
        self.nvme_io = ScriptedNvmeIo()
        self.controller = ScriptedController()
        self.server = RpcServer(config)
        self.server.add(nvme_grpc.add_NvmeIoServiceServicer_to_server, self.nvme_io, nvme.DESCRIPTOR)
        self.server.add(
            controller_grpc.add_MigrationControllerServiceServicer_to_server, self.controller, controller.DESCRIPTOR
        )
        self.server.start()
        self.server.announce(is_serving=True)


@contextlib.contextmanager
def serving(config: ServerConfig) -> Iterator[Loopback]:
    loopback = Loopback(config)
    try:
        yield loopback
    finally:
        assert loopback.server.stop(grace_ns=5 * NS_PER_S), "a handler hangs"


@contextlib.contextmanager
def connected(folder: Path) -> Iterator[tuple[Loopback, PeerChannel]]:
    """A server on a unix socket and a channel to it."""
    address = UnixAddress(folder / "h3.sock")
    with serving(ServerConfig(address)) as loopback, PeerChannel(address) as channel:
        yield loopback, channel


def nvme_stub(channel: PeerChannel) -> nvme_grpc.NvmeIoServiceStub:
    return nvme_grpc.NvmeIoServiceStub(channel.grpc)


def controller_stub(channel: PeerChannel) -> controller_grpc.MigrationControllerServiceStub:
    return controller_grpc.MigrationControllerServiceStub(channel.grpc)
