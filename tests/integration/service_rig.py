"""What the tests of gpu_worker and gateway share: both as real processes on unix sockets, and a client of each."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import h3kv
from h3kv.api.gpu_worker.v1 import gpu_worker_service_pb2 as pb
from h3kv.api.gpu_worker.v1 import gpu_worker_service_pb2_grpc as pb_grpc
from h3kv.core.errors import H3Error
from h3kv.rpc.addresses import UnixAddress
from h3kv.rpc.client import PeerChannel

PATHS = (Path(__file__).parents[2], Path(h3kv.__file__).parents[1])
"""Where `services` and `h3kv` lie."""
JSON = {"Content-Type": "application/json"}
WAIT_S = 180.0
"""A test that waits longer has failed."""
PROMPT = "All work and no play makes Jack a dull boy. " * 8


def wait_for(condition: Callable[[], bool], *, what: str) -> None:
    """Poll until it holds."""
    end_s = time.monotonic() + WAIT_S
    while not condition():
        assert time.monotonic() < end_s, f"waited in vain for {what}"
        threading.Event().wait(0.01)


class Process:
    """One service: `python -m services.NAME`, with its log in a file."""

    def __init__(self, name: str, folder: Path, settings: Mapping[str, object]) -> None:
        self.log = folder / f"{name}.log"
        prefix = f"H3_{name.upper()}_"
        environment = {key: value for key, value in os.environ.items() if not key.startswith("H3_")}
        environment |= {f"{prefix}{key}": str(value) for key, value in settings.items()}
        if "gpu_worker" in prefix.lower():
            # A tiny model is faster than a busy disk: what is found must not depend on which of them is.
            environment[f"{prefix}TIERING__RECOMPUTE"] = "off"
        environment["PYTHONPATH"] = os.pathsep.join(map(str, PATHS))
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", f"services.{name}"],
                cwd=folder,
                env=environment,
                stderr=log,
                stdout=log,
            )

    def text(self) -> str:
        return self.log.read_text(encoding="utf-8")

    def end(self, *, with_signal: int = signal.SIGTERM) -> int:
        """Tell it to end, and give back its exit code."""
        if self.process.poll() is None:
            self.process.send_signal(with_signal)
        return self.process.wait(timeout=WAIT_S)


@dataclass
class Answer:
    """What came over HTTP."""

    status: int
    headers: Mapping[str, str]
    body: bytes

    @property
    def fields(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(self.body)
        return found


class UnixConnection(http.client.HTTPConnection):
    def __init__(self, path: Path) -> None:
        super().__init__("node", timeout=WAIT_S)
        self._path = path

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.sock.settimeout(WAIT_S)
        self.sock.connect(os.fspath(self._path))


@dataclass
class Stream:
    """An answer of server-sent events that is being read."""

    connection: UnixConnection
    response: http.client.HTTPResponse
    ended: bool = field(default=False)

    def events(self) -> Iterator[dict[str, Any]]:
        """Events until the end; `ended` says whether the last one was `[DONE]`."""
        for line in self.response:
            text = line.decode().strip()
            if text == "data: [DONE]":
                self.ended = True
            elif text.startswith("data: "):
                yield json.loads(text.removeprefix("data: "))
        self.close()

    def close(self) -> None:
        self.response.close()
        self.connection.close()


@dataclass
class Rig:
    """Both processes, started."""

    folder: Path
    model: Path
    worker_settings: dict[str, object]
    gateway_settings: dict[str, object]
    worker: Process = field(init=False)
    gateway: Process = field(init=False)

    def __post_init__(self) -> None:
        self.worker_socket, self.http_socket = self.folder / "worker.sock", self.folder / "http.sock"
        self.start_worker()
        self.start_gateway()

    def start_worker(self) -> None:
        self.worker = Process(
            "gpu_worker",
            self.folder,
            {
                "ADDRESS": f"unix://{self.worker_socket}",
                "MODEL__SOURCE": self.model,
                "MODEL__DTYPE": "fp32",
                "RUNTIME__THREADS": 1,
                "METRICS__PORT": 0,
                "DEVICE__KV_BYTES": "32MiB",
                **self.worker_settings,
            },
        )

    def start_gateway(self) -> None:
        self.gateway = Process(
            "gateway",
            self.folder,
            {
                "WORKER": f"unix://{self.worker_socket}",
                "HTTP__SOCKET": self.http_socket,
                "METRICS__PORT": 0,
                **self.gateway_settings,
            },
        )

    def wait_until_serving(self) -> None:
        def serves() -> bool:
            for each in (self.worker, self.gateway):
                assert each.process.poll() is None, each.text()
            with contextlib.suppress(OSError):
                # Health is said again for a second; models are asked for each time, and with tenants by them alone.
                return self.get("/health").status == 200 and self.get("/v1/models").status in {200, 401}
            return False

        wait_for(serves, what="both to serve")

    def get(self, path: str) -> Answer:
        return self._send("GET", path, None, {})

    def post(self, path: str, body: object, *, headers: Mapping[str, str] | None = None) -> Answer:
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        return self._send("POST", path, data, {**JSON, **(headers or {})})

    def complete(self, **fields: object) -> Answer:
        return self.post("/v1/completions", {"model": self.model.name, "temperature": 0, **fields})

    def stream(self, **fields: object) -> Stream:
        connection = UnixConnection(self.http_socket)
        body = {"model": self.model.name, "temperature": 0, "stream": True, **fields}
        connection.request("POST", "/v1/completions", json.dumps(body), JSON)
        response = connection.getresponse()
        assert response.status == 200, response.read()
        return Stream(connection, response)

    def statistics(self) -> pb.GetStatisticsResponse:
        with self.channel() as channel:
            found: pb.GetStatisticsResponse = pb_grpc.GpuWorkerServiceStub(channel.grpc).GetStatistics(
                pb.GetStatisticsRequest(), timeout=WAIT_S
            )
            return found

    def channel(self) -> PeerChannel:
        return PeerChannel(UnixAddress(self.worker_socket))

    def is_idle(self) -> bool:
        with contextlib.suppress(H3Error):
            now = self.statistics()
            return now.requests_running == now.requests_waiting == 0
        return False

    def _send(self, method: str, path: str, body: bytes | None, headers: Mapping[str, str]) -> Answer:
        with contextlib.closing(UnixConnection(self.http_socket)) as connection:
            connection.request(method, path, body, dict(headers))
            response = connection.getresponse()
            return Answer(response.status, dict(response.getheaders()), response.read())


@contextlib.contextmanager
def running(
    folder: Path,
    model: Path,
    *,
    worker: Mapping[str, object] | None = None,
    gateway: Mapping[str, object] | None = None,
) -> Iterator[Rig]:
    """Both processes. Those that still run at the end are told to end, and must end well: gpu_worker checks its
    integrity then.
    """
    rig = Rig(folder, model, dict(worker or {}), dict(gateway or {}))
    try:
        rig.wait_until_serving()
        yield rig
    except BaseException:
        for each in (rig.gateway, rig.worker):
            each.process.kill()
            each.process.wait(timeout=WAIT_S)
        raise
    for each in (rig.gateway, rig.worker):
        if each.process.poll() is None:
            assert each.end() == 0, each.text()


def text_of(events: list[dict[str, Any]]) -> str:
    """The text of a streamed completion."""
    return "".join(choice["text"] for event in events for choice in event.get("choices", []))


def metric_names(page: str) -> set[str]:
    """Names of the metrics that a page describes."""
    return set(re.findall(r"^# TYPE (\S+) ", page, re.MULTILINE))
