"""Every process of a whole node is killed again and again while clients ask: no answer is wrong, and nothing is lost.

The processes that live on are looked at after some kills and after all of them: what each death costs them would show.
Each kind of process is killed a few times, or as often as `H3_TEST_KILLS` says, 3 or more: `H3_TEST_KILLS=20 pytest
tests/faults/test_node_kills.py`.
"""

from __future__ import annotations

import os
import random
from collections.abc import Iterator
from functools import partial

import pytest
from tests.faults.node_load import Load
from tests.faults.node_rig import (
    End,
    Held,
    Node,
    Prompt,
    held,
    owner_statistics,
    running,
    settled,
    until,
    worker_is_idle,
    worker_uses_owner,
)

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1_800)]

KILLS = int(os.environ.get("H3_TEST_KILLS", "5"))
"""Of each kind of process."""
SETTLED = min(4, KILLS // 2)
"""The kill after which a process that lives on has all that it will ever have; they are counted from 0."""
SEED = 20
SHARED = "All work and no play makes Jack a dull boy. " * 16
TAILS = ("What does Jack lack?", "Jill came down the hill. " * 4, "And so on, and so on. " * 20)
CLIENTS = ["ann_offload-0", "gpu_worker"]
"""Of the memory."""
MIB = 1 << 20


@pytest.fixture(scope="module")
def node(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Node]:
    with running(tmp_path_factory.mktemp("n")) as started:
        yield started


@pytest.fixture(scope="module")
def prompts(node: Node) -> list[Prompt]:
    """Some that share most of their text, and one that shares nothing."""
    texts = [*[SHARED + tail for tail in TAILS], "Once upon a time. " * 10]
    return [node.answer(Prompt(text, 24 + 8 * number)) for number, text in enumerate(texts)]


def holds_no_more(then: Held, now: Held) -> bool:
    """Whether a process has given back all but what an allocator keeps."""
    return (
        now.descriptors <= then.descriptors
        and now.regions <= then.regions
        and now.private_bytes <= 1.1 * then.private_bytes + 4 * MIB
    )


def check_held(node: Node, before: dict[str, Held]) -> None:
    """What lives on holds what it held, and nobody holds anything for the dead."""
    for name, then in before.items():
        # gRPC may keep a connection that closes at this moment, and memory of what has just ended.
        settled(partial(node.held, name), partial(holds_no_more, then), f"{name} held {then}, now")
    until(lambda: worker_is_idle(node), "no request and no pin")
    settled(
        lambda: sorted(each.name for each in owner_statistics(node).clients), CLIENTS.__eq__, "not the living alone"
    )
    assert not owner_statistics(node).io.is_degraded


def test_worker_and_gateway_that_are_killed_under_load(node: Node, prompts: list[Prompt]) -> None:
    chance = random.Random(SEED)
    before: dict[str, Held] = {}
    with Load(node, prompts, clients=2, seed=SEED) as load:
        for number in range(KILLS):
            load.wait_for_events(chance.randrange(1, 40))
            dead = load.kill("gpu_worker")
            load.wait_for_events(chance.randrange(1, 6))
            load.kill("gateway")
            load.wait_until_served()
            assert node.pid("gpu_worker") not in {None, dead}
            if number == SETTLED:
                before = held(node, ("nvme_io", "migration_controller", "ann_offload-0"))
    assert not load.wrong
    assert load.ends[End.RIGHT] >= KILLS and load.ends[End.AGAIN] >= KILLS, load.ends
    check_held(node, before)


def test_owner_of_memory_controller_and_helper_that_are_killed_under_load(node: Node, prompts: list[Prompt]) -> None:
    chance = random.Random(SEED + 1)
    before: dict[str, Held] = {}
    with Load(node, prompts, clients=2, seed=SEED + 1) as load:
        for number in range(KILLS):
            again = load.ends[End.AGAIN]
            dead = {}
            for name in ("ann_offload-0", "migration_controller"):
                load.wait_for_events(chance.randrange(1, 40))
                dead[name] = load.kill(name)
            load.wait_until_served()
            for name, pid in dead.items():
                node.wait_for_next(name, pid)
            assert load.ends[End.AGAIN] == again, "an answer needs a process that it could do without"
            load.wait_for_events(chance.randrange(1, 40))
            node.wait_for_next("nvme_io", load.kill("nvme_io"))
            until(lambda: worker_uses_owner(node), "the worker at the next nvme_io")
            # A request that began before may have needed nothing of nvme_io: it says nothing of the next ones.
            load.mark()
            load.wait_until_served()
            if number == SETTLED:
                before = held(node, ("gpu_worker", "gateway"))
    assert not load.wrong
    assert load.ends[End.REFUSED] == load.ends[End.CUT] == 0
    check_held(node, before)
