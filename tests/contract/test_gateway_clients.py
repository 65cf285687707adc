"""Clients that mean harm, or have a bad day: the gateway as a process, its gpu_worker says what a test wants."""

from __future__ import annotations

import concurrent.futures
import contextlib
import http.client
import json
import select
import signal
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest
from tests.contract.scripted_worker import MODEL, Front, finished, fronted, saying, token
from tests.integration.service_rig import WAIT_S, UnixConnection, wait_for

from h3kv.api.gpu_worker.v1 import gpu_worker_service_pb2 as pb
from h3kv.core.errors import PeerBusyError
from h3kv.core.units import NS_PER_S

pytestmark = pytest.mark.slow

CHAT = "/v1/chat/completions"
JSON = {"Content-Type": "application/json"}
BODY = json.dumps({"model": MODEL, "messages": [{"role": "user", "content": "hi"}]}).encode()
STREAM = json.dumps({"model": MODEL, "messages": [{"role": "user", "content": "hi"}], "stream": True}).encode()


@pytest.fixture(scope="module")
def front(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Front]:
    """Gives clients a quarter of a second."""
    settings = {"HTTP__BODY_SECONDS": 0.25, "HTTP__BODY_MAX": "64KiB"}
    with fronted(tmp_path_factory.mktemp("front"), settings, threads=64) as both:
        yield both


def endless(request: pb.GenerateRequest, context: grpc.ServicerContext) -> Iterator[pb.GenerateResponse]:
    while context.is_active():
        yield token("x" * 1000)


def is_cut(connection: UnixConnection) -> bool:
    """Whether the other side has closed."""
    poll = select.poll()
    poll.register(connection.sock, select.POLLRDHUP | select.POLLHUP)
    return bool(poll.poll(0))


def wrapped(value: bytes, *, field: bytes) -> bytes:
    return b'{"model": "%b", "messages": [{"role": "user", "content": "x"}], "%b": %b}' % (MODEL.encode(), field, value)


DEEP = 10_000
NESTED = b'{"a":' * DEEP + b"1" + b"}" * DEEP


@pytest.mark.parametrize(
    ("body", "status", "word"),
    [
        (b"", 400, "JSON"),
        (b"null", 400, "object"),
        (b"[" * DEEP, 400, "recursion"),
        (b"[" * DEEP + b"]" * DEEP, 400, "recursion"),
        (wrapped(NESTED, field=b"messages"), 400, "recursion"),
        (wrapped(NESTED, field=b"metadata"), 400, "recursion"),
        (
            wrapped(
                b'{"type": "json_schema", "json_schema": {"name": "x", "schema": %b}}' % NESTED,
                field=b"response_format",
            ),
            400,
            "recursion",
        ),
        (wrapped(b'{"a": "\xff\xfe"}', field=b"metadata"), 400, "unicode"),
        (wrapped(b'{"a": "\\ud800"}', field=b"metadata"), 400, "JSON"),
        (wrapped(b"NaN", field=b"temperature"), 400, "finite"),
        (wrapped(b"-Infinity", field=b"min_p"), 400, "finite"),
        (wrapped(b"1e999", field=b"top_p"), 400, "finite"),
        (wrapped(json.dumps(["x"] * 10_000).encode(), field=b"stop"), 400, "at most 16"),
        (wrapped(b'{"7": 101}', field=b"logit_bias"), 400, "100"),
        (wrapped(b'{"seven": 1}', field=b"logit_bias"), 400, "pattern"),
        (wrapped(b"17", field=b"n"), 400, "16"),
        (wrapped(b'"' + b"x" * (65 << 10) + b'"', field=b"user"), 413, "64.0 KiB"),
        (b"\x00" * 100, 400, "JSON"),
    ],
    ids=lambda value: value[:20].decode("latin-1") if isinstance(value, bytes) else None,
)
def test_a_hostile_body_is_refused_and_harms_nothing(front: Front, body: bytes, status: int, word: str) -> None:
    front.worker.answer(saying("x"))
    found, _, answer = front.ask("POST", CHAT, body)
    assert found == status, answer
    assert word in json.loads(answer)["error"]["message"]
    assert len(answer) < 1_000
    assert front.worker.asked == []
    assert front.ask("POST", CHAT, BODY)[0] == 200


