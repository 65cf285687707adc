"""The supervisor over real processes: small stand-ins that crash, are slow, or ignore SIGTERM."""

from __future__ import annotations

import io
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from h3kv.core.errors import ConfigError, PeerUnavailableError
from h3kv.core.units import NS_PER_MS, NS_PER_S
from h3kv.supervisor.child import ChildSpec
from h3kv.supervisor.log_lines import LineSink
from h3kv.supervisor.restarts import RestartConfig
from h3kv.supervisor.supervisor import Supervisor, SupervisorConfig

pytestmark = pytest.mark.slow

STAND_IN = Path(__file__).with_name("stand_in.py")
PATIENCE_NS = 20 * NS_PER_S
FAST = RestartConfig(first_ns=NS_PER_MS, longest_ns=20 * NS_PER_MS)


class Node:
    """A supervisor, what it wrote, and when it should end."""

    def __init__(self, folder: Path, *children: tuple[str, str, int], **bounds: int) -> None:
        self.folder = folder
        self.output = io.StringIO()
        self.has_seen: Callable[[], bool] = lambda: False
        self.turns = 0
        config = SupervisorConfig(restarts=FAST, **({"start_ns": PATIENCE_NS} | bounds))
        self.supervisor = Supervisor(
            [self.spec(*child) for child in children],
            LineSink(self.output, width=8),
            config=config,
            wait=self.wait,
            is_ending=self.is_ending,
        )

    def spec(self, name: str, behaviour: str, stage: int) -> ChildSpec:
        return ChildSpec(
            name=name,
            command=(sys.executable, str(STAND_IN), str(self.folder), name, behaviour),
            stage=stage,
            is_serving=(self.folder / f"{name}.serving").exists,
            environment={"STAND_IN": f"told {name}"},
        )

    def wait(self, duration_ns: int) -> None:
        self.turns += 1
        assert self.turns < 10_000, self.output.getvalue()
        threading.Event().wait(min(duration_ns, 5 * NS_PER_MS) / NS_PER_S)

    def is_ending(self) -> bool:
        return self.has_seen()

    def watch_until(self, holds: Callable[[], bool]) -> None:
        end_ns = time.monotonic_ns() + PATIENCE_NS
        self.has_seen = lambda: holds() or time.monotonic_ns() > end_ns
        self.supervisor.watch()
        assert holds(), self.output.getvalue()

    def starts(self, name: str) -> int:
        return int((self.folder / f"{name}.starts").read_text())

    def order(self) -> str:
        return (self.folder / "order").read_text().strip()

    def close(self) -> str:
        self.supervisor.close()
        self.supervisor.check_integrity()
        return self.output.getvalue()


def test_stages_start_in_order_and_end_in_the_opposite_one(tmp_path: Path) -> None:
    node = Node(tmp_path, ("c", "serve", 2), ("a", "serve", 0), ("b", "serve", 1))
    node.supervisor.start()
    written = node.close()
    assert node.order() == "+a +b +c -c -b -a"
    assert "a        | a start 1 told a" in written
    assert "b        | serves after" in written


def test_a_slow_one_is_waited_for_and_the_next_stage_with_it(tmp_path: Path) -> None:
    node = Node(tmp_path, ("a", "slow", 0), ("b", "serve", 1))
    waits = node.wait

    def wait(duration_ns: int) -> None:
        waits(duration_ns)
        if node.turns == 20:
            assert not (tmp_path / "b.starts").exists()
            (tmp_path / "a.may_serve").touch()

    node.supervisor._wait = wait
    node.supervisor.start()
    node.close()
    assert node.order() == "+a +b -b -a"


def test_one_that_crashes_is_started_again_until_it_serves(tmp_path: Path) -> None:
    node = Node(tmp_path, ("a", "crash twice", 0))
    node.supervisor.start()
    written = node.close()
    assert node.starts("a") == 3
    assert node.supervisor.restarts == {"a": 2}
    assert written.count("ended (code 1): started again in") == 2


def test_one_that_is_killed_comes_back_and_the_others_stay(tmp_path: Path) -> None:
    node = Node(tmp_path, ("a", "serve", 0), ("b", "serve", 1))
    node.supervisor.start()
    before = node.supervisor.pids
    (tmp_path / "a.serving").unlink()
    os.kill(before["a"], 9)
    node.watch_until(lambda: "a" in node.supervisor.pids and (tmp_path / "a.serving").exists())
    assert node.supervisor.pids["b"] == before["b"]
    assert node.supervisor.pids["a"] != before["a"]
    assert "ended (signal 9)" in node.close()


def test_one_that_crashes_for_ever_ends_the_start_with_its_name(tmp_path: Path) -> None:
    node = Node(tmp_path, ("a", "crash", 0), ("b", "serve", 1), start_ns=NS_PER_S)
    with pytest.raises(PeerUnavailableError, match="a does not serve after 1 s"):
        node.supervisor.start()
    node.close()
    assert node.starts("a") > 2
    assert not (tmp_path / "b.starts").exists()


def test_one_that_refuses_its_settings_is_not_started_again(tmp_path: Path) -> None:
    node = Node(tmp_path, ("a", "refuse", 0))
    with pytest.raises(ConfigError, match="a refuses to start"):
        node.supervisor.start()
    assert "setting x = 1: must be 2" in node.close()
    assert node.starts("a") == 1


def test_one_that_ignores_sigterm_is_killed_when_the_drain_time_is_over(tmp_path: Path) -> None:
    node = Node(tmp_path, ("a", "stubborn", 0), ("b", "serve", 1), drain_ns=200 * NS_PER_MS)
    node.supervisor.start()
    pid = node.supervisor.pids["a"]
    assert "a        | did not end in time: killed" in node.close()
    assert node.order() == "+a +b -b"
    assert not Path(f"/proc/{pid}").exists()


def test_a_second_wish_to_end_kills_at_once(tmp_path: Path) -> None:
    node = Node(tmp_path, ("a", "stubborn", 0), drain_ns=PATIENCE_NS)
    node.supervisor.start()
    node.supervisor.close(is_hurried=lambda: True)
    node.supervisor.check_integrity()
    assert node.turns < 1_000


def test_children_do_not_outlive_a_supervisor_that_is_killed(tmp_path: Path) -> None:
    supervisor = subprocess.Popen(
        [sys.executable, str(Path(__file__).with_name("supervisor_process.py")), str(tmp_path)],
        stderr=subprocess.DEVNULL,
    )
    try:
        pid_file = tmp_path / "pid"
        wait_for(lambda: pid_file.exists() and pid_file.read_text() != "")
        pid = int(pid_file.read_text())
        assert is_running(pid)
    finally:
        supervisor.kill()
        supervisor.wait()
    wait_for(lambda: not is_running(pid))


def wait_for(holds: Callable[[], bool]) -> None:
    end_ns = time.monotonic_ns() + PATIENCE_NS
    while not holds():
        assert time.monotonic_ns() < end_ns
        threading.Event().wait(0.01)


def is_running(pid: int) -> bool:
    """Whether a process is there and no zombie: who reaps orphans here may be slow."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except FileNotFoundError:
        return False
    return stat.rpartition(")")[2].split()[0] not in {"Z", "X"}
