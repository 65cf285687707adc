"""nvme_io and its clients are killed, stopped and started again while they read and write."""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.integration.cold_load import LAYOUT, wire
from tests.integration.nvme_io_rig import DEADLINE_S, ROOT, NvmeIo, eventually, nvme_io, settings_for

from h3kv.api.nvme_io.v1 import nvme_io_service_pb2 as pb
from h3kv.api.nvme_io.v1 import nvme_io_service_pb2_grpc as pb_grpc
from h3kv.core.errors import ConfigError, H3Error, NotRegisteredError, RequestError, StaleHandleError
from h3kv.core.units import NS_PER_S
from h3kv.memory.region_client import RegionClient
from h3kv.rpc.client import PeerChannel
from h3kv.rpc.nvme_io_client import NvmeIoClient

pytestmark = pytest.mark.slow

KILLS = 20
STOPPED_S = 3.0
PROGRAM = Path(__file__).with_name("cold_load.py")


class Load:
    """A process of `cold_load.py`."""

    def __init__(self, folder: Path, number: int) -> None:
        command = [sys.executable, str(PROGRAM), str(folder), str(number)]
        environment = {**os.environ, "PYTHONPATH": str(ROOT / "src")}
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, env=environment)

    def rounds(self, count: int) -> dict[str, int]:
        """Wait for so many rounds: what the last one said."""
        assert self.process.stdout is not None
        said: dict[str, int] = {}
        for _ in range(count):
            line = self.process.stdout.readline()
            assert line, f"the load ended with {self.process.wait(DEADLINE_S)}"
            said = json.loads(line)
        return said

    def rounds_after(self, sessions: int) -> dict[str, int]:
        """Rounds until one was made in a later session than that, and some more."""
        end = time.monotonic() + DEADLINE_S
        while (said := self.rounds(1))["sessions"] <= sessions:
            assert time.monotonic() < end, said
        return self.rounds(5)

    def kill(self) -> None:
        self.process.kill()
        self.process.wait(DEADLINE_S)
        assert self.process.stdout is not None
        self.process.stdout.close()


@contextlib.contextmanager
def load(folder: Path, number: int) -> Iterator[Load]:
    running = Load(folder, number)
    try:
        yield running
    finally:
        running.kill()


def statistics(server: NvmeIo) -> pb.GetStatisticsResponse:
    with PeerChannel(server.address) as channel:
        return pb_grpc.NvmeIoServiceStub(channel.grpc).GetStatistics(pb.GetStatisticsRequest())


def resources(server: NvmeIo) -> tuple[int, int]:
    """Descriptors, and resident bytes."""
    assert server.process is not None
    place = Path(f"/proc/{server.process.pid}")
    pages = int((place / "statm").read_text().split()[1])
    return len(list((place / "fd").iterdir())), pages * os.sysconf("SC_PAGE_SIZE")


@pytest.fixture
def server(tmp_path: Path) -> Iterator[NvmeIo]:
    with nvme_io(tmp_path, **settings_for(LAYOUT, host_blocks=128, units=4)) as running:
        yield running


def test_clients_that_are_killed_leave_nothing_behind(server: NvmeIo) -> None:
    baseline: tuple[int, int] | None = None
    for number in range(1, KILLS + 1):
        with load(server.folder, number) as client:
            assert client.rounds(10)["broken"] == 0
        eventually(lambda: not statistics(server).clients, "a client that was killed is still there")
        if number == 3:
            baseline = resources(server)
    assert baseline is not None
    # gRPC may keep a connection that closes at this moment.
    eventually(lambda: resources(server)[0] <= baseline[0], f"{resources(server)} descriptors, {baseline} before")
    assert resources(server)[1] <= 1.1 * baseline[1]
    found = statistics(server)
    assert {each.tier: each.used_bytes for each in found.tiers}[1 + 1] == 0, "HOST has slots of nobody"
    assert not found.io.is_degraded
    assert server.end() == 0
    assert "Traceback" not in server.log


def test_server_that_is_killed_under_load_is_found_again(server: NvmeIo) -> None:
    with load(server.folder, 1) as client:
        client.rounds(5)
        for sessions in range(1, KILLS + 1):
            server.kill()
            server.start()
            client.rounds_after(sessions)
        server.wait_until_serving()
        (found,) = statistics(server).clients
        assert found.name == "load-1"
    eventually(lambda: not statistics(server).clients, "the client is still there")
    assert server.end() == 0
    assert "Traceback" not in server.log


def test_server_that_was_stopped_goes_on_where_it_was(server: NvmeIo) -> None:
    with load(server.folder, 1) as client:
        client.rounds(5)
        server.signal(signal.SIGSTOP)
        select.select([], [], [], STOPPED_S)
        server.signal(signal.SIGCONT)
        end = time.monotonic() + DEADLINE_S
        # Rounds of the pause that failed at once were said already, and come first.
        said, before = client.rounds(5), -1
        while said["broken"] != before:
            assert time.monotonic() < end, said
            before, said = said["broken"], client.rounds(10)
        assert said["sessions"] == 1
        assert client.rounds(10)["broken"] == said["broken"]


def test_strangers_and_stale_requests_are_refused(server: NvmeIo) -> None:
    with PeerChannel(server.address) as channel:
        calls = NvmeIoClient(channel, name="gpu_worker", boot_token=b"t" * 16)
        stub = pb_grpc.NvmeIoServiceStub(channel.grpc)

        def refused(act: Any, error: type[H3Error]) -> None:
            with pytest.raises(error):
                act()

        refused(lambda: calls.register(7, wire()), NotRegisteredError)
        refused(lambda: calls.lease_units(7, 1), NotRegisteredError)
        refused(lambda: calls.list_stored(7), NotRegisteredError)
        refused(lambda: calls.register(1, wire()), RequestError)
        with load(server.folder, 1) as client:
            client.rounds(3)
            regions = RegionClient(server.regions, name="gpu_worker", boot_token=b"t" * 16)
            regions.connect(20 * NS_PER_S)
            holder = regions.holder
            assert holder is not None
            refused(lambda: calls.lease_units(holder, 1), NotRegisteredError)
            other = NvmeIoClient(channel, name="gpu_worker", boot_token=b"u" * 16)
            refused(lambda: other.register(holder, wire()), NotRegisteredError)
            changed = type(wire())(**{**{f: getattr(wire(), f) for f in wire().__slots__}, "fingerprint": b"x" * 32})
            refused(lambda: calls.register(holder, changed), ConfigError)
            calls.register(holder, None)
            units = calls.lease_units(holder, 2)
            assert len(units) == 2
            again = pb.LeaseUnitsRequest(client_id=holder, lease_id=5, count=1)
            assert stub.LeaseUnits(again) == stub.LeaseUnits(again)
            calls.return_units(holder, units)
            refused(lambda: calls.return_units(holder, units), StaleHandleError)
            refused(lambda: calls.return_units(holder, [10**6]), StaleHandleError)
            client.rounds(3)
            regions.close()
    assert server.end() == 0
    assert "Traceback" not in server.log
