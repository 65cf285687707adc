"""All processes of a node on contiguous memory and a raw NVMe disk. Virtual machine only: `make test-vm VM=FOLDER`.

The model is tiny and random; what is tested is the way of its bytes: from the worker into memory of a DMA heap that all
processes map, from there to the disk past all caches, and back after a death or a new start.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
from tests.faults import node_rig
from tests.faults.node_rig import End, Node, Prompt, owner_statistics, running, until, worker_is_idle
from tests.vm.machine import DEVICE, SERIAL, in_machine_only, sectors_read

from h3kv.api.common.v1 import types_pb2
from h3kv.tiers.cold.format import format_store
from h3kv.tiers.io import IoEngine

SETTINGS = {
    "nvme_io": {"STORE": str(DEVICE), "HOST_BYTES": "24MiB", "CAPACITY": "512MiB"},
    "gpu_worker": {"DEVICE": '{"kv_bytes": "4MiB", "window_tokens": 64}'},
}
PROMPTS = [Prompt(f"{word} work and no play makes Jack a dull boy. " * 24, 6) for word in ("All", "Much", "No")]


pytestmark = [*in_machine_only, pytest.mark.timeout(1_200)]


@pytest.fixture(autouse=True)
def patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """Programs start slowly on an emulated processor."""
    monkeypatch.setattr(node_rig, "WAIT_S", 900.0)
    monkeypatch.setattr(node_rig, "ANSWER_S", 300.0)


@pytest.fixture
def disk() -> Path:
    """With a store that holds nothing."""
    with DEVICE.open("r+b", buffering=0) as raw:
        raw.write(bytes(1 << 20))
    format_store(DEVICE, lambda files: IoEngine.open(files, depth=32), capacity_bytes=None, area_bytes=None, yes=SERIAL)
    return DEVICE


def answers(node: Node, prompts: Sequence[Prompt]) -> list[str]:
    """What prompts are answered by: asked again where the node says that they may be."""
    said = []
    for prompt in prompts:
        end, text = End.AGAIN, ""
        while end is End.AGAIN:
            end, text = node.ask(prompt)
        assert end is End.RIGHT, (end, text, node.text())
        said.append(text)
    return said


def check_owner(node: Node) -> None:
    """All regions are of the heap, and the disk works."""
    owner = owner_statistics(node)
    assert {region.kind for region in owner.regions} == {types_pb2.REGION_KIND_DMA_HEAP}
    assert {"host", "work"} <= {region.purpose for region in owner.regions}
    assert not owner.io.is_degraded


def test_answers_outlive_deaths_and_a_new_start_on_contiguous_memory_and_disk(disk: Path, tmp_path: Path) -> None:
    with running(tmp_path, SETTINGS) as node:
        first = answers(node, PROMPTS)
        check_owner(node)
        for name in ("nvme_io", "ann_offload-0", "gpu_worker"):
            node.wait_for_next(name, node.kill(name))
            assert answers(node, PROMPTS) == first
            check_owner(node)
        until(lambda: worker_is_idle(node), "no request and no pin")
    (tmp_path / "up").unlink()
    before = sectors_read()
    with running(tmp_path, SETTINGS) as node:
        assert answers(node, PROMPTS) == first
        assert sum(tier.used_bytes for tier in owner_statistics(node).tiers) > 0
    assert sectors_read() > before
    assert disk.is_block_device()
