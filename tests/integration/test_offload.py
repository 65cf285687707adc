"""Attention over real processes that come, go, stop and die has the numbers of one process, bit for bit."""

from __future__ import annotations

import contextlib
import random
import resource
import signal
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from tests.integration.offload_rig import HelperProcess, Node

from h3kv.attention import native
from h3kv.attention.native import TORCH_DTYPES
from h3kv.attention.parts import Part
from h3kv.core.layout import PageLayout
from h3kv.core.ports import Offload
from h3kv.core.types import DType, Encoding

pytestmark = pytest.mark.slow

TOKENS = 8 * 1024 + 100
LAYOUTS = [PageLayout(DType.FP32, 64), PageLayout(DType.BF16, 64), PageLayout(DType.BF16, 64, Encoding.K8V4)]


@pytest.fixture
def node(tmp_path: Path) -> Iterator[Node]:
    node = Node(tmp_path)
    yield node
    node.close()


class Steps:
    """Decode steps over one context, each compared with what this process computes alone."""

    def __init__(self, node: Node, layout: PageLayout) -> None:
        self.generator = torch.Generator().manual_seed(5)
        self.node, self.layout = node, layout
        self.table_KN: NDArray[np.void] = node.pages(TOKENS, layout, kv_heads=3, generator=self.generator)

    def run(self, count: int) -> None:
        for _ in range(count):
            q_THD = torch.randn(1, 9, self.layout.head_dim, generator=self.generator)
            q_THD = q_THD.to(TORCH_DTYPES[self.layout.dtype])
            alone, spread = self.attend(q_THD, native.LOCAL), self.attend(q_THD, self.node.spread)
            assert torch.equal(alone.out_THD, spread.out_THD)
            assert torch.equal(alone.lse_TH, spread.lse_TH)

    def attend(self, q_THD: torch.Tensor, offload: Offload) -> Part:
        return native.attend(q_THD, self.table_KN, layout=self.layout, position=TOKENS - 1, offload=offload)

    def until_helped(self, units: int = 1) -> None:
        """Steps until helpers have computed so many more units."""
        wanted = self.node.spread.statistics().units_helped + units
        for _ in range(20_000):
            self.run(1)
            if self.node.spread.statistics().units_helped >= wanted:
                return
        raise AssertionError(self.node.spread.statistics())


@contextlib.contextmanager
def helpers(node: Node, count: int) -> Iterator[list[HelperProcess]]:
    processes = [HelperProcess(node.folder, f"ann_offload-{number}") for number in range(count)]
    node.await_helpers(count)
    yield processes
    for process in processes:
        process.leave()


@pytest.mark.parametrize("layout", LAYOUTS, ids=["fp32", "bf16", "k8v4"])
def test_processes_that_help_change_no_bit(node: Node, layout: PageLayout) -> None:
    steps = Steps(node, layout)
    steps.run(3)
    for count in (1, 2):
        before = node.spread.statistics().units_helped
        with helpers(node, count) as processes:
            steps.until_helped(units=50)
            statistics = [process.status() for process in processes]
        node.await_helpers(0)
        assert not any(each["has_torch"] for each in statistics)
        assert sum(each["refused"] for each in statistics) == 0
        # The last unit's helper may count it a moment after it was fetched.
        helped = node.spread.statistics().units_helped - before
        assert helped - count <= sum(each["units"] for each in statistics) <= helped
    steps.run(3)


def test_a_helper_that_is_killed_leaves_nothing_behind(node: Node) -> None:
    steps = Steps(node, LAYOUTS[2])
    for number in range(5):
        process = HelperProcess(node.folder, f"ann_offload-{number}", threads=2)
        node.await_helpers(2)
        steps.until_helped()
        process.kill()
        steps.run(20)
        node.await_helpers(0)
        assert node.spread.statistics().quarantined_jobs == 0


def test_a_helper_that_is_stopped_holds_one_job_at_most_until_it_goes_on(node: Node) -> None:
    steps = Steps(node, LAYOUTS[2])
    with helpers(node, 2) as (stopped, other):
        steps.until_helped()
        for _ in range(10):
            stopped.process.send_signal(signal.SIGSTOP)
            steps.run(100)
            assert node.spread.statistics().quarantined_jobs <= 2
            stopped.process.send_signal(signal.SIGCONT)
            steps.until_helped()
        assert other.status()["units"] > 0
        stopped.status()
        steps.run(2)
        node.until(lambda: node.spread.statistics().quarantined_jobs == 0, "late helpers let go")


@pytest.mark.parametrize("is_killed", [True, False], ids=["which dies", "which goes on"])
def test_a_helper_that_is_stopped_over_the_end_of_its_owner_is_waited_for(tmp_path: Path, is_killed: bool) -> None:
    first = Node(tmp_path)
    stopped, other = (HelperProcess(tmp_path, f"ann_offload-{number}") for number in range(2))
    first.await_helpers(2)
    Steps(first, LAYOUTS[2]).until_helped()
    stopped.process.send_signal(signal.SIGSTOP)
    first.abandon()
    second = Node(tmp_path)
    assert second.adopted
    second.await_helpers(1)
    steps = Steps(second, LAYOUTS[2])
    steps.until_helped()
    assert second.crew.may_be_written
    if is_killed:
        stopped.kill()
    else:
        stopped.process.send_signal(signal.SIGCONT)
        second.await_helpers(2)
        stopped.leave()
    other.leave()
    second.until(lambda: not second.crew.may_be_written, "nobody to be left who writes")
    steps.run(3)
    second.close()


def test_a_thousand_steps_while_helpers_come_go_stop_and_die(node: Node) -> None:
    steps = Steps(node, LAYOUTS[2])
    chance = random.Random(7)
    live: list[HelperProcess] = []
    stopped: HelperProcess | None = None
    steps.run(50)
    resident = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for round_number in range(50):
        if stopped is not None:
            stopped.process.send_signal(signal.SIGCONT)
            stopped = None
        action = chance.choice(["come", "come", "die", "leave", "stop"])
        if action == "come" and len(live) < 3:
            live.append(HelperProcess(node.folder, f"ann_offload-{round_number}"))
        elif action == "die" and live:
            live.pop(chance.randrange(len(live))).kill()
        elif action == "leave" and live:
            live.pop(chance.randrange(len(live))).leave()
        elif action == "stop" and live:
            stopped = chance.choice(live)
            stopped.process.send_signal(signal.SIGSTOP)
        steps.run(20)
        assert node.spread.statistics().quarantined_jobs <= len(live)
    if stopped is not None:
        stopped.process.send_signal(signal.SIGCONT)
    for process in live:
        process.leave()
    node.await_helpers(0)
    assert node.spread.statistics().units_helped > 0
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - resident < 32 << 10
