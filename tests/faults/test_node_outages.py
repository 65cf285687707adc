"""Processes of a whole node that hang, stay away, or come back at once; clients that go; a pool that is too small."""

from __future__ import annotations

import http.client
import json
import signal
import threading
from collections.abc import Iterator
from functools import partial

import pytest
from tests.faults.node_load import Load
from tests.faults.node_rig import (
    MODEL,
    End,
    Node,
    Prompt,
    held,
    running,
    settled,
    until,
    worker_is_idle,
    worker_statistics,
)

from h3kv.api.migration_controller.v1 import migration_controller_service_pb2 as controller_pb
from h3kv.api.migration_controller.v1 import migration_controller_service_pb2_grpc as controller_grpc

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1_800)]

STOPPED_S = 10.0
ANSWERS_AWAY = 60
"""While the controller is away. Nothing that the others do depends on how long that is: what they keep for it has a
bound of reports, not of time."""
GONE_CLIENTS = 8
SEED = 5
SHARED = "All work and no play makes Jack a dull boy. " * 40
TAILS = ("What does Jack lack?", "Jill came down the hill. " * 4)
SETTINGS = {
    "nvme_io": {"HOST_BYTES": "9MiB"},
    "gpu_worker": {"DEVICE": json.dumps({"kv_bytes": "3MiB", "window_tokens": 64})},
}


@pytest.fixture(scope="module")
def node(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Node]:
    with running(tmp_path_factory.mktemp("n"), SETTINGS) as started:
        yield started


@pytest.fixture(scope="module")
def prompts(node: Node) -> list[Prompt]:
    """More than HOST holds."""
    texts = [f"Chapter {number}. " + f"The {number}. day was long and cold. " * 24 for number in range(6)]
    return [node.answer(Prompt(text, 32)) for text in texts]


def view(node: Node) -> controller_pb.GetViewResponse:
    with node.channel("migration_controller") as channel:
        found: controller_pb.GetViewResponse = controller_grpc.MigrationControllerServiceStub(channel.grpc).GetView(
            controller_pb.GetViewRequest()
        )
    return found


def lives(node: Node) -> dict[str, list[bytes]]:
    """Boot tokens of the processes that report, by name."""
    seen: dict[str, list[bytes]] = {}
    for each in view(node).processes:
        seen.setdefault(each.process.name, []).append(each.process.boot_token)
    return seen


def knows_all(node: Node) -> bool:
    """Whether the controller knows each process that reports once, and every segment of the worker."""
    named = lives(node)
    return (
        {"gpu_worker", "nvme_io"} <= set(named)
        and all(len(tokens) == 1 for tokens in named.values())
        and named["gpu_worker"] == [worker_statistics(node).server.boot_token]
        and view(node).segments_total == worker_statistics(node).segments_cached
    )


def test_two_requests_with_one_prefix_in_a_pool_smaller_than_twice_the_prompt(node: Node) -> None:
    prompts = [node.answer(Prompt(SHARED + tail, 48)) for tail in TAILS]
    ends: list[tuple[End, str]] = []
    clients = [threading.Thread(target=lambda each=each: ends.append(node.ask(each))) for each in prompts * 2]
    for client in clients:
        client.start()
    for client in clients:
        client.join()
    assert [end for end, _ in ends] == [End.RIGHT] * len(clients), ends
    until(lambda: worker_is_idle(node), "no request and no pin")


def test_owner_of_memory_that_is_stopped_goes_on_where_it_was(node: Node, prompts: list[Prompt]) -> None:
    pid = node.pid("nvme_io")
    with Load(node, prompts, clients=2, seed=SEED) as load:
        load.wait_for_events(10)
        node.signal("nvme_io", signal.SIGSTOP)
        load.go_on_for(STOPPED_S)
        node.signal("nvme_io", signal.SIGCONT)
        load.mark()
        load.wait_until_served()
    assert not load.wrong
    assert node.pid("nvme_io") == pid
    until(lambda: worker_is_idle(node), "no request and no pin")


def test_controller_that_stays_away_is_not_needed_and_learns_all_when_it_is_back(
    node: Node, prompts: list[Prompt]
) -> None:
    until(lambda: knows_all(node), "the view")
    (node.folder / "gone").touch()
    dead = node.kill("migration_controller")
    with Load(node, prompts, clients=2, seed=SEED + 1) as load:
        until(lambda: load.wrong or load.ends[End.RIGHT] >= ANSWERS_AWAY, "answers without a controller")
    assert load.answered == {End.RIGHT}, (load.ends, load.wrong)
    assert not node.serves("migration_controller")
    (node.folder / "gone").unlink()
    node.wait_for_next("migration_controller", dead)
    until(lambda: knows_all(node), "the view again")


def test_worker_that_comes_back_before_it_is_missed_leaves_nothing_of_its_earlier_life(
    node: Node, prompts: list[Prompt]
) -> None:
    until(lambda: knows_all(node), "the view")
    before = lives(node)["gpu_worker"]
    for _ in range(2):
        dead = node.kill("gpu_worker")
        until(lambda dead=dead: node.pid("gpu_worker") not in {None, dead}, "the next life")
    until(lambda: node.serves("gpu_worker"), "the worker")
    assert node.ask(prompts[0]) == (End.RIGHT, prompts[0].expected)
    until(lambda: knows_all(node), "the view of the last life alone")
    assert lives(node)["gpu_worker"] != before


def test_clients_that_go_in_the_middle_of_their_answers_leave_nothing_behind(node: Node, prompts: list[Prompt]) -> None:
    node.ask(prompts[0])
    until(lambda: worker_is_idle(node), "no request and no pin")
    names = ("gateway", "gpu_worker", "nvme_io")
    before = held(node, names)
    for number in range(GONE_CLIENTS):
        body = {"model": MODEL, "prompt": prompts[number % 3].text, "max_tokens": 2_000, "stream": True}
        connection = http.client.HTTPConnection("127.0.0.1", node.port, timeout=60)
        connection.request("POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"})
        response = connection.getresponse()
        assert any(line.startswith(b"data: {") for line in response)
        response.close()
        connection.close()
    until(lambda: worker_is_idle(node), "no request and no pin")
    for name in names:
        then = before[name]
        settled(partial(node.held, name), lambda now, then=then: now.descriptors <= then.descriptors, f"{name}: {then}")
    assert node.ask(prompts[1]) == (End.RIGHT, prompts[1].expected)
