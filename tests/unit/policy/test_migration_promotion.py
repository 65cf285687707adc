from tests.unit.policy.migration_world import DEVICE, HOST, NVME, SIZE, WORKER, World, moves

from h3kv.core.types import SegmentId
from h3kv.policy.migration_config import DEVICE_HOST, HOST_NVME
from h3kv.policy.migration_state import (
    HoldReason,
    MoveReason,
    Plan,
    Touch,
    TouchesReported,
)


def test_a_touched_segment_is_promoted_while_there_is_room() -> None:
    world = World()
    world.room(HOST, used=0)
    world.put(1, 2, tiers=[NVME])
    assert moves(world.touch(1)) == [(1, NVME, HOST, MoveReason.ROOM)]


def test_a_read_below_the_mass_of_a_touch_promotes_nothing() -> None:
    world = World(touch_mass_min=0.01)
    world.room(HOST, used=0)
    world.put(1, tiers=[NVME])
    plan = world.touch(1, mass=0.009)
    assert plan == Plan((), {HoldReason.BELOW_THRESHOLD: 1})


def test_the_last_fifteen_percent_must_be_earned() -> None:
    world = World()
    world.put(1, 2, tiers=[NVME])
    world.room(HOST, used=840)
    assert moves(world.touch(1)) == [(1, NVME, HOST, MoveReason.ROOM)]
    world.room(HOST, used=841)
    assert world.touch(2) == Plan((), {HoldReason.FEW_TOUCHES: 1})


def test_three_touches_in_a_row_displace_the_coldest() -> None:
    world = World()
    world.put(8)
    world.wait(300)
    world.put(9)
    world.wait(600)
    world.put(1, tiers=[NVME])
    world.room(HOST, used=900)
    assert moves(world.touch(1)) == []
    assert moves(world.touch(1)) == []
    (victim,) = world.touch(1).commands
    assert moves(Plan((victim,))) == [(8, HOST, NVME, MoveReason.DISPLACED)]
    assert moves(world.end(victim)) == [(1, NVME, HOST, MoveReason.EARNED)]
    assert world.state.claims == {}


def test_touches_with_a_tick_between_them_are_not_in_a_row() -> None:
    world = World()
    world.put(9)
    world.wait(900)
    world.put(1, tiers=[NVME])
    world.room(HOST, used=900)
    for _ in range(3):
        world.touch(1)
        assert moves(world.touch()) == []


def test_touches_reported_twice_for_a_tick_count_once() -> None:
    world = World()
    world.put(9)
    world.wait(900)
    world.put(1, tiers=[NVME])
    world.room(HOST, used=900)
    world.touch(1)
    touches = TouchesReported(WORKER, world.tick, (Touch(SegmentId(1), 0.5),))
    assert world.tell(touches, touches, touches).commands == ()
    assert world.state.segments[world.segment(1)].touches_in_row == 1


def test_nothing_goes_for_a_segment_that_is_not_hotter_by_the_margin() -> None:
    world = World(displace_margin=2.0)
    world.put(9)
    world.put(1, tiers=[NVME])
    world.room(HOST, used=900)
    world.touch(1)
    world.touch(1)
    assert world.touch(1) == Plan((), {HoldReason.NOT_HOTTER: 1})


def test_a_large_segment_displaces_as_many_as_its_size_asks_for_or_none() -> None:
    world = World()
    world.put(8, 9)
    world.wait(900)
    world.put(1, tiers=[NVME], size=2 * SIZE)
    world.put(2, tiers=[NVME], size=5 * SIZE)
    world.room(HOST, used=900)
    for _ in range(2):
        world.touch(1, 2)
    plan = world.touch(2)
    assert plan == Plan((), {HoldReason.NOT_HOTTER: 1})
    for _ in range(2):
        world.touch(1)
    victims = world.touch(1).commands
    assert [each.segment for each in victims] == [8, 9]
    assert moves(world.end(victims[0])) == []
    assert moves(world.end(victims[1])) == [(1, NVME, HOST, MoveReason.EARNED)]


def test_a_place_is_not_taken_when_the_room_for_it_was_not_made() -> None:
    world = World()
    world.put(9)
    world.wait(900)
    world.put(1, tiers=[NVME])
    world.room(HOST, used=900)
    for _ in range(3):
        plan = world.touch(1)
    (victim,) = plan.commands
    assert world.end(victim, error="SLAB_BUSY") == Plan((), {HoldReason.FAILED: 1, HoldReason.ROOM_LOST: 1})
    assert world.state.claims == {}


def test_the_hottest_is_promoted_first() -> None:
    world = World(commands_in_flight_max=1)
    world.room(HOST, used=0)
    world.put(1, 2, tiers=[NVME])
    world.wait(20)
    world.room(HOST, used=1_000)
    world.touch(2)
    world.wait(20)
    world.room(HOST, used=0)
    plan = world.touch(1, 2)
    assert moves(plan) == [(2, NVME, HOST, MoveReason.ROOM)]
    assert plan.held == {HoldReason.COMMANDS_MAX: 1}


def test_pairs_that_are_off_move_nothing() -> None:
    world = World(pairs=(HOST_NVME,))
    world.room(DEVICE, used=0)
    world.put(1, tiers=[HOST])
    assert world.touch(1) == Plan()
    world = World(pairs=(DEVICE_HOST, HOST_NVME))
    world.room(DEVICE, used=0)
    world.put(1, tiers=[HOST])
    assert moves(world.touch(1)) == [(1, HOST, DEVICE, MoveReason.ROOM)]


def test_a_tier_whose_room_is_not_known_takes_nothing() -> None:
    world = World()
    world.put(1, tiers=[NVME])
    assert world.touch(1) == Plan((), {HoldReason.ROOM_UNKNOWN: 1})
