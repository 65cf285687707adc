"""Commands to move segments, and evictions, over an engine with three tiers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from h3kv.core.errors import TierBrokenError
from h3kv.core.types import BlockKey, SegmentId, SlotHandle, Tier
from h3kv.core.units import NS_PER_S
from h3kv.engine.request import Request, SamplingParameters
from h3kv.engine.segment import Segment
from h3kv.rpc.command_messages import EndedCommand, MoveCommand, MoveEnd
from h3kv.telemetry import names
from h3kv.testing.engines import Rig, make_rig, prompt_tokens
from h3kv.testing.tiered_rig import tiered_rig
from services.gpu_worker.eviction import Evicted, EvictionBounds, evict_cold
from services.gpu_worker.moves import MoveExecutor

OWN, SENDER = b"w" * 16, b"c" * 16
LONG_NS = 60 * NS_PER_S


class World:
    """An answered prompt in HOST, whose segments are moved."""

    def __init__(self, rig: Rig) -> None:
        self.rig = rig
        self.now_ns = 0
        self.executor = MoveExecutor(rig.pool, boot_token=OWN, now_ns=lambda: self.now_ns)
        self.prompt = prompt_tokens(1, 600)
        self.expected = rig.answer(self.prompt)[0]
        rig.pool.placer.settle(LONG_NS)

    @property
    def segments(self) -> list[Segment]:
        return self.rig.segments.sealed()

    def command(self, segment: Segment, target: Tier, *, number: int = 1) -> MoveCommand:
        return MoveCommand(
            SENDER,
            number,
            segment.id,
            segment.keys[0],
            OWN,
            segment.generation,
            timeout_ns=NS_PER_S,
            reason="watermark",
            source=Tier.HOST if target is Tier.NVME else Tier.NVME,
            target=target,
        )

    def carry_out(self, *commands: MoveCommand) -> list[EndedCommand]:
        for command in commands:
            self.executor.begin(command, self.now_ns)
        ended = self.executor.take_ended()
        self.rig.pool.placer.settle(LONG_NS)
        ended += self.executor.take_ended()
        self.rig.pool.check_integrity()
        return ended

    def ends(self, *commands: MoveCommand) -> list[MoveEnd]:
        return [each.outcome.end for each in self.carry_out(*commands)]


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    with tiered_rig(tmp_path, host_blocks=96) as rig:
        yield World(rig)


def test_segment_is_demoted_promoted_and_read_the_same(world: World) -> None:
    segment = max(world.segments, key=lambda each: each.room_blocks)
    (ended,) = world.carry_out(world.command(segment, Tier.NVME))
    assert (ended.outcome.end, ended.size_bytes) == (MoveEnd.DONE, 0), "write-behind had copied it"
    assert ended.outcome.tiers == segment.tiers == {Tier.NVME}
    (ended,) = world.carry_out(world.command(segment, Tier.HOST, number=2))
    assert ended.outcome.end is MoveEnd.DONE
    assert ended.size_bytes == segment.room_blocks * world.rig.pool.layout.block_bytes
    assert ended.outcome.generation == segment.generation
    assert ended.outcome.tiers == {Tier.HOST, Tier.NVME}
    assert world.rig.telemetry.value(names.MOVES, source="nvme", target="host", reason="watermark") == 1
    assert world.ends(world.command(segment, Tier.NVME, number=3)) == [MoveEnd.DONE]
    tokens, finished = world.rig.answer(world.prompt)
    assert tokens == world.expected
    assert finished.statistics.cached_tokens[Tier.NVME] > 0


def test_command_that_comes_again_acts_once_and_is_answered_as_before(world: World) -> None:
    segment = world.segments[-1]
    down = world.command(segment, Tier.NVME)
    (first,) = world.carry_out(down)
    assert world.ends(world.command(segment, Tier.HOST, number=2)) == [MoveEnd.DONE]
    assert world.carry_out(down) == [first]
    assert Tier.HOST in segment.tiers


def test_stale_unknown_late_and_void_commands_do_nothing(world: World) -> None:
    segment = world.segments[-1]
    command, tiers = world.command(segment, Tier.NVME), segment.tiers
    wrong = [
        (replace(command, number=2, generation=segment.generation + 1), MoveEnd.STALE),
        (replace(command, number=3, owner_boot_token=b"x" * 16), MoveEnd.UNKNOWN_SEGMENT),
        (replace(command, number=4, segment=SegmentId(10**6)), MoveEnd.UNKNOWN_SEGMENT),
        (replace(command, number=5, key=BlockKey(bytes(32))), MoveEnd.UNKNOWN_SEGMENT),
        (replace(command, number=6, timeout_ns=0), MoveEnd.EXPIRED),
        (replace(command, number=7, source=Tier.DEVICE, target=Tier.HOST), MoveEnd.FAILED),
        (replace(command, number=8, source=Tier.NVME, target=Tier.HOST), MoveEnd.DONE),
    ]
    assert world.ends(*[each for each, _ in wrong]) == [end for _, end in wrong]
    assert segment.tiers == tiers


def test_segment_that_a_sequence_reads_whole_stays(world: World) -> None:
    sampling = SamplingParameters(max_new_tokens=4, ignore_eos=True)
    stream = world.rig.engine.generate(Request(prompt=tuple(world.prompt), sampling=sampling))
    next(stream)
    pinned = next(each for each in world.segments if each.pins)
    assert world.ends(world.command(pinned, Tier.NVME)) == [MoveEnd.BUSY]
    stream.close()
    assert world.ends(world.command(pinned, Tier.NVME, number=2)) == [MoveEnd.DONE]


def test_promotion_into_a_full_tier_finds_no_room(world: World) -> None:
    segment = max(world.segments, key=lambda each: each.room_blocks)
    world.ends(world.command(segment, Tier.NVME))
    held = world.rig.segments.open([16] * (world.rig.segments.free_blocks() // 16))
    assert world.ends(world.command(segment, Tier.HOST, number=2)) == [MoveEnd.NO_ROOM]
    for each in held:
        world.rig.segments.unpin(each)


@pytest.mark.parametrize("target", [Tier.NVME, Tier.HOST])
def test_a_move_that_a_broken_store_refuses_has_failed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, target: Tier
) -> None:
    def is_away(_: object) -> list[SlotHandle]:
        raise TierBrokenError("it does not answer", tier=Tier.NVME)

    with tiered_rig(tmp_path, host_blocks=96) as rig:
        cold = rig.segments.cold
        assert cold is not None
        if target is Tier.NVME:
            monkeypatch.setattr(cold, "reserve", is_away)
        world = World(rig)
        segment = max(world.segments, key=lambda each: each.room_blocks)
        if target is Tier.HOST:
            assert world.ends(world.command(segment, Tier.NVME)) == [MoveEnd.DONE]
            monkeypatch.setattr(cold, "submit", is_away)
        (ended,) = world.carry_out(world.command(segment, target, number=2))
        assert ended.outcome.end is MoveEnd.FAILED
        assert ended.outcome.error_reason == {Tier.NVME: "TIER_BROKEN", Tier.HOST: "SLAB_UNAVAILABLE"}[target]
        monkeypatch.undo()
        rig.pool.check_integrity()


def test_demotion_into_a_full_store_finds_no_room(tmp_path: Path) -> None:
    with tiered_rig(tmp_path, host_blocks=96, units=1) as rig:
        cold = rig.segments.cold
        assert cold is not None
        free_blocks = cold.statistics().free_bytes // rig.pool.layout.block_bytes
        taken = cold.reserve([16] * (free_blocks // 16 * rig.pool.layout.layers))
        world = World(rig)
        segment = max(world.segments, key=lambda each: each.room_blocks)
        assert world.ends(world.command(segment, Tier.NVME)) == [MoveEnd.NO_ROOM]
        cold.release(taken)
        rig.pool.check_integrity()


def test_idle_segments_alone_are_evicted_oldest_first_within_the_bound(world: World) -> None:
    block_bytes = world.rig.pool.layout.block_bytes
    newest_ns = max(each.used_ns for each in world.segments)
    nothing = EvictionBounds(newest_ns, idle_ns=LONG_NS)
    assert evict_cold(world.rig.pool, nothing, timeout_ns=LONG_NS) == Evicted(0, 0)
    oldest = min(world.segments, key=lambda each: (each.used_ns, each.id))
    one = EvictionBounds(newest_ns + LONG_NS, LONG_NS, size_bytes=oldest.room_blocks * block_bytes)
    assert evict_cold(world.rig.pool, one, timeout_ns=LONG_NS) == Evicted(1, oldest.room_blocks * block_bytes)
    assert oldest.tiers == {Tier.NVME}
    rest = evict_cold(world.rig.pool, EvictionBounds(newest_ns), timeout_ns=LONG_NS)
    assert rest.segments == len(world.segments) - 1
    assert all(each.tiers == {Tier.NVME} for each in world.segments)
    world.rig.engine.check_integrity()
    assert world.rig.answer(world.prompt)[0] == world.expected


def test_what_a_store_does_not_answer_for_stays_and_what_finds_no_room_goes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with tiered_rig(tmp_path, host_blocks=96) as rig:
        cold = rig.segments.cold
        assert cold is not None
        reserve = cold.reserve

        def is_away(blocks: Sequence[int]) -> list[SlotHandle]:
            raise TierBrokenError("it does not answer", tier=Tier.NVME)

        monkeypatch.setattr(cold, "reserve", is_away)
        expected = rig.answer(prompt_tokens(1, 600))[0]
        segments = rig.segments.sealed()
        everything = EvictionBounds(max(each.used_ns for each in segments))
        assert evict_cold(rig.pool, everything, timeout_ns=LONG_NS) == Evicted(0, 0)
        assert {each.tiers for each in segments} == {frozenset({Tier.HOST})}
        tokens, finished = rig.answer(prompt_tokens(1, 600))
        assert tokens == expected
        assert finished.statistics.cached_tokens[Tier.HOST] > 0
        monkeypatch.setattr(cold, "reserve", reserve)
        taken = cold.reserve([16] * rig.pool.layout.layers * 8)
        everything = EvictionBounds(max(each.used_ns for each in rig.segments.sealed()))
        assert evict_cold(rig.pool, everything, timeout_ns=LONG_NS).segments > 0
        assert rig.segments.sealed() == []
        cold.release(taken)
        rig.engine.check_integrity()


def test_what_is_wanted_before_it_was_written_stays_in_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with tiered_rig(tmp_path, host_blocks=96) as rig:
        cold = rig.segments.cold
        assert cold is not None
        poll = cold.poll
        monkeypatch.setattr(cold, "poll", list)
        prompt = prompt_tokens(1, 600)
        expected = rig.answer(prompt)[0]
        segments = rig.segments.sealed()
        assert any(each.is_copied for each in segments)
        evict_cold(rig.pool, EvictionBounds(max(each.used_ns for each in segments)), timeout_ns=0)
        assert any(rig.pool.placer.is_asked(each.id) for each in segments)
        answer = rig.engine.generate(Request(prompt=tuple(prompt), sampling=SamplingParameters(max_new_tokens=16)))
        next(answer)
        used = [each for each in segments if each.pins]
        assert used
        monkeypatch.setattr(cold, "poll", poll)
        for _ in answer:
            rig.pool.placer.settle(LONG_NS)
            assert all(Tier.HOST in each.tiers for each in used)
        assert not any(rig.pool.placer.is_asked(each.id) for each in used)
        assert rig.answer(prompt)[0] == expected


def test_without_a_cold_store_documents_lose_their_ends_first() -> None:
    rig = make_rig()
    rig.answer(prompt_tokens(1, 1400))
    segments = sorted(rig.segments.sealed(), key=lambda each: each.id)
    last = segments[-1]
    size_bytes = last.room_blocks * rig.pool.layout.block_bytes
    bounds = EvictionBounds(last.used_ns, size_bytes=size_bytes)
    evicted = evict_cold(rig.pool, bounds, timeout_ns=LONG_NS)
    for each in rig.segments.sealed():
        assert each.parent is None or rig.segments.find(each.parent) is not None, "what stays can be found"
    assert evicted.size_bytes <= size_bytes
    assert evict_cold(rig.pool, EvictionBounds(last.used_ns), timeout_ns=LONG_NS).segments > 0
    rig.check_idle()
