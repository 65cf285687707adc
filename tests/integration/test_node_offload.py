"""A node whose attention other processes share: they come, go, stop and die, and no token of an answer changes."""

from __future__ import annotations

import contextlib
import functools
import itertools
import re
import signal
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.integration.nvme_io_rig import NvmeIo, nvme_io
from tests.integration.service_rig import PROMPT, WAIT_S, Process, Rig, running, text_of, wait_for

from h3kv.telemetry import names
from h3kv.testing.tiny_models import write_tiny_model

pytestmark = pytest.mark.slow

LONG = f"{PROMPT * 12}What does Jack lack?"
"""More than three parts of 1,024 tokens that lie in HOST."""
ANSWER_TOKENS = 48
CAPS = {"HOST_BYTES": "64MiB", "CAPACITY": "64MiB"}
KILLS = 20


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model") / "tiny"
    write_tiny_model(folder, max_position_embeddings=8192)
    return folder


def ask(rig: Rig, *, meanwhile: Callable[[], object] = lambda: None, after: int = 1) -> str:
    stream = rig.stream(prompt=LONG, max_tokens=ANSWER_TOKENS)
    events = stream.events()
    heard = list(itertools.islice(events, after))
    meanwhile()
    heard += events
    assert stream.ended, heard[-1]
    return text_of(heard)


class HelpedNode:
    """nvme_io, gpu_worker and gateway, and as many processes of ann_offload as are wanted."""

    def __init__(self, folder: Path, store: NvmeIo, rig: Rig) -> None:
        self.folder, self.store, self.rig = folder, store, rig
        self.helpers: list[Process] = []
        self._numbers = itertools.count()

    def add(self, *, threads: int = 1) -> Process:
        """A process that helps, once it does."""
        number = next(self._numbers)
        settings = {
            "INSTANCE": f"ann_offload-{number}",
            "ADDRESS": f"unix://{self.folder / f'ann_offload-{number}.sock'}",
            "REGIONS": self.store.regions,
            "CREW": self.folder / "crew.sock",
            "THREADS": threads,
            "METRICS__PORT": 0,
        }
        helper = Process("ann_offload", self.folder, settings)
        self.helpers.append(helper)
        self.await_helpers(len(self.helpers))
        return helper

    def remove(self, helper: Process, with_signal: int = signal.SIGKILL) -> None:
        """End a process, and wait until nobody counts on it."""
        self.helpers.remove(helper)
        assert helper.end(with_signal=with_signal) == (0 if with_signal == signal.SIGTERM else -signal.SIGKILL)
        self.await_helpers(len(self.helpers))

    def await_helpers(self, count: int) -> None:
        wait_for(lambda: self.metric("h3_offload_workers") == count, what=f"{count} processes to help")

    def metric(self, name: str, labels: str = "") -> float:
        """A metric of gpu_worker's page."""
        url = re.findall(r"http://127\.0\.0\.1:\d+/metrics", self.rig.worker.text())[-1]
        with urllib.request.urlopen(url, timeout=WAIT_S) as answer:
            page: str = answer.read().decode()
        found = re.search(rf"^{re.escape(name + labels)} (\S+)$", page, re.MULTILINE)
        return 0.0 if found is None else float(found[1])

    def helped(self, units: str = names.ATTEND_UNITS) -> float:
        """Units of attention, or of a metric's kind, that helpers computed."""
        return self.metric(units, '{by="worker"}')

    def ask(self, *, meanwhile: Callable[[], object] = lambda: None, after: int = 1) -> str:
        """An answer. After so many of its pieces, something is done."""
        return ask(self.rig, meanwhile=meanwhile, after=after)

    def ask_until_helped(self, expected: str, units: str = names.ATTEND_UNITS) -> None:
        """Answers, all as expected, until a helper has taken part in one."""
        before = self.helped(units)

        def is_helped() -> bool:
            assert self.ask() == expected
            return self.helped(units) > before

        wait_for(is_helped, what="units to be taken")