def test_a_body_that_trickles_is_given_up(front: Front) -> None:
    with contextlib.closing(UnixConnection(front.socket)) as connection:
        connection.putrequest("POST", CHAT)
        connection.putheader("Content-Type", "application/json")
        connection.putheader("Content-Length", str(len(BODY)))
        connection.endheaders(BODY[:10])
        response = connection.getresponse()
        assert response.status == 408
        assert b"did not arrive within 250ms" in response.read()


@pytest.mark.parametrize("sent", [b"", b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\n"])
def test_a_connection_on_which_no_request_comes_is_closed(front: Front, sent: bytes) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as client:
        client.settimeout(WAIT_S)
        client.connect(str(front.socket))
        client.sendall(sent)
        with contextlib.suppress(ConnectionResetError):
            assert client.recv(1) == b""


def test_a_client_that_reads_nothing_is_given_up_and_its_answer_ends(front: Front) -> None:
    while front.worker.ended.acquire(blocking=False):
        pass
    front.worker.answer(endless)
    with contextlib.closing(UnixConnection(front.socket)) as connection:
        connection.request("POST", CHAT, STREAM, JSON)
        assert front.worker.ended.acquire(timeout=WAIT_S), "the answer goes on for nobody"
    front.worker.answer(saying("x"))
    assert front.ask("POST", CHAT, BODY)[0] == 200


def test_a_client_that_reads_slowly_gets_all_of_its_answer(front: Front) -> None:
    front.worker.answer(saying(*["x" * 1000] * 500))
    with contextlib.closing(UnixConnection(front.socket)) as connection:
        connection.request("POST", CHAT, STREAM, JSON)
        response = connection.getresponse()
        body = b""
        while piece := response.read(1000):
            body += piece
    assert body.endswith(b"data: [DONE]\n\n")
    assert body.count(b"x" * 1000) == 500


def test_a_client_that_reads_nothing_of_a_last_answer_is_given_up(front: Front) -> None:
    front.worker.answer(saying("x" * (1 << 20)))
    with contextlib.closing(UnixConnection(front.socket)) as connection:
        connection.request("POST", CHAT, BODY, {**JSON, "Connection": "close"})
        found = b""
        # What the system had taken by then comes, and no end.
        wait_for(lambda: is_cut(connection), what="the connection to be cut")
        with contextlib.suppress(OSError):
            while piece := connection.sock.recv(65536):
                found += piece
        assert len(found) < 1 << 20


def test_a_client_that_takes_longer_than_one_look_gets_all_of_its_answer(front: Front) -> None:
    front.worker.answer(saying("x" * (2 << 20)))
    with contextlib.closing(UnixConnection(front.socket)) as connection:
        connection.request("POST", CHAT, BODY, {**JSON, "Connection": "close"})
        response = connection.getresponse()
        body = b""
        while piece := response.read(64 << 10):
            body += piece
            # Together longer than two looks; each step shorter than one.
            threading.Event().wait(0.03)
    assert body.count(b"x") > 2 << 20


@pytest.fixture(scope="module")
def patient_front(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Front]:
    """Gives clients the time that it gives by default, for those that share their processor with many others."""
    with fronted(tmp_path_factory.mktemp("front"), threads=64) as both:
        yield both


def test_two_hundred_clients_at_once_are_all_answered(patient_front: Front) -> None:
    front = patient_front

    def generate(request: pb.GenerateRequest, context: grpc.ServicerContext) -> Iterator[pb.GenerateResponse]:
        for _ in range(5):
            yield token("x")
        yield finished(5)

    front.worker.answer(generate)
    with concurrent.futures.ThreadPoolExecutor(200) as pool:
        answers = list(pool.map(lambda _: front.ask("POST", CHAT, BODY), range(200)))
    statuses = {status for status, _, _ in answers}
    assert statuses <= {200, 429}
    assert sum(status == 200 for status, _, _ in answers) >= 64
    assert all("retry-after" in headers for status, headers, _ in answers if status == 429)
    assert front.ask("POST", CHAT, BODY)[0] == 200


def test_what_was_not_read_is_not_taken_for_the_next_request(front: Front) -> None:
    """A refused body must not be read as a request of its own: someone else's words would be answered."""
    smuggled = b"GET /v1/models HTTP/1.1\r\nHost: x\r\n\r\n"
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as client:
        client.settimeout(WAIT_S)
        client.connect(str(front.socket))
        head = b"POST /v1/nothing HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % len(smuggled)
        client.sendall(head + smuggled)
        found = b""
        with contextlib.suppress(ConnectionResetError):
            while piece := client.recv(65536):
                found += piece
    assert found.count(b"HTTP/1.1") == 1
    assert b"404" in found


def test_worker_that_is_gone_is_told_without_its_address(tmp_path: Path) -> None:
    with fronted(tmp_path) as front:
        assert front.server.stop(grace_ns=0)
        wait_for(lambda: front.ask("GET", "/health")[0] == 503, what="the health to be looked at again")
        for path in ("/health", "/v1/models"):
            status, headers, body = front.ask("GET", path)
            assert (status, headers["retry-after"]) == (503, "1")
            assert json.loads(body)["error"]["code"] == "peer_unavailable"
            assert b"worker.sock" not in body
        assert "worker.sock" in front.gateway.text()
        assert "Traceback" not in front.gateway.text()


def test_an_end_under_load_comes_within_its_bound(tmp_path: Path) -> None:
    with fronted(tmp_path, {"DRAIN_SECONDS": 1}) as front:
        front.worker.answer(endless)
        connections = [UnixConnection(front.socket) for _ in range(4)]
        for connection in connections:
            connection.request("POST", CHAT, STREAM, JSON)
        wait_for(lambda: len(front.worker.asked) == 4, what="all requests")
        front.gateway.process.send_signal(signal.SIGTERM)
        for connection in connections:
            response = connection.getresponse()
            with contextlib.closing(connection), response:
                *_, last = response.read().split(b"\n\n")[:-1]
                error = json.loads(last.removeprefix(b"data: "))["error"]
                assert error["code"] == "peer_unavailable"
        assert front.gateway.process.wait(timeout=20) == 0, front.gateway.text()
        assert front.gateway.text().count("request_failed") == 4
        for _ in range(4):
            assert front.worker.ended.acquire(timeout=WAIT_S)


def test_who_watches_the_node_sees_it_under_load(tmp_path: Path) -> None:
    with fronted(tmp_path, {"HTTP__REQUESTS_MAX": 1}) as front:
        front.worker.answer(endless)
        with contextlib.closing(UnixConnection(front.socket)) as connection:
            connection.request("POST", CHAT, STREAM, JSON)
            assert connection.getresponse().status == 200
            assert front.ask("POST", CHAT, BODY)[0] == 429
            for path in ("/health", "/metrics"):
                assert front.ask("GET", path)[0] == 200


def test_connections_are_bounded(tmp_path: Path) -> None:
    with fronted(tmp_path, {"HTTP__CONNECTIONS_MAX": 2}) as front, contextlib.ExitStack() as stack:
        for _ in range(2):
            held = stack.enter_context(contextlib.closing(UnixConnection(front.socket)))
            held.request("GET", "/health")
            assert held.getresponse().read()
        with pytest.raises((ConnectionError, http.client.HTTPException)):
            front.ask("GET", "/health")
        stack.close()

        def serves() -> bool:
            with contextlib.suppress(OSError):
                return front.ask("GET", "/health")[0] == 200
            return False

        wait_for(serves, what="room to come back")


def test_who_asks_for_health_asks_no_more_of_the_worker_than_once_a_second(front: Front) -> None:
    began_ns, before = time.monotonic_ns(), front.worker.models_asked
    for _ in range(50):
        assert front.ask("GET", "/health")[0] == 200
    elapsed_s = (time.monotonic_ns() - began_ns) / NS_PER_S
    assert front.worker.models_asked - before <= elapsed_s + 1


def test_a_worker_that_is_busy_is_in_good_health(front: Front) -> None:
    front.worker.model_failure = PeerBusyError("as many calls as it takes", peer="worker")
    before = front.worker.models_asked

    def is_looked_at() -> bool:
        assert front.ask("GET", "/health")[0] == 200
        return front.worker.models_asked > before

    wait_for(is_looked_at, what="a look at the worker")
    assert front.ask("GET", "/health")[0] == 200
    front.worker.model_failure = None
