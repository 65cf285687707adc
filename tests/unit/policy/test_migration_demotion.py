from tests.unit.policy.migration_world import HOST, NVME, WORKER, World, moves

from h3kv.core.units import NS_PER_S
from h3kv.policy.migration_state import (
    HoldReason,
    JitterReported,
    MoveReason,
    Plan,
)


def test_idle_segments_leave_an_unsteady_tier_the_coldest_first() -> None:
    world = World()
    world.put(1)
    world.wait(1)
    world.put(2)
    world.wait(5)
    world.room(HOST, used=920)
    jitter = JitterReported(WORKER, HOST, 25.1)
    assert world.tell(jitter) == Plan((), {HoldReason.NOT_IDLE: 2})
    world.now_ns += 5 * NS_PER_S
    assert moves(world.tell(jitter)) == [(1, HOST, NVME, MoveReason.JITTER), (2, HOST, NVME, MoveReason.JITTER)]


def test_jitter_up_to_its_bound_moves_nothing() -> None:
    world = World()
    world.put(1)
    world.wait(11)
    world.room(HOST, used=920)
    assert world.tell(JitterReported(WORKER, HOST, 25.0)) == Plan()


def test_jitter_does_not_empty_a_tier() -> None:
    world = World(jitter_used_fraction_min=0.9)
    world.put(1, 2, 3)
    world.wait(11)
    world.room(HOST, used=920)
    assert len(world.tell(JitterReported(WORKER, HOST, 100.0)).commands) == 2


def test_the_word_of_the_rule_about_jitter_can_be_configured() -> None:
    world = World(jitter_used_fraction_min=0.0)
    world.put(1, 2, 3)
    world.wait(11)
    world.room(HOST, used=30)
    assert len(world.tell(JitterReported(WORKER, HOST, 100.0)).commands) == 3


def test_idle_segments_leave_from_the_high_watermark_down_to_the_low_one() -> None:
    world = World(watermark_high=0.95, watermark_low=0.90)
    world.put(*range(1, 11))
    world.wait(11)
    assert moves(world.room(HOST, used=949)) == []
    plan = world.room(HOST, used=950)
    assert [each.reason for each in plan.commands] == [MoveReason.WATERMARK] * 5
    for command in plan.commands:
        world.end(command)
    assert moves(world.room(HOST, used=900)) == []
    assert moves(world.room(HOST, used=949)) == [], "it goes on above the low watermark only once the high is crossed"


def test_shrinking_goes_on_between_the_watermarks() -> None:
    world = World()
    world.put(1, pinned=True)
    world.wait(11)
    assert moves(world.room(HOST, used=960)) == []
    world.put(1)
    assert moves(world.room(HOST, used=920)) == [(1, HOST, NVME, MoveReason.WATERMARK)]


def test_pinned_segments_are_never_moved() -> None:
    world = World()
    world.put(1, pinned=True)
    world.put(2, tiers=[NVME], pinned=True)
    world.wait(900)
    assert world.room(HOST, used=1_000) == Plan((), {HoldReason.PINNED: 1})
    world.room(HOST, used=0)
    assert world.touch(2) == Plan((), {HoldReason.PINNED: 1})
    world.room(HOST, used=900)
    world.put(3, tiers=[NVME])
    for _ in range(3):
        plan = world.touch(3)
    assert plan == Plan((), {HoldReason.NOT_HOTTER: 1})


def test_what_lies_in_both_tiers_is_given_up_for_nothing() -> None:
    world = World(demote_bytes_per_tick=1)
    world.put(1, 2, 3, tiers=[HOST, NVME])
    world.wait(11)
    plan = world.room(HOST, used=950)
    assert [each.moved_bytes for each in plan.commands] == [0, 0, 0]


def test_nothing_is_demoted_into_a_full_tier() -> None:
    world = World()
    world.room(NVME, used=995)
    world.put(1)
    world.wait(11)
    assert world.room(HOST, used=1_000) == Plan((), {HoldReason.TARGET_FULL: 1})
