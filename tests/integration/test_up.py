"""`h3 up` for real: all processes of a node with a tiny model, on one machine."""

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
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from h3kv.cli.app import app
from h3kv.core.errors import ConfigError
from h3kv.supervisor.node_plan import find_services
from h3kv.testing.tiny_models import write_tiny_model

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
PATIENCE_S = 120.0


def until(holds: Callable[[], Any], what: str) -> Any:
    end_s = time.monotonic() + PATIENCE_S
    pause = threading.Event()
    while not (value := holds()):
        assert time.monotonic() < end_s, f"waited in vain: {what}"
        pause.wait(0.05)
    return value


class RunningNode:
    """`h3 up`, its lines, and its gateway."""

    def __init__(self, folder: Path, model: Path) -> None:
        self.run_folder = folder / "run"
        self.log = folder / "up.log"
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port: int = probe.getsockname()[1]
        command = [sys.executable, "-m", "h3kv", "up", "--run-folder", str(self.run_folder)]
        command += ["--http-port", str(self.port), "--model", str(model), "--dtype", "fp32", "--threads", "1"]
        command += ["--offload-workers", "2", "--host-kv", "64MiB", "--device-kv", "8MiB", "--window", "64"]
        command += ["--store", str(folder / "store"), "--store-capacity", "64MiB", "--drain", "10"]
        environment = {**os.environ, "PYTHONPATH": f"{ROOT / 'src'}{os.pathsep}{ROOT}"}
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(command, env=environment, cwd=ROOT, stderr=log, stdout=log)

    def text(self) -> str:
        return self.log.read_text()

    def wait_until_up(self) -> None:
        until(lambda: "the node answers at" in self.text() or self.process.poll() is not None, "the node")
        assert self.process.poll() is None, self.text()

    def pid_of(self, name: str) -> int:
        return next(pid for pid in self.children() if self.name_of(pid) == name)

    def children(self) -> list[int]:
        listed = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children").read_text()
        return [int(pid) for pid in listed.split()]

    def name_of(self, pid: int) -> str:
        found = re.search(rb"services\.(\w+)", Path(f"/proc/{pid}/cmdline").read_bytes())
        return found[1].decode() if found else ""

    def ask(self, path: str, body: dict[str, object] | None = None) -> tuple[int, dict[str, Any]]:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)
        try:
            text = None if body is None else json.dumps(body)
            connection.request("GET" if body is None else "POST", path, text, {"Content-Type": "application/json"})
            answer = connection.getresponse()
            found: dict[str, Any] = json.loads(answer.read())
            return answer.status, found
        finally:
            connection.close()

    def complete(self) -> str:
        status, answer = self._complete()
        assert status == 200, answer
        text: str = answer["choices"][0]["text"]
        return text

    def complete_or_none(self) -> str | None:
        """None where the node says that it cannot now."""
        status, answer = self._complete()
        assert status in {200, 503, 504}, answer
        return answer["choices"][0]["text"] if status == 200 else None

    def _complete(self) -> tuple[int, dict[str, Any]]:
        body = {"model": "model", "prompt": "the " * 60, "max_tokens": 8, "temperature": 0}
        return self.ask("/v1/completions", body)


@contextlib.contextmanager
def node(folder: Path) -> Iterator[RunningNode]:
    write_tiny_model(folder / "model")
    running = RunningNode(folder, folder / "model")
    try:
        yield running
    finally:
        running.process.kill()
        running.process.wait()


def test_a_node_answers_survives_its_processes_and_leaves_nothing_behind(tmp_path: Path) -> None:
    with node(tmp_path) as running:
        running.wait_until_up()
        before = running.complete()
        status = CliRunner().invoke(app, ["status", "--run-folder", str(running.run_folder), "--json"])
        assert status.exit_code == 0, status.output
        assert len(json.loads(status.stdout)["processes"]) == 6
        assert {each.stat().st_mode & 0o777 for each in running.run_folder.glob("*.sock")} == {0o600}
        evicted = CliRunner().invoke(app, ["evict", "--cold", "--run-folder", str(running.run_folder)])
        assert evicted.exit_code == 0, evicted.output
        for name in ("migration_controller", "ann_offload"):
            os.kill(running.pid_of(name), signal.SIGKILL)
            assert running.complete() == before
            until(lambda name=name: name in map(running.name_of, running.children()), f"{name} again")
        for name in ("gpu_worker", "nvme_io"):
            os.kill(running.pid_of(name), signal.SIGKILL)
            until(lambda name=name: name in map(running.name_of, running.children()), f"{name} again")
            assert until(running.complete_or_none, f"an answer after {name} was killed") == before
        children = running.children()
        running.process.send_signal(signal.SIGINT)
        assert running.process.wait(PATIENCE_S) == 0, running.text()
        assert not [pid for pid in children if Path(f"/proc/{pid}").exists()]
        assert not list(running.run_folder.glob("*.json"))


def test_without_services_the_cure_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [place for place in sys.path if not (Path(place or ".") / "services").is_dir()])
    monkeypatch.delitem(sys.modules, "services", raising=False)
    with pytest.raises(ConfigError, match="run `h3 up` in a checkout"):
        find_services(package=tmp_path / "site-packages/h3kv")
