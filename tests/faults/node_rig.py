"""What the fault tests of a whole node share: all of its processes, to be killed and stopped, and what they hold.

Every request ends with the right answer, or with an error that says it may be sent again. Anything else is wrong.
"""

from __future__ import annotations

import contextlib
import enum
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
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from h3kv.api.gpu_worker.v1 import gpu_worker_service_pb2 as worker_pb
from h3kv.api.gpu_worker.v1 import gpu_worker_service_pb2_grpc as worker_grpc
from h3kv.api.nvme_io.v1 import nvme_io_service_pb2 as nvme_pb
from h3kv.api.nvme_io.v1 import nvme_io_service_pb2_grpc as nvme_grpc
from h3kv.core.error_codes import Code, Retry
from h3kv.core.errors import H3Error
from h3kv.core.units import NS_PER_S
from h3kv.memory.region_format import ADDRESS_BASE, REGIONS_MAX, WINDOW_BYTES
from h3kv.rpc.addresses import UnixAddress
from h3kv.rpc.client import ChannelConfig, PeerChannel
from h3kv.supervisor import probe
from h3kv.testing.tiny_models import write_tiny_model

ROOT = Path(__file__).parents[2]
WAIT_S = 240.0
"""A test that waits longer has failed."""
ANSWER_S = 60.0
"""For one answer, or the error in its place."""
MODEL = "tiny"
PATIENT = ChannelConfig(timeout_ns=int(ANSWER_S) * NS_PER_S)
"""A call on a busy machine may take long: only what it answers counts."""
MAPPING = {"nvme_io", "gpu_worker", "ann_offload-0"}
"""Processes that map regions."""

ValueT = TypeVar("ValueT")


def until(holds: Callable[[], ValueT], what: str) -> ValueT:
    """What `holds` returns, once that is true."""
    end_s = time.monotonic() + WAIT_S
    pause = threading.Event()
    while not (value := holds()):
        assert time.monotonic() < end_s, f"waited in vain: {what}"
        pause.wait(0.02)
    return value


def settled(read: Callable[[], ValueT], is_right: Callable[[ValueT], bool], what: str) -> ValueT:
    """What is read, once it is right."""
    end_s = time.monotonic() + WAIT_S
    pause = threading.Event()
    while not is_right(value := read()):
        assert time.monotonic() < end_s, f"{what}: {value}"
        pause.wait(0.1)
    return value


def _tree(kind: type[H3Error]) -> Iterator[type[H3Error]]:
    yield kind
    for below in kind.__subclasses__():
        yield from _tree(below)


AGAIN = {
    kind.reason.lower()
    for kind in _tree(H3Error)
    if kind is not H3Error and (kind.retry is not Retry.NO or kind.code in {Code.UNAVAILABLE, Code.ABORTED})
}
"""Errors after which the same request may be sent again."""


class End(enum.Enum):
    """How a request ended."""

    RIGHT = "right"
    AGAIN = "again"
    CUT = "cut"
    """The connection broke: the gateway was killed meanwhile, or it is wrong."""
    REFUSED = "refused"
    """Nobody is there to connect to: the gateway was killed before, or it is wrong."""
    WRONG = "wrong"


@dataclass(frozen=True, slots=True)
class Prompt:
    """A request, and what it is answered by; None while nobody knows."""

    text: str
    tokens: int
    expected: str | None = None


@dataclass(frozen=True, slots=True)
class Held:
    """What a process holds."""

    descriptors: int
    private_bytes: int
    regions: int
    """Mapped: by their addresses, which are the same in every process."""


