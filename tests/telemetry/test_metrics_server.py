from __future__ import annotations

import contextlib
import http.client
import socket
import time
from collections.abc import Iterator

import pytest
from prometheus_client.parser import text_string_to_metric_families

from h3kv.core.errors import AddressInUseError, ConfigError
from h3kv.telemetry import names
from h3kv.telemetry.metric import Service
from h3kv.telemetry.metrics_page import MetricsPage
from h3kv.telemetry.metrics_server import CONNECTIONS_MAX, MetricsAddress, MetricsServer

WAIT_S = 30.0


@pytest.fixture
def server() -> Iterator[MetricsServer]:
    page = MetricsPage(Service.NVME_IO)
    page.gauge(names.REGION_HOLDERS, 2)
    server = MetricsServer(page, MetricsAddress())
    server.start()
    yield server
    server.stop()
    server.stop()


def get(port: int, path: str = "/metrics", method: str = "GET") -> tuple[int, str, str]:
    with contextlib.closing(http.client.HTTPConnection("127.0.0.1", port, timeout=WAIT_S)) as connection:
        connection.request(method, path)
        answer = connection.getresponse()
        return answer.status, answer.headers["Content-Type"], answer.read().decode()


def test_the_page_is_served_where_the_url_says(server: MetricsServer) -> None:
    assert server.url == f"http://127.0.0.1:{server.port}/metrics"
    status, content_type, text = get(server.port)
    assert (status, content_type) == (200, "text/plain; version=0.0.4; charset=utf-8")
    values = {family.name: family.samples for family in text_string_to_metric_families(text)}
    assert [sample.value for sample in values[names.REGION_HOLDERS]] == [2]


@pytest.mark.parametrize(("path", "method", "status"), [("/", "GET", 404), ("/metrics", "POST", 501)])
def test_nothing_else_is_served(server: MetricsServer, path: str, method: str, status: int) -> None:
    assert get(server.port, path, method)[0] == status


def test_a_port_that_is_taken_is_named(server: MetricsServer) -> None:
    other = MetricsServer(MetricsPage(Service.GATEWAY), MetricsAddress(port=server.port))
    with pytest.raises(AddressInUseError, match=str(server.port)):
        other.start()
    other.stop()


def test_a_stopped_server_leaves_its_port_to_the_next(server: MetricsServer) -> None:
    port = server.port
    get(port)
    server.stop()
    with pytest.raises(ConnectionRefusedError):
        get(port)
    other = MetricsServer(MetricsPage(Service.GATEWAY), MetricsAddress(port=port))
    other.start()
    assert "h3_http_requests_in_flight" in get(port)[2]
    other.stop()


def test_readers_that_say_nothing_do_not_keep_others_out_but_there_is_a_bound(server: MetricsServer) -> None:
    with contextlib.ExitStack() as idle:
        for _ in range(CONNECTIONS_MAX - 1):
            idle.enter_context(socket.create_connection(("127.0.0.1", server.port)))
        poll(server.port)
        idle.enter_context(socket.create_connection(("127.0.0.1", server.port)))
        with socket.create_connection(("127.0.0.1", server.port), timeout=WAIT_S) as refused:
            assert refused.recv(1) == b""
    poll(server.port)


def poll(port: int) -> None:
    """Until the server has noticed that connections ended."""
    deadline = time.monotonic() + WAIT_S
    while True:
        try:
            assert get(port)[0] == 200
        except (ConnectionError, http.client.BadStatusLine):
            assert time.monotonic() < deadline
        else:
            return


@pytest.mark.parametrize("host", ["0.0.0.0", "192.0.2.1", "::", "gateway", ""])
def test_addresses_that_others_can_reach_are_refused_unless_they_are_wanted(host: str) -> None:
    with pytest.raises(ConfigError) as caught:
        MetricsAddress(host)
    assert caught.value.field == "metrics.host"


def test_wanted_addresses_are_taken() -> None:
    server = MetricsServer(MetricsPage(Service.GATEWAY), MetricsAddress("0.0.0.0", is_remote_allowed=True))
    server.start()
    assert get(server.port)[0] == 200
    server.stop()


@pytest.mark.parametrize("port", [-1, 65_536])
def test_ports_are_checked(port: int) -> None:
    with pytest.raises(ConfigError, match="0 to 65535"):
        MetricsAddress(port=port)
