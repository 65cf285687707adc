"""Prefixes in a cold store of any speed: read where that is faster, else computed again, with the same answers."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from h3kv.core.ports import PersistentStore
from h3kv.core.types import Completion, Fetch, SegmentId, Tier
from h3kv.engine.events import Finished
from h3kv.engine.request import Request, SamplingParameters
from h3kv.engine.speeds import READS_KEPT_NS, SAMPLES_MAX
from h3kv.policy.load_or_recompute import Choice
from h3kv.telemetry import names
from h3kv.testing.clock import ManualClock
from h3kv.testing.engines import Rig, make_rig, one_thread, prompt_tokens
from h3kv.testing.tiered_rig import tiered_rig

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("single_thread")]

TOKEN_NS = 100_000
"""What a prompt's token is said to take: a block of 32 KiB as long as 200 ns for each of its bytes."""
FAST, SLOW = 10, 1_000
"""Nanoseconds in which the disk reads a byte."""
PROMPT = prompt_tokens(1, 3_000)


class TimedStore:
    """A cold store that reads at a speed of its own, by a clock that nothing else moves. Passes all else on.

    What was fetched comes only to whoever waits for it.
    """

    def __init__(self, store: PersistentStore, clock: ManualClock, ns_per_byte: int) -> None:
        self._store = store
        self._clock = clock
        self._held: list[Completion] = []
        self._was_waited_for = False
        self.ns_per_byte = ns_per_byte

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)

    def poll(self) -> list[Completion]:
        """What was written; and what was read, if someone has waited."""
        ended = self._store.poll()
        self._held += [completion for completion in ended if isinstance(completion.move, Fetch)]
        moved = [completion for completion in ended if not isinstance(completion.move, Fetch)]
        if not self._was_waited_for:
            return moved
        fetched, self._held, self._was_waited_for = self._held, [], False
        for completion in fetched:
            assert isinstance(completion.move, Fetch)
            self._clock.advance(completion.move.target.nbytes * self.ns_per_byte)
        return [*moved, *fetched]

    def wait(self, timeout_ns: int) -> None:
        """See `BlockStore.wait`."""
        if not self._held:
            self._store.wait(timeout_ns)
        self._was_waited_for = True


class World:
    """A rig over a store of some speed that knows the prompt, all of which lies in the cold store alone."""

    def __init__(self, rig: Rig, store: TimedStore, clock: ManualClock) -> None:
        self.rig = rig
        self.store = store
        self.clock = clock
        rig.answer(PROMPT)
        self.demote()

    def demote(self, *, but: Collection[SegmentId] = ()) -> None:
        """Leave nothing in memory but these."""
        rig = self.rig
        rig.pool.placer.settle(10**12)
        going = [segment for segment in rig.segments.sealed() if segment.id not in but]
        rig.pool.placer.ask([one.id for one in going if one.home_L is not None], Tier.NVME, reason="idle")
        rig.pool.placer.settle(10**12)
        assert all(one.tiers == {Tier.NVME} for one in going)

    def measure(self, ns_per_token: int = TOKEN_NS) -> None:
        """As if the engine had computed prompts at this speed."""
        for chunk in range(SAMPLES_MAX):
            self.rig.pool.speeds.prefilled(128 * (chunk % 16), 128, 128 * ns_per_token)

    def ask(self, tail: Sequence[int]) -> Finished:
        """Answer the prompt with something behind it, rightly."""
        prompt = [*PROMPT, *tail]
        tokens, finished = self.rig.answer(prompt)
        assert tokens == make_rig(capacity_blocks=160).answer(prompt)[0]
        self.rig.engine.check_integrity()
        return finished

    def chosen(self, choice: Choice) -> tuple[float, float]:
        """Requests and tokens so far."""
        value = self.rig.telemetry.value
        return value(names.LOAD_OR_RECOMPUTE, choice=choice), value(names.LOAD_OR_RECOMPUTE_TOKENS, choice=choice)