class Node:
    """`node_process.py` and all below it.

    Args:
        folder: of sockets, log and store; its path must be short.
        settings: of each service, besides what a node of a tiny model needs.
    """

    def __init__(self, folder: Path, settings: Mapping[str, Mapping[str, str]]) -> None:
        self.folder = folder
        self.log = folder / "log"
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port: int = free.getsockname()[1]
        write_tiny_model(folder / MODEL, max_position_embeddings=4096)
        told: dict[str, dict[str, str]] = {
            "gpu_worker": {
                "MODEL": json.dumps({"source": str(folder / MODEL), "dtype": "fp32"}),
                "RUNTIME": json.dumps({"threads": 1}),
                # A tiny model is faster than a busy disk: what is found must not depend on which of them is.
                "TIERING": json.dumps({"recompute": "off"}),
                "DEVICE": json.dumps({"kv_bytes": "8MiB", "window_tokens": 64}),
            },
            "nvme_io": {"HOST_BYTES": "64MiB", "STORE": str(folder / "store"), "CAPACITY": "64MiB"},
        }
        for service, more in settings.items():
            told[service] = {**told.get(service, {}), **more}
        command = [sys.executable, str(Path(__file__).with_name("node_process.py"))]
        command += [str(folder), str(self.port), json.dumps(told)]
        environment = {name: value for name, value in os.environ.items() if not name.startswith("H3_")}
        places = [os.environ.get("PYTHONPATH", str(ROOT / "src")), str(ROOT)]
        environment["PYTHONPATH"] = os.pathsep.join(places)
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(command, env=environment, cwd=ROOT, stdout=log, stderr=log)

    def text(self) -> str:
        return self.log.read_text(errors="replace")

    def wait_until_up(self) -> None:
        until(lambda: (self.folder / "up").exists() or self.process.poll() is not None, "the node")
        assert self.process.poll() is None, self.text()

    def pid(self, name: str) -> int | None:
        """Of a process that lives."""
        pids: dict[str, int] = json.loads((self.folder / "pids").read_text())
        return pids.get(name)

    def address(self, name: str) -> UnixAddress:
        return UnixAddress(self.folder / f"{name}.sock")

    @contextlib.contextmanager
    def channel(self, name: str) -> Iterator[PeerChannel]:
        with PeerChannel(self.address(name), config=PATIENT) as channel:
            yield channel

    def serves(self, name: str) -> bool:
        place = f"http://127.0.0.1:{self.port}/health" if name == "gateway" else str(self.address(name))
        return probe.is_serving(place, timeout_s=1.0)

    def signal(self, name: str, number: signal.Signals) -> int:
        """Send a signal, and give back who got it."""
        pid = self.pid(name)
        assert pid is not None, f"{name} does not run"
        os.kill(pid, number)
        return pid

    def kill(self, name: str) -> int:
        """kill -9, and give back who is dead: nothing of it is there any more."""
        pid = self.signal(name, signal.SIGKILL)
        until(lambda: not Path(f"/proc/{pid}").exists(), f"the end of {name}")
        return pid

    def wait_for_next(self, name: str, dead: int) -> None:
        """Until another one serves in its place."""
        until(lambda: self.pid(name) not in {None, dead} and self.serves(name), f"the next {name}")

    def held(self, name: str) -> Held:
        pid = self.pid(name)
        place = Path(f"/proc/{pid}")
        status = (place / "status").read_text()
        private = re.search(r"^RssAnon:\s+(\d+) kB", status, re.MULTILINE)
        assert private is not None, status
        starts = [int(line.partition("-")[0], 16) for line in (place / "maps").read_text().splitlines()]
        windows = {(start - ADDRESS_BASE) // WINDOW_BYTES for start in starts}
        regions = windows & set(range(REGIONS_MAX))
        return Held(len(list((place / "fd").iterdir())), int(private[1]) << 10, len(regions))

    def ask(self, prompt: Prompt, *, on_token: Callable[[], None] = lambda: None) -> tuple[End, str]:
        """Stream one answer: how it ended, and its text or what went wrong."""
        body = {"model": MODEL, "prompt": prompt.text, "max_tokens": prompt.tokens, "temperature": 0, "stream": True}
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=ANSWER_S)
        try:
            connection.request("POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"})
            response = connection.getresponse()
            if response.status != 200:
                return _refused(response)
            return _streamed(response, prompt, on_token)
        except TimeoutError as error:
            return End.WRONG, repr(error)
        except ConnectionRefusedError as error:
            return End.REFUSED, repr(error)
        except (OSError, http.client.HTTPException) as error:
            return End.CUT, repr(error)
        finally:
            connection.close()

    def answer(self, prompt: Prompt) -> Prompt:
        """The prompt with the answer that it gets now."""
        end, text = self.ask(prompt)
        assert end is End.RIGHT, (end, text, self.text())
        return Prompt(prompt.text, prompt.tokens, text)

    def end(self) -> None:
        """Tell it to end. All processes end well, and none complained."""
        self.process.send_signal(signal.SIGTERM)
        assert self.process.wait(WAIT_S) == 0, self.text()
        said = self.text()
        for complaint in ("Traceback", "mistake of ours", "did not end in time"):
            assert complaint not in said, said


