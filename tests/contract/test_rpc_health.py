"""What a server says of itself, to those who ask and to those who watch."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from h3kv.core.units import NS_PER_S
from h3kv.rpc.addresses import UnixAddress
from h3kv.rpc.client import PeerChannel
from h3kv.rpc.server import ServerConfig

from .rpc_loopback import Loopback, serving

SERVICE = "h3kv.api.nvme_io.v1.NvmeIoService"
WAIT_S = 30.0
WATCHERS = 4
WATCHES = 50
STATUS = health_pb2.HealthCheckResponse


@pytest.fixture
def address(tmp_path: Path) -> UnixAddress:
    return UnixAddress(tmp_path / "h3.sock")


@pytest.fixture
def loopback(address: UnixAddress) -> Iterator[Loopback]:
    with serving(ServerConfig(address)) as running:
        yield running
    running.server._health.check_integrity()


@pytest.fixture
def stub(address: UnixAddress, loopback: Loopback) -> Iterator[Any]:
    with grpc.insecure_channel(address.target) as channel:
        yield health_pb2_grpc.HealthStub(channel)


def request(service: str) -> Any:
    return health_pb2.HealthCheckRequest(service=service)


def test_the_process_and_each_of_its_services_are_asked_by_name(stub: Any, loopback: Loopback) -> None:
    for is_serving, status in ((True, STATUS.SERVING), (False, STATUS.NOT_SERVING)):
        loopback.server.announce(is_serving=is_serving)
        assert stub.Check(request(""), timeout=WAIT_S).status == status
        assert stub.Check(request(SERVICE), timeout=WAIT_S).status == status
        listed = stub.List(health_pb2.HealthListRequest(), timeout=WAIT_S).statuses
        assert {"", SERVICE} < set(listed)
        assert {each.status for each in listed.values()} == {status}
    with pytest.raises(grpc.RpcError) as caught:
        stub.Check(request("unknown"), timeout=WAIT_S)
    assert caught.value.code() is grpc.StatusCode.NOT_FOUND


def test_who_watches_is_told_of_every_change_once(stub: Any, loopback: Loopback) -> None:
    watch = stub.Watch(request(SERVICE), timeout=WAIT_S)
    assert next(watch).status == STATUS.SERVING
    loopback.server.announce(is_serving=True)
    loopback.server.announce(is_serving=False)
    assert next(watch).status == STATUS.NOT_SERVING
    loopback.server.announce(is_serving=True)
    assert next(watch).status == STATUS.SERVING
    unknown = stub.Watch(request("unknown"), timeout=WAIT_S)
    assert next(unknown).status == STATUS.SERVICE_UNKNOWN
    for each in (watch, unknown):
        each.cancel()


def test_watches_take_no_thread(tmp_path: Path) -> None:
    address = UnixAddress(tmp_path / "h3.sock")
    config = ServerConfig(address, threads=1)
    with serving(config), grpc.insecure_channel(address.target) as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        watches = [stub.Watch(request(""), timeout=WAIT_S) for _ in range(WATCHERS)]
        for watch in watches:
            assert next(watch).status == STATUS.SERVING
        assert stub.Check(request(""), timeout=WAIT_S).status == STATUS.SERVING
        for watch in watches:
            watch.cancel()


def test_watches_that_begin_and_end_at_one_time_do_not_stop_the_server(
    address: UnixAddress, loopback: Loopback
) -> None:
    seen: list[int] = []

    def watch_again_and_again() -> None:
        with PeerChannel(address) as channel:
            for _ in range(WATCHES):
                channel.wait_until_serving(timeout_ns=int(WAIT_S) * NS_PER_S)
                seen.append(1)

    watchers = [threading.Thread(target=watch_again_and_again) for _ in range(WATCHERS)]
    for watcher in watchers:
        watcher.start()
    while any(watcher.is_alive() for watcher in watchers):
        loopback.server.announce(is_serving=False)
        loopback.server.announce(is_serving=True)
        watchers[0].join(0.01)
    assert len(seen) == WATCHERS * WATCHES
