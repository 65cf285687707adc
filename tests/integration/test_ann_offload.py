"""The service as it is run: `python -m services.ann_offload`, over real regions, its calls, metrics and end."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from tests.integration.offload_rig import Node

from h3kv.api.ann_offload.v1 import ann_offload_service_pb2 as pb
from h3kv.api.ann_offload.v1 import ann_offload_service_pb2_grpc as pb_grpc
from h3kv.attention import native
from h3kv.core.layout import PageLayout
from h3kv.core.types import DType, Encoding
from h3kv.core.units import NS_PER_S
from h3kv.rpc.addresses import parse_address
from h3kv.rpc.client import PeerChannel

pytestmark = pytest.mark.slow

LAYOUT = PageLayout(DType.BF16, 64, Encoding.K8V4)
TOKENS = 4096
ROOT = Path(__file__).parents[2]


@contextlib.contextmanager
def service(folder: Path, **settings: str) -> Iterator[subprocess.Popen[str]]:
    chosen = {
        "ADDRESS": f"unix://{folder / 'offload.sock'}",
        "REGIONS": str(folder / "regions"),
        "CREW": str(folder / "crew"),
        "METRICS__PORT": "0",
        "LOGS__FORMAT": "json",
    } | settings
    environment = os.environ | {f"H3_ANN_OFFLOAD_{name}": value for name, value in chosen.items()}
    command = [sys.executable, "-m", "services.ann_offload"]
    with subprocess.Popen(command, env=environment, cwd=ROOT, stderr=subprocess.PIPE, text=True) as process:
        try:
            yield process
        finally:
            if process.poll() is None:
                process.kill()


def step(node: Node, generator: torch.Generator) -> None:
    table_KN = node.pages(TOKENS, LAYOUT, kv_heads=3, generator=generator)
    deadline = time.monotonic() + 60
    before = node.spread.statistics().units_helped
    while node.spread.statistics().units_helped < before + 20:
        assert time.monotonic() < deadline, node.spread.statistics()
        q_THD = torch.randn(1, 9, 64, generator=generator).bfloat16()
        alone = native.attend(q_THD, table_KN, layout=LAYOUT, position=TOKENS - 1)
        spread = native.attend(q_THD, table_KN, layout=LAYOUT, position=TOKENS - 1, offload=node.spread)
        assert torch.equal(alone.out_THD, spread.out_THD)


def test_it_helps_tells_what_it_did_drains_and_ends(tmp_path: Path) -> None:
    node = Node(tmp_path)
    generator = torch.Generator().manual_seed(2)
    with (
        service(tmp_path, THREADS="2") as process,
        PeerChannel(parse_address(f"unix://{tmp_path / 'offload.sock'}", field="address")) as channel,
    ):
        channel.wait_until_serving(timeout_ns=60 * NS_PER_S)
        node.await_helpers(2)
        step(node, generator)
        stub = pb_grpc.AnnOffloadServiceStub(channel.grpc)
        statistics = stub.GetStatistics(pb.GetStatisticsRequest(), timeout=10)
        assert statistics.phase == pb.PHASE_SERVING and statistics.threads == 2
        assert statistics.units_total > 0 and statistics.read_bytes_total > 0 and statistics.busy_ns_total > 0
        assert statistics.units_refused_total == 0
        assert statistics.mailbox.depth_max == node.area.mailbox.geometry.entries
        assert stub.Drain(pb.DrainRequest(), timeout=30).units_left == 0
        node.await_helpers(0)
        deadline = time.monotonic() + 30
        while stub.GetStatistics(pb.GetStatisticsRequest(), timeout=10).phase != pb.PHASE_DRAINED:
            assert time.monotonic() < deadline
        process.send_signal(signal.SIGTERM)
        assert process.wait(timeout=60) == 0
    node.close()


@pytest.mark.parametrize("is_adopting", [True, False], ids=["which adopts", "which makes new regions"])
def test_it_comes_back_to_the_next_owner(tmp_path: Path, is_adopting: bool) -> None:
    with service(tmp_path) as process:
        for seed in range(2):
            node = Node(tmp_path)
            assert bool(node.adopted) == (seed == 1 and is_adopting)
            node.await_helpers(1)
            step(node, torch.Generator().manual_seed(seed))
            if seed == 1:
                process.send_signal(signal.SIGTERM)
                assert process.wait(timeout=60) == 0
                node.close()
            else:
                node.abandon()
                if not is_adopting:
                    (tmp_path / "regions.regions").unlink()


def test_metrics_are_on_its_page(tmp_path: Path) -> None:
    node = Node(tmp_path)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    with service(tmp_path, METRICS__PORT=str(port)) as process:
        node.await_helpers(1)
        step(node, torch.Generator().manual_seed(2))
        deadline = time.monotonic() + 30
        while True:
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as answer:
                lines = answer.read().decode().splitlines()
            done = [line for line in lines if line.startswith('h3_offload_units_total{outcome="done"}')]
            if done and float(done[0].split()[1]) > 0:
                break
            assert time.monotonic() < deadline, lines
        assert any(line.startswith("h3_offload_busy_seconds_total") for line in lines)
        process.send_signal(signal.SIGTERM)
        assert process.wait(timeout=60) == 0
    node.close()