def _refused(response: http.client.HTTPResponse) -> tuple[End, str]:
    error = json.loads(response.read())["error"]
    can_repeat = error["code"] in AGAIN and response.status in {429, 503, 504}
    return (End.AGAIN if can_repeat else End.WRONG), f"{response.status} {error}"


def _streamed(response: http.client.HTTPResponse, prompt: Prompt, on_token: Callable[[], None]) -> tuple[End, str]:
    text = ""
    for line in response:
        event = line.decode().strip().removeprefix("data: ")
        if event == "[DONE]":
            is_right = prompt.expected is None or text == prompt.expected
            return (End.RIGHT if is_right else End.WRONG), text
        if not event.startswith("{"):
            continue
        fields: dict[str, Any] = json.loads(event)
        if "error" in fields:
            error = fields["error"]
            return (End.AGAIN if error["code"] in AGAIN else End.WRONG), str(error)
        text += "".join(choice["text"] for choice in fields.get("choices", []))
        on_token()
    return End.CUT, "the stream ended early"


@contextlib.contextmanager
def running(folder: Path, settings: Mapping[str, Mapping[str, str]] | None = None) -> Iterator[Node]:
    """A node that is up. It ends well."""
    node = Node(folder, settings or {})
    try:
        node.wait_until_up()
        yield node
        node.end()
    finally:
        node.process.kill()
        node.process.wait()


def worker_statistics(node: Node) -> worker_pb.GetStatisticsResponse:
    with node.channel("gpu_worker") as channel:
        found: worker_pb.GetStatisticsResponse = worker_grpc.GpuWorkerServiceStub(channel.grpc).GetStatistics(
            worker_pb.GetStatisticsRequest()
        )
    return found


def worker_is_idle(node: Node) -> bool:
    """Whether no request runs or waits, and nothing is pinned."""
    now = worker_statistics(node)
    return not (now.requests_running or now.requests_waiting or any(tier.pinned_bytes for tier in now.tiers))


def owner_statistics(node: Node) -> nvme_pb.GetStatisticsResponse:
    with node.channel("nvme_io") as channel:
        found: nvme_pb.GetStatisticsResponse = nvme_grpc.NvmeIoServiceStub(channel.grpc).GetStatistics(
            nvme_pb.GetStatisticsRequest()
        )
    return found


def worker_uses_owner(node: Node) -> bool:
    """Whether the worker is registered with the owner of the memory that lives, and works with it.

    Only under load: an owner hears of pins of running sequences from who is registered, and begins with none.
    """
    return any(each.name == "gpu_worker" and each.pins for each in owner_statistics(node).clients)


def held(node: Node, names: Sequence[str]) -> dict[str, Held]:
    """What processes hold, by name, once those that map regions have mapped some."""
    return {
        name: settled(
            partial(node.held, name),
            lambda now, name=name: now.regions > 0 or name not in MAPPING,
            f"regions of {name}",
        )
        for name in names
    }
