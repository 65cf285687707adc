"""A whole node, as `h3 up` runs it: its processes, what they hold, and a client of its gateway."""

from __future__ import annotations

import contextlib
import http.client
import json
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from http import HTTPStatus
from pathlib import Path
from typing import Final

from h3kv.core.errors import PeerUnavailableError, RequestError
from h3kv.core.units import NS_PER_S
from h3kv.memory.region_format import ADDRESS_BASE, REGIONS_MAX, WINDOW_BYTES
from h3kv.supervisor.launch import tied
from h3kv.supervisor.node_plan import find_services

START_NS: Final = 300 * NS_PER_S
"""Until the node answers."""
END_S: Final = 30.0
ANSWER_S: Final = 120.0
LOOK_S: Final = 0.1
LOG_TAIL: Final = 2_000
"""Characters of the node's log that an error brings along."""
KIB: Final = 1024


@dataclass(frozen=True, slots=True)
class Holding:
    """What all processes of a node hold together."""

    resident_bytes: int
    """A page that several have mapped counts for each of them."""
    descriptors: int
    regions: int
    """Regions that are mapped, each counted for each process."""


class WholeNode:
    """`h3 up` with its children; made by `open`.

    Args:
        process: of `h3 up`.
        port: where its gateway answers.
        model: name of the model.
    """

    def __init__(self, process: subprocess.Popen[bytes], port: int, model: str) -> None:
        self._process = process
        self._model = model
        self.port = port
        self.model = model
        self._connection = http.client.HTTPConnection("127.0.0.1", port, timeout=ANSWER_S)

    @classmethod
    @contextlib.contextmanager
    def open(cls, folder: Path, model: str, flags: Sequence[str]) -> Iterator[WholeNode]:
        """The node, once it answers.

        Args:
            folder: for sockets and the log; its path must be short.
            model: folder, file, or `package:NAME`.
            flags: of `h3 up`, besides those of place and model.

        Raises:
            ConfigError: `services` is not there: the wheel leaves it out.
            PeerUnavailableError: the node does not come up.
        """
        port, log = free_port(), folder / "up.log"
        command = [sys.executable, "-m", "h3kv", "up", "--run-folder", str(folder / "run")]
        command += ["--http-port", str(port), "--model", model, *flags]
        with log.open("wb") as lines:
            process = subprocess.Popen(tied(command), cwd=find_services(), stdout=lines, stderr=lines)
        try:
            _wait(process, port, log)
            name = model.removeprefix("package:").rstrip("/").rpartition("/")[2]
            node = cls(process, port, name)
            with contextlib.closing(node._connection):
                yield node
        finally:
            _end(process)

    def complete(self, prompt: str, *, tokens: int) -> None:
        """Have a prompt answered with so many tokens.

        Raises:
            RequestError: the node refuses; the message is its own.
        """
        fields = {"model": self._model, "prompt": prompt, "max_tokens": tokens, "temperature": 0}
        self._connection.request("POST", "/v1/completions", json.dumps(fields), {"Content-Type": "application/json"})
        answer = self._connection.getresponse()
        text = answer.read().decode("utf-8", "replace")
        if answer.status != HTTPStatus.OK:
            raise RequestError(f"the node answered {answer.status}: {text}")

    def holding(self) -> Holding:
        """What its processes hold now."""
        pids = [self._process.pid, *_children(self._process.pid)]
        return Holding(sum(map(_resident_bytes, pids)), sum(map(_descriptors, pids)), sum(map(_regions, pids)))


def free_port() -> int:
    """A port of this machine on which nothing listens."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _wait(process: subprocess.Popen[bytes], port: int, log: Path) -> None:
    end_ns = time.monotonic_ns() + START_NS
    while process.poll() is None and time.monotonic_ns() < end_ns:
        if _is_well(port):
            return
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(LOOK_S)
    message = f"the node does not come up: {log.read_text(errors='replace')[-LOG_TAIL:]}"
    raise PeerUnavailableError(message, peer="h3 up")


def _is_well(port: int) -> bool:
    asked = http.client.HTTPConnection("127.0.0.1", port, timeout=ANSWER_S)
    with contextlib.closing(asked), contextlib.suppress(OSError, http.client.HTTPException):
        asked.request("GET", "/health")
        return asked.getresponse().status == HTTPStatus.OK
    return False


def _end(process: subprocess.Popen[bytes]) -> None:
    process.send_signal(signal.SIGINT)
    try:
        process.wait(END_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def _children(pid: int) -> list[int]:
    """Of a process and of its children."""
    own = [int(each) for each in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    return own + [grandchild for child in own for grandchild in _children(child)]


def _resident_bytes(pid: int) -> int:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) * KIB for line in lines if line.startswith("VmRSS:"))


def _descriptors(pid: int) -> int:
    return len(list(Path(f"/proc/{pid}/fd").iterdir()))


def _regions(pid: int) -> int:
    """Regions that it has mapped: by their addresses, which are the same in every process."""
    starts = [int(line.partition("-")[0], 16) for line in Path(f"/proc/{pid}/maps").read_text().splitlines()]
    places = [(start - ADDRESS_BASE) // WINDOW_BYTES for start in starts]
    return len({place for place in places if 0 <= place < REGIONS_MAX})
