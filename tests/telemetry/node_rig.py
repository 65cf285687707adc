"""A whole node with a tiny model, started once for all tests here, and a receiver of its spans."""

from __future__ import annotations

import contextlib
import http.client
import json
import math
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from prometheus_client.parser import text_string_to_metric_families

from h3kv.supervisor.run_folder import read_facts
from h3kv.telemetry.metric import Service
from h3kv.testing.otlp_receiver import OtlpReceiver
from h3kv.testing.tiny_models import write_tiny_model

from .node_process import IS_UP

ROOT = Path(__file__).parents[2]
PATIENCE_S = 180.0
PAGE_S = 60.0
"""For one page of metrics."""
STORE = "store"

PROGRAM = Path(__file__).with_name("node_process.py")

RULES = {"EVICTION_THRESHOLD": "1ms", "HYSTERESIS": "1ms", "WATERMARK_HIGH": "0.4", "WATERMARK_LOW": "0.2"}
"""Rules whose waits are short, so that something is decided while tests wait for it."""


def settings(folder: Path) -> dict[str, dict[str, str]]:
    """Of each service: caps that a few documents of a tiny model exceed."""
    return {
        Service.NVME_IO: {"HOST_BYTES": "12MiB", "STORE": str(folder / STORE), "CAPACITY": "12MiB"},
        # A process that takes long to come back is known all the same.
        Service.MIGRATION_CONTROLLER: {"SILENCE": "1h", **{f"RULES__{name}": value for name, value in RULES.items()}},
        Service.GPU_WORKER: {
            "MODEL__SOURCE": str(folder / "model"),
            "MODEL__DTYPE": "fp32",
            "ATTENTION__ENCODING": "k8v4",
            "ATTENTION__MODE": "retrieval",
            "ATTENTION__BUDGET_TOKENS": "64",
            "ATTENTION__RECALL_EVERY": "4",
            "DEVICE__KV_BYTES": "8MiB",
            "DEVICE__WINDOW_TOKENS": "64",
            "ENGINE__CHUNK_TOKENS": "256",
            "RUNTIME__THREADS": "1",
            "TRACING__STEPS_PER_SPAN": "8",
        },
    }


def until(holds: Callable[[], Any], what: str | Callable[[], object]) -> Any:
    """What `holds` returns, once that is true."""
    end_s = time.monotonic() + PATIENCE_S
    pause = threading.Event()
    while not (value := holds()):
        assert time.monotonic() < end_s, f"waited in vain: {what() if callable(what) else what}"
        pause.wait(0.1)
    return value


@dataclass(frozen=True, slots=True)
class Page:
    """The metrics of one process."""

    described: frozenset[str]
    """Names that have a type."""
    samples: Mapping[str, list[float]]
    """Values of all series, by the metric's name; counts of histograms."""
    text: str

    def total(self, name: str) -> float:
        """Sum over its series."""
        return sum(self.samples.get(name, []))

    def has_value(self, name: str) -> bool:
        """Whether it was measured: there is a series, and it is a number."""
        return any(not math.isnan(value) for value in self.samples.get(name, []))


class WholeNode:
    """A supervisor with its children."""

    def __init__(self, folder: Path, receiver: OtlpReceiver) -> None:
        self.run_folder = folder / "run"
        self.store = folder / STORE
        self.log = folder / "up.log"
        self.receiver = receiver
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port: int = probe.getsockname()[1]
        told = json.dumps(settings(folder))
        command = [sys.executable, str(PROGRAM), str(self.run_folder), str(self.port), receiver.endpoint, told]
        environment = {key: value for key, value in os.environ.items() if not key.startswith("H3_")}
        environment["PYTHONPATH"] = f"{ROOT / 'src'}{os.pathsep}{ROOT}"
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(command, env=environment, cwd=ROOT, stderr=log, stdout=log)

    def wait_until_up(self) -> None:
        until(lambda: IS_UP in self.text() or self.process.poll() is not None, "the node")
        assert self.process.poll() is None, self.text()

    def text(self) -> str:
        return self.log.read_text(errors="replace")

    def complete(self, prompt: str, *, tokens: int, traceparent: str | None = None) -> dict[str, Any]:
        headers = {"Content-Type": "application/json"} | ({} if traceparent is None else {"traceparent": traceparent})
        fields = {"model": "model", "prompt": prompt, "max_tokens": tokens, "temperature": 0}
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=PATIENCE_S)
        with contextlib.closing(connection):
            connection.request("POST", "/v1/completions", json.dumps(fields), headers)
            answer = connection.getresponse()
            found: dict[str, Any] = json.loads(answer.read())
            assert answer.status == 200, (found, self.text()[-4000:])
            return found

    def pages(self) -> dict[str, Page]:
        """The metrics of every process, by its name."""
        return {each.name: _page(each.metrics_url) for each in read_facts(self.run_folder) if each.metrics_url}

    def page(self, service: Service) -> Page:
        """Of the only process of a service."""
        facts = next(each for each in read_facts(self.run_folder) if each.name == service.value)
        assert facts.metrics_url is not None
        return _page(facts.metrics_url)

    def pid_of(self, name: str) -> int | None:
        """Of a child that runs now."""
        listed = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children").read_text()
        named = re.compile(rb"(?:^|\0)H3_\w+_INSTANCE=" + name.encode() + rb"\0")
        for pid in map(int, listed.split()):
            with contextlib.suppress(OSError):  # it ended meanwhile
                if named.search(Path(f"/proc/{pid}/environ").read_bytes()):
                    return pid
        return None

    def end(self) -> None:
        self.process.send_signal(signal.SIGINT)
        assert self.process.wait(PATIENCE_S) == 0, self.text()[-4000:]


@contextlib.contextmanager
def whole_node(folder: Path) -> Iterator[WholeNode]:
    """The node, serving. It ends well, or the test fails."""
    write_tiny_model(folder / "model", max_position_embeddings=4096)
    with OtlpReceiver() as receiver:
        node = WholeNode(folder, receiver)
        try:
            node.wait_until_up()
            yield node
            node.end()
        finally:
            node.process.kill()
            node.process.wait()


def _fetched(url: str) -> str | None:
    """The text there; None while the process is away or too busy to answer."""
    with (
        contextlib.suppress(OSError, http.client.HTTPException),
        urllib.request.urlopen(url, timeout=PAGE_S) as answer,
    ):
        text: str = answer.read().decode()
        return text
    return None


def _page(url: str) -> Page:
    text: str = until(lambda: _fetched(url), f"the page {url}")
    samples: dict[str, list[float]] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            if family.type == "histogram":
                if sample.name.endswith("_count"):
                    samples.setdefault(family.name, []).append(sample.value)
            else:
                samples.setdefault(sample.name, []).append(sample.value)
    described = frozenset(re.findall(r"^# TYPE (\S+) ", text, re.MULTILINE))
    return Page(described, samples, text)
