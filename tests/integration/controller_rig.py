"""A controller as a process of its own, between a scripted reporter and an `nvme_io` that only records.

The recording `nvme_io` is a fake of a peer, made for these tests: it answers as a test wants and moves nothing.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest

from h3kv.api.common.v1 import commands_pb2, types_pb2
from h3kv.api.migration_controller.v1 import migration_controller_service_pb2 as pb
from h3kv.api.migration_controller.v1 import migration_controller_service_pb2_grpc as pb_grpc
from h3kv.api.nvme_io.v1 import nvme_io_service_pb2 as nvme
from h3kv.api.nvme_io.v1 import nvme_io_service_pb2_grpc as nvme_grpc
from h3kv.core.types import BlockKey, SegmentId, Tier
from h3kv.core.units import NS_PER_S
from h3kv.rpc.addresses import UnixAddress
from h3kv.rpc.client import PeerChannel
from h3kv.rpc.reports import ProcessName, ReportedSegment, TierRoom
from h3kv.rpc.server import RpcServer, ServerConfig
from h3kv.rpc.telemetry_reporter import TelemetryReporter
from h3kv.telemetry.metric import Service
from h3kv.telemetry.metrics_page import MetricsPage

ROOT = Path(__file__).parents[2]
PATIENCE_NS = 20 * NS_PER_S
SIZE = 1 << 20
HOST, NVME, BOTH = frozenset({Tier.HOST}), frozenset({Tier.NVME}), frozenset({Tier.HOST, Tier.NVME})
FAST = {
    "H3_MIGRATION_CONTROLLER_RULES__TICK": "20ms",
    "H3_MIGRATION_CONTROLLER_RULES__EVICTION_THRESHOLD": "1ms",
    "H3_MIGRATION_CONTROLLER_RULES__HYSTERESIS": "1ms",
    "H3_MIGRATION_CONTROLLER_SILENCE": "1h",
}
"""Rules whose waits are short: tests wait for what follows, never for time."""


def until(holds: Callable[[], Any], what: str) -> Any:
    """What `holds` returns, once that is true."""
    end_ns = time.monotonic_ns() + PATIENCE_NS
    pause = threading.Event()
    while not (value := holds()):
        assert time.monotonic_ns() < end_ns, f"waited in vain: {what}"
        pause.wait(0.01)
    return value


class RecordingNvmeIo(nvme_grpc.NvmeIoServiceServicer):
    """Keeps every command that came, with how often; answers with one outcome."""

    def __init__(self, outcome: commands_pb2.Outcome = commands_pb2.OUTCOME_RELAYED) -> None:
        self.outcome = outcome
        self.commands: list[tuple[str, commands_pb2.Command]] = []
        self.acted: dict[tuple[bytes, int], int] = {}
        """By id: how often it was told."""
        self.moves: list[nvme.WatchMovesResponse] = []
        self._changed = threading.Condition()

    def Promote(self, request: nvme.PromoteRequest, context: grpc.ServicerContext) -> nvme.PromoteResponse:
        return nvme.PromoteResponse(outcomes=self._take("promote", request.commands))

    def Demote(self, request: nvme.DemoteRequest, context: grpc.ServicerContext) -> nvme.DemoteResponse:
        return nvme.DemoteResponse(outcomes=self._take("demote", request.commands))

    def WatchMoves(
        self, request: nvme.WatchMovesRequest, context: grpc.ServicerContext
    ) -> Iterator[nvme.WatchMovesResponse]:
        context.add_callback(self._wake)
        seen = 0
        while context.is_active():
            with self._changed:
                while len(self.moves) == seen and context.is_active():
                    self._changed.wait()
                ready, seen = self.moves[seen:], len(self.moves)
            yield from ready

    def end(self, command: commands_pb2.Command, outcome: commands_pb2.Outcome, *, tiers: list[Tier]) -> None:
        """Tell watchers how a command ended."""
        ended = nvme.MoveEnded(
            outcome=commands_pb2.CommandOutcome(
                id=command.id,
                outcome=outcome,
                generation=command.segment.generation + 1,
                tiers=[{Tier.HOST: types_pb2.TIER_HOST, Tier.NVME: types_pb2.TIER_NVME}[tier] for tier in tiers],
            )
        )
        with self._changed:
            self.moves.append(nvme.WatchMovesResponse(event=len(self.moves) + 1, move=ended))
            self._changed.notify_all()

    def moved(self, direction: str) -> list[int]:
        """Segments of the commands of a direction, each command once."""
        with self._changed:
            first = {
                (each.id.sender_boot_token, each.id.number): each for way, each in self.commands if way == direction
            }
        return [each.segment.segment for each in first.values()]

    def _take(self, direction: str, commands: Any) -> list[commands_pb2.CommandOutcome]:
        with self._changed:
            for command in commands:
                identity = (command.id.sender_boot_token, command.id.number)
                self.acted[identity] = self.acted.get(identity, 0) + 1
                self.commands.append((direction, command))
        return [commands_pb2.CommandOutcome(id=each.id, outcome=self.outcome) for each in commands]

    def _wake(self) -> None:
        with self._changed:
            self._changed.notify_all()


@contextlib.contextmanager
def serving_nvme_io(folder: Path, servicer: RecordingNvmeIo) -> Iterator[None]:
    server = RpcServer(ServerConfig(UnixAddress(folder / "nvme_io.sock")))
    server.add(nvme_grpc.add_NvmeIoServiceServicer_to_server, servicer, nvme.DESCRIPTOR)
    server.start()
    server.announce(is_serving=True)
    try:
        yield
    finally:
        assert server.stop(grace_ns=0), "a handler hangs"


class ControllerProcess:
    """The controller, started; to be killed and started again."""

    def __init__(self, folder: Path, **settings: str) -> None:
        self._folder = folder
        self._settings = settings
        self.address = UnixAddress(folder / "migration_controller.sock")
        self.start()

    def start(self) -> None:
        environment = {
            **os.environ,
            "PYTHONPATH": f"{ROOT / 'src'}{os.pathsep}{ROOT}",
            "H3_MIGRATION_CONTROLLER_ADDRESS": str(self.address),
            "H3_MIGRATION_CONTROLLER_NVME_IO": f"unix://{self._folder / 'nvme_io.sock'}",
            "H3_MIGRATION_CONTROLLER_GPU_WORKER": f"unix://{self._folder / 'gpu_worker.sock'}",
            "H3_MIGRATION_CONTROLLER_METRICS__PORT": "0",
            **FAST,
            **self._settings,
        }
        self.log = self._folder / f"controller-{time.monotonic_ns()}.log"
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "services.migration_controller"], env=environment, stderr=log, cwd=ROOT
            )
        with PeerChannel(self.address) as channel:
            channel.wait_until_serving(timeout_ns=PATIENCE_NS)

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()

    def stop(self) -> int:
        self.process.terminate()
        return self.process.wait(timeout=PATIENCE_NS / NS_PER_S)


class Scripted:
    """A reporter as `gpu_worker` has one, that says what a test wants. `name` and `boot` are its identity."""

    def __init__(self, channel: PeerChannel, *, name: str = "gpu_worker", boot: bytes = b"w" * 16) -> None:
        self.process = ProcessName(name, boot)
        self.page = MetricsPage(Service.GPU_WORKER)
        self.reporter = TelemetryReporter(channel, self.process, telemetry=self.page)
        self.reporter.start()

    def close(self) -> None:
        self.reporter.stop()
        self.reporter.check_integrity()


def segment(number: int, tiers: frozenset[Tier], *, generation: int = 1, pins: int = 0) -> ReportedSegment:
    return ReportedSegment(
        segment=SegmentId(number),
        generation=generation,
        key=BlockKey(number.to_bytes(32, "big")),
        blocks=16,
        size_bytes=SIZE,
        tiers=tiers,
        pins=pins,
    )


def room(tier: Tier, *, used: int, capacity: int = 100) -> TierRoom:
    """In segments."""
    return TierRoom(tier, capacity * SIZE, used * SIZE)


COLD_ROOM = room(Tier.NVME, used=0, capacity=10_000)


class Rig:
    """All three, and a channel to ask the controller."""

    def __init__(self, folder: Path, nvme_io: RecordingNvmeIo, controller: ControllerProcess) -> None:
        self.folder = folder
        self.nvme_io = nvme_io
        self.controller = controller
        self.channel = PeerChannel(controller.address)
        self.stub = pb_grpc.MigrationControllerServiceStub(self.channel.grpc)

    def view(self, page_size: int = 1_000) -> pb.GetViewResponse:
        view: pb.GetViewResponse = self.stub.GetView(pb.GetViewRequest(page_size=page_size))
        return view

    def decisions(self) -> pb.GetDecisionsResponse:
        decisions: pb.GetDecisionsResponse = self.stub.GetDecisions(pb.GetDecisionsRequest(count=1_000))
        return decisions

    def segments(self) -> dict[int, pb.SegmentView]:
        return {each.state.segment.segment: each for each in self.view().segments}


@contextlib.contextmanager
def running(folder: Path, nvme_io: RecordingNvmeIo, **settings: str) -> Iterator[Rig]:
    with serving_nvme_io(folder, nvme_io):
        controller = ControllerProcess(folder, **settings)
        rig = Rig(folder, nvme_io, controller)
        try:
            yield rig
            rig.channel.close()
            assert controller.stop() == 0, controller.log.read_text()
        finally:
            rig.channel.close()
            controller.kill()


def read_page(url: str) -> str:
    with urllib.request.urlopen(url, timeout=5) as answer:
        text: str = answer.read().decode()
    return text


@pytest.fixture
def nvme_io() -> RecordingNvmeIo:
    return RecordingNvmeIo()