@pytest.fixture
def single_thread() -> Iterator[None]:
    with one_thread():
        yield


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    clock = ManualClock()
    stores: list[TimedStore] = []

    def around(store: PersistentStore) -> Any:
        stores.append(TimedStore(store, clock, FAST))
        return stores[0]

    with tiered_rig(tmp_path, units=16, host_blocks=160, clock=clock, around=around, recomputes=True) as rig:
        yield World(rig, stores[0], clock)
        rig.engine.check_integrity()
        assert rig.segments.statistics().pins == 0


def test_a_prefix_is_read_while_nothing_was_measured(world: World) -> None:
    world.store.ns_per_byte = SLOW
    finished = world.ask([1, 2, 3])
    assert finished.statistics.cached_tokens[Tier.NVME] == 2_944
    assert finished.statistics.recomputed_tokens == 0
    assert world.chosen(Choice.LOAD) == (1, 2_944)
    assert world.chosen(Choice.RECOMPUTE) == (0, 0)


def test_a_prefix_on_a_fast_disk_is_read(world: World) -> None:
    for turn in range(2):
        world.measure()
        finished = world.ask([turn])
        assert finished.statistics.cached_tokens[Tier.NVME] == 2_944
        world.demote()
        reading = world.rig.pool.speeds.reading()
        assert reading is not None
        assert reading.ns(1, 1 << 20) == pytest.approx(FAST << 20)
    assert world.chosen(Choice.LOAD) == (2, 2 * 2_944)
    assert world.chosen(Choice.RECOMPUTE) == (0, 0)


def test_a_prefix_on_a_slow_disk_is_computed_again(world: World) -> None:
    world.store.ns_per_byte = SLOW
    world.ask([1])
    world.demote()
    world.measure()
    finished = world.ask([2])
    assert finished.statistics.recomputed_tokens == 2_944
    assert finished.statistics.cached_tokens_total == 0
    assert world.chosen(Choice.RECOMPUTE) == (1, 2_944)


def test_what_lies_in_memory_is_used_and_only_the_end_is_computed_again(world: World) -> None:
    world.store.ns_per_byte = SLOW
    world.ask([1])
    first = next(segment for segment in world.rig.segments.sealed() if segment.parent is None)
    second = next(segment for segment in world.rig.segments.sealed() if segment.parent == first.id)
    world.demote(but={first.id, second.id})
    world.measure()
    statistics = world.ask([2]).statistics
    assert statistics.cached_tokens == {Tier.HOST: 1_088}
    assert statistics.recomputed_tokens == 2_944 - 1_088


def test_what_was_computed_again_is_found_in_memory_from_then_on(world: World) -> None:
    world.store.ns_per_byte = SLOW
    world.ask([1])
    world.demote()
    world.measure()
    world.ask([2])
    finished = world.ask([3])
    assert finished.statistics.cached_tokens[Tier.HOST] == 2_944
    assert finished.statistics.recomputed_tokens == 0


def test_a_disk_that_was_slow_is_tried_again_after_a_while(world: World) -> None:
    world.store.ns_per_byte = SLOW
    world.ask([1])
    world.demote()
    world.measure()
    world.store.ns_per_byte = FAST
    assert world.ask([2]).statistics.recomputed_tokens == 2_944
    world.demote()
    world.clock.advance(READS_KEPT_NS + 1)
    finished = world.ask([3])
    assert finished.statistics.recomputed_tokens == 0
    assert finished.statistics.cached_tokens_total == 2_944


def test_a_request_that_is_cancelled_while_it_computes_again_leaves_the_older_segments(world: World) -> None:
    world.store.ns_per_byte = SLOW
    world.ask([1])
    world.demote()
    world.measure()
    sampling = SamplingParameters(max_new_tokens=4, ignore_eos=True)
    request = world.rig.engine.submit(Request(prompt=(*PROMPT, 9), sampling=sampling))
    for _ in range(3):
        world.rig.engine.step()
    assert world.rig.engine.cancel(request) is not None
    world.rig.engine.check_integrity()
    world.measure(ns_per_token=10**9)
    finished = world.ask([4])
    assert finished.statistics.cached_tokens_total == 2_944
