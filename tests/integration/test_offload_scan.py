"""Searches of an index over real processes that come, go, stop and die have the numbers of one process, bit for bit."""

from __future__ import annotations

import contextlib
import ctypes
import random
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from tests.integration.offload_rig import HelperProcess, Node
from tests.unit.attention.planes import Planes, planes_bytes
from tests.unit.attention.slabs import slab_layout

from h3kv.attention.native import LOCAL
from h3kv.core.types import DType, Encoding

pytestmark = pytest.mark.slow

WAIT_S = 60.0
"""A test that waits longer has failed."""
BLOCKS = [16] * 20 + [3, 16, 7]


@pytest.fixture
def node(tmp_path: Path) -> Iterator[Node]:
    node = Node(tmp_path)
    yield node
    node.close()


class Searches:
    """Searches of one index in the host region, each compared with what this process finds alone."""

    def __init__(self, node: Node, encoding: Encoding, dtype: DType) -> None:
        self.node = node
        layout = slab_layout(encoding, kv_heads=3, head_dim=64, dtype=dtype)
        size = planes_bytes(layout) * len(BLOCKS)
        assert size <= node.host.geometry.data_bytes
        address = node.host.address + node.host.geometry.data_offset
        self.planes = Planes(
            layout, BLOCKS, memory=np.ctypeslib.as_array((ctypes.c_uint8 * size).from_address(address))
        )

    def run(self, count: int) -> None:
        for _ in range(count):
            self.planes.check(self.node.spread, LOCAL)

    def until_helped(self, units: int = 1) -> None:
        """Searches until helpers have computed so many more units."""
        wanted = self.node.spread.statistics().scanning.units_helped + units
        end_s = time.monotonic() + WAIT_S
        while self.node.spread.statistics().scanning.units_helped < wanted:
            assert time.monotonic() < end_s, self.node.spread.statistics()
            self.run(1)


@contextlib.contextmanager
def helpers(node: Node, count: int) -> Iterator[list[HelperProcess]]:
    processes = [HelperProcess(node.folder, f"ann_offload-{number}") for number in range(count)]
    node.await_helpers(count)
    yield processes
    for process in processes:
        process.leave()


@pytest.mark.parametrize(
    ("encoding", "dtype"), [(Encoding.K8V4, DType.BF16), (Encoding.INT4, DType.FP32)], ids=["k8v4", "int4"]
)
def test_processes_that_help_change_no_bit(node: Node, encoding: Encoding, dtype: DType) -> None:
    searches = Searches(node, encoding, dtype)
    searches.run(3)
    for count in (1, 4):
        before = node.spread.statistics().scanning.units_helped
        with helpers(node, count) as processes:
            searches.until_helped(units=20)
            statistics = [process.status() for process in processes]
        node.await_helpers(0)
        assert not any(each["has_torch"] for each in statistics)
        assert sum(each["refused"] for each in statistics) == 0
        helped = node.spread.statistics().scanning.units_helped - before
        # The last unit's helper may count it a moment after it was fetched.
        assert helped - count <= sum(each["scans"] for each in statistics) <= helped
    searches.run(3)


def test_searches_while_helpers_come_go_stop_and_die(node: Node) -> None:
    searches = Searches(node, Encoding.K8V4, DType.BF16)
    chance = random.Random(3)
    live: list[HelperProcess] = []
    stopped: HelperProcess | None = None
    for number in range(24):
        if stopped is not None:
            stopped.process.send_signal(signal.SIGCONT)
            stopped = None
        action = chance.choice(["come", "come", "die", "leave", "stop"])
        if action == "come" and len(live) < 3:
            live.append(HelperProcess(node.folder, f"ann_offload-{number}"))
        elif action == "die" and live:
            live.pop(chance.randrange(len(live))).kill()
        elif action == "leave" and live:
            live.pop(chance.randrange(len(live))).leave()
        elif action == "stop" and live:
            stopped = chance.choice(live)
            stopped.process.send_signal(signal.SIGSTOP)
        searches.run(40)
        assert node.spread.statistics().quarantined_jobs <= len(live)
    if stopped is not None:
        stopped.process.send_signal(signal.SIGCONT)
    for process in live:
        process.leave()
    node.await_helpers(0)
    assert node.spread.statistics().quarantined_jobs == 0
