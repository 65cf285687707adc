"""Tokens of a minute, counted for requests that begin and end."""

from __future__ import annotations

import concurrent.futures
import logging

import pytest

from h3kv.core.errors import QuotaError
from h3kv.core.units import NS_PER_S
from h3kv.directory.quotas import Charge, Refusal
from h3kv.directory.quotas_memory import MemoryQuotas
from h3kv.telemetry import names
from h3kv.telemetry.recorder import Recorder
from h3kv.testing.clock import ManualClock
from services.gpu_worker.quota import TOO_LARGE, USED_UP, TokenQuota


class AwayQuotas(MemoryQuotas):
    """Counters whose server can be away."""

    is_away = False

    @property
    def is_degraded(self) -> bool:
        return self.is_away

    def take(self, tenant: str, cost_us: int) -> Charge | Refusal:
        self._is_local = self.is_away
        return super().take(tenant, cost_us)


class World:
    """A quota, its clock and what it measured."""

    def __init__(self) -> None:
        self.clock = ManualClock()
        self.counters = AwayQuotas(self.clock)
        self.telemetry = Recorder()
        self.quota = TokenQuota(self.counters, self.telemetry)

    def retry_after_s(self, prompt: int, answer: int, *, limit: int = 600) -> int | None:
        """When a request would be admitted that is not now."""
        with pytest.raises(QuotaError) as caught:
            self.quota.admit("a", limit, prompt_tokens=prompt, answer_tokens_max=answer)
        return caught.value.retry_after_s

    def close(self) -> None:
        self.counters.check_integrity()


def test_prompt_and_longest_answer_count_at_once_and_the_rest_comes_back() -> None:
    world = World()
    admission = world.quota.admit("a", 600, prompt_tokens=100, answer_tokens_max=500)
    assert world.retry_after_s(1, 0) == 1
    admission.settle(200)
    world.quota.admit("a", 600, prompt_tokens=300, answer_tokens_max=0)
    assert world.retry_after_s(50, 50) == 10
    world.close()


def test_settling_twice_or_with_more_than_was_reserved_gives_nothing_more() -> None:
    world = World()
    admission = world.quota.admit("a", 600, prompt_tokens=100, answer_tokens_max=500)
    admission.settle(9_999)
    admission.settle(0)
    admission.cancel()
    assert world.retry_after_s(1, 0) == 1
    world.close()


def test_a_request_that_never_began_costs_nothing() -> None:
    world = World()
    world.quota.admit("a", 600, prompt_tokens=100, answer_tokens_max=500).cancel()
    world.quota.admit("a", 600, prompt_tokens=100, answer_tokens_max=500)
    world.close()


def test_waiting_as_long_as_it_says_is_enough() -> None:
    world = World()
    world.quota.admit("a", 600, prompt_tokens=600, answer_tokens_max=0)
    seconds = world.retry_after_s(123, 45)
    assert seconds == 17
    world.clock.advance(seconds * NS_PER_S)
    world.quota.admit("a", 600, prompt_tokens=123, answer_tokens_max=45)
    world.close()


@pytest.mark.parametrize(("prompt", "answer", "limit"), [(600, 1, 600), (1, 0, 0), (10**9, 0, 600)])
def test_a_request_larger_than_the_quota_is_refused_for_good(prompt: int, answer: int, limit: int) -> None:
    world = World()
    assert world.retry_after_s(prompt, answer, limit=limit) is None
    assert world.telemetry.value(names.QUOTA_REFUSALS, reason=TOO_LARGE) == 1
    world.quota.admit("a", 600, prompt_tokens=600, answer_tokens_max=0)
    world.close()


def test_a_tenant_without_a_quota_may_have_any_number() -> None:
    world = World()
    for _ in range(3):
        world.quota.admit("", None, prompt_tokens=10**9, answer_tokens_max=10**9).settle(5)
    world.close()


def test_refusals_are_counted_and_say_what_to_do() -> None:
    world = World()
    world.quota.admit("a", 600, prompt_tokens=600, answer_tokens_max=0)
    with pytest.raises(QuotaError, match=r"100 tokens of this one are there in 10 s"):
        world.quota.admit("a", 600, prompt_tokens=100, answer_tokens_max=0)
    with pytest.raises(QuotaError, match="max_tokens"):
        world.quota.admit("a", 600, prompt_tokens=100, answer_tokens_max=501)
    assert world.telemetry.value(names.QUOTA_REFUSALS, reason=USED_UP) == 1
    world.close()


def test_a_server_that_is_away_is_said_once_and_requests_go_on(caplog: pytest.LogCaptureFixture) -> None:
    world = World()
    world.counters.is_away = True
    with caplog.at_level(logging.INFO):
        for _ in range(3):
            world.quota.admit("a", 600, prompt_tokens=10, answer_tokens_max=10).settle(1)
        world.counters.is_away = False
        world.quota.admit("a", 600, prompt_tokens=10, answer_tokens_max=10).settle(1)
    assert [record.getMessage() for record in caplog.records] == ["quotas_counted_alone", "quotas_shared"]
    assert world.telemetry.value(names.QUOTA_LOCAL_REQUESTS) == 3
    world.close()


def test_threads_together_never_get_more_than_the_quota() -> None:
    world = World()

    def ask(_: int) -> bool:
        try:
            world.quota.admit("a", 600, prompt_tokens=10, answer_tokens_max=10)
        except QuotaError:
            return False
        return True

    with concurrent.futures.ThreadPoolExecutor(8) as threads:
        assert sum(threads.map(ask, range(200))) == 30
    world.close()