@contextlib.contextmanager
def helped_node(folder: Path, model: Path, **worker: object) -> Iterator[HelpedNode]:
    """A node without helpers at first. Those that are left at the end are killed, and gpu_worker must end whole."""
    remote = {"TIERS": "services", "NVME_IO": f"unix://{folder / 'nvme_io.sock'}", "DEVICE__WINDOW_TOKENS": 128}
    with nvme_io(folder, **CAPS) as store, running(folder, model, worker={**remote, **worker}) as rig:
        node = HelpedNode(folder, store, rig)
        try:
            yield node
        finally:
            for helper in node.helpers:
                helper.end(with_signal=signal.SIGKILL)
        # With nobody left who may write, all that helpers had taken must be free again: gpu_worker checks it.
        node.await_helpers(0)
        assert rig.worker.end() == 0, rig.worker.text()


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_answers_with_helpers_are_those_without_and_those_of_embedded_tiers(
    model: Path, tmp_path: Path, dtype: str
) -> None:
    (tmp_path / "embedded").mkdir()
    worker: dict[str, Any] = {"MODEL__DTYPE": dtype}
    tiers = {"HOST__KV_BYTES": "64MiB", "TIERING__MODE": "on", "DEVICE__WINDOW_TOKENS": 128}
    with running(tmp_path / "embedded", model, worker={**worker, **tiers}) as rig:
        expected = ask(rig)
    with helped_node(tmp_path, model, **worker) as node:
        assert node.ask() == expected
        assert node.helped() == 0
        node.add()
        node.ask_until_helped(expected)
        node.add(threads=2)
        node.ask_until_helped(expected)
        for helper in list(node.helpers):
            node.remove(helper, with_signal=signal.SIGTERM)
        assert node.ask() == expected


def test_helpers_search_the_index_and_change_no_answer(tmp_path: Path) -> None:
    model = tmp_path / "wide"
    # Index enough for a unit in each of the four segments.
    write_tiny_model(model, max_position_embeddings=8192, num_hidden_layers=1, num_key_value_heads=4, head_dim=128)
    retrieval = {"ENCODING": "k8v4", "MODE": "retrieval", "BUDGET_TOKENS": 128}
    with helped_node(tmp_path, model, **{f"ATTENTION__{name}": value for name, value in retrieval.items()}) as node:
        expected = node.ask()
        assert node.helped(names.SCAN_UNITS) == 0
        node.add()
        node.ask_until_helped(expected, names.SCAN_UNITS)


def test_helpers_come_stop_and_die_under_a_running_answer(model: Path, tmp_path: Path) -> None:
    with helped_node(tmp_path, model) as node:
        expected = node.ask()
        node.add()
        other = node.add()
        node.ask_until_helped(expected)
        for act in (
            lambda: other.process.send_signal(signal.SIGSTOP),
            node.add,
            lambda: other.process.send_signal(signal.SIGCONT),
            lambda: other.process.send_signal(signal.SIGSTOP),
            lambda: node.remove(other),
        ):
            assert node.ask(meanwhile=act) == expected
        node.ask_until_helped(expected)


def test_helpers_that_are_killed_twenty_times_under_load_change_nothing(model: Path, tmp_path: Path) -> None:
    with helped_node(tmp_path, model) as node:
        expected = node.ask()
        for number in range(KILLS):
            helper = node.add()
            node.ask_until_helped(expected)
            assert node.ask(meanwhile=functools.partial(node.remove, helper), after=1 + number % 10) == expected


def test_helpers_outlive_the_owner_of_the_sequences_and_help_its_successor(model: Path, tmp_path: Path) -> None:
    with helped_node(tmp_path, model) as node:
        expected = node.ask()
        node.add()
        stopped = node.add()
        for is_dying in (False, True):
            node.ask_until_helped(expected)
            stream = node.rig.stream(prompt=LONG, max_tokens=ANSWER_TOKENS)
            assert next(stream.events())
            # It holds what it had taken, and lets go only when it goes on, or with its life.
            stopped.process.send_signal(signal.SIGSTOP)
            assert node.rig.worker.end(with_signal=signal.SIGKILL) == -signal.SIGKILL
            stream.close()
            node.rig.start_worker()
            node.rig.wait_until_serving()
            node.await_helpers(1)
            node.ask_until_helped(expected)
            if is_dying:
                node.remove(stopped)
            else:
                stopped.process.send_signal(signal.SIGCONT)
                node.await_helpers(2)
        assert node.ask() == expected


def test_helpers_outlive_the_owner_of_the_memory_and_keep_it_for_the_next(model: Path, tmp_path: Path) -> None:
    with helped_node(tmp_path, model) as node:
        expected = node.ask()
        node.add()
        node.ask_until_helped(expected)
        node.store.kill()
        # All that is attended to lies in memory that is still mapped.
        node.ask_until_helped(expected)
        node.store.start()
        node.store.wait_until_serving()
        node.ask_until_helped(expected)
        # Now the helper alone has the regions.
        assert node.rig.worker.end(with_signal=signal.SIGKILL) == -signal.SIGKILL
        node.store.kill()
        node.store.start()
        node.store.wait_until_serving()
        assert "regions_adopted" in node.store.log
        node.rig.start_worker()
        node.rig.wait_until_serving()
        node.await_helpers(1)
        node.ask_until_helped(expected)


def test_nobody_helps_where_it_is_turned_off(model: Path, tmp_path: Path) -> None:
    with helped_node(tmp_path, model, OFFLOAD="off") as node:
        node.ask()
        assert not (tmp_path / "crew.sock").exists()
