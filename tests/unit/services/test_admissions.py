"""How many requests of each tenant run, and answers that are admitted together."""

from __future__ import annotations

import pytest

from h3kv.core.errors import PeerBusyError, QuotaError, RequestError
from h3kv.directory.quotas_memory import MemoryQuotas
from h3kv.telemetry.recorder import Recorder
from h3kv.testing.clock import ManualClock
from services.gpu_worker.admissions import OpenAdmissions, RequestShares, Together
from services.gpu_worker.quota import TokenQuota

MINE = ("mine", b"salt")


def test_one_tenant_leaves_half_to_the_others() -> None:
    shares = RequestShares(4, name="worker")
    with shares.taking("a"), shares.taking("a"):
        with pytest.raises(QuotaError, match="may have 2") as caught, shares.taking("a"):
            pytest.fail("a third one")
        assert caught.value.retry_after_s == 1
        with shares.taking("b", 2), pytest.raises(PeerBusyError), shares.taking("c"):
            pytest.fail("a fifth one")
        with shares.taking("c"):
            pass
    shares.check_integrity()


def test_nobody_in_particular_may_have_all() -> None:
    shares = RequestShares(4, name="worker")
    with shares.taking("", 4), pytest.raises(PeerBusyError), shares.taking("a"):
        pytest.fail("a fifth one")
    shares.check_integrity()


def test_answers_of_one_request_run_within_the_share() -> None:
    assert RequestShares(4, name="w").answers_at_a_time(3) == 2
    assert RequestShares(1, name="w").answers_at_a_time(3) == 1
    assert RequestShares(256, name="w").answers_at_a_time(1000) == 16


class World:
    """A minute of 1,000 tokens, and two prompts of 100 with two answers of up to 50 each."""

    def __init__(self) -> None:
        self.counters = MemoryQuotas(ManualClock())
        self.quota = TokenQuota(self.counters, Recorder())
        self.open = OpenAdmissions()
        admission = self.quota.admit("mine", 1000, prompt_tokens=200, answer_tokens_max=200)
        prompts = [(1,) * 100, (2,) * 100]
        self.together = Together(MINE, prompts, answers=4, length=50, admission=admission)

    def left(self) -> int:
        """Tokens of the minute that are left."""
        for tokens in range(1000, -1, -1):
            try:
                self.quota.admit("mine", 1000, prompt_tokens=tokens, answer_tokens_max=0).cancel()
            except QuotaError:
                continue
            return tokens
        pytest.fail("overdrawn")


def test_each_prompt_counts_once_and_what_did_not_come_is_given_back() -> None:
    world = World()
    assert world.left() == 600
    with world.open.opening(world.together) as name:
        for _ in range(3):
            found = world.open.find(name, MINE)
            with found.answering() as counted:
                assert found.prompt(1) == (2,) * 100
                counted.has_begun, counted.tokens = True, 20
        assert world.left() == 600
    assert world.left() == 1000 - 200 - 60


def test_an_answer_that_ends_after_the_admission_is_counted_too() -> None:
    world = World()
    with world.together.answering() as counted:
        with world.open.opening(world.together):
            pass
        assert world.left() == 600
        counted.has_begun, counted.tokens = True, 50
    assert world.left() == 750
    with pytest.raises(RequestError), world.together.answering():
        pytest.fail("it is closed")


def test_an_admission_of_which_nothing_began_costs_nothing() -> None:
    world = World()
    with world.open.opening(world.together):
        pass
    assert world.left() == 1000


def test_only_what_was_admitted_is_found() -> None:
    world = World()
    with world.open.opening(world.together) as name:
        for other in (("mine", b"other"), ("theirs", b"salt")):
            with pytest.raises(RequestError, match="admit it anew"):
                world.open.find(name, other)
        with pytest.raises(RequestError):
            world.together.prompt(2)
        for _ in range(4):
            with world.together.answering():
                pass
        with pytest.raises(RequestError), world.together.answering():
            pytest.fail("a fifth one")
    with pytest.raises(RequestError):
        world.open.find(name, MINE)
