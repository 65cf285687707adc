from tests.unit.policy.migration_world import HOST, NVME, SIZE, TICK_NS, WORKER, World, moves

from h3kv.core.types import SegmentId
from h3kv.core.units import NS_PER_S
from h3kv.policy.migration_state import (
    Command,
    CommandId,
    HoldReason,
    MoveReason,
    Plan,
    SegmentReported,
    Touch,
    TouchesReported,
)


def test_what_was_promoted_stays_for_ten_seconds() -> None:
    world = World(eviction_threshold_ns=0)
    world.room(HOST, used=0)
    world.put(1, tiers=[NVME])
    (command,) = world.touch(1).commands
    world.end(command)
    world.now_ns += 10 * NS_PER_S - 1
    assert world.room(HOST, used=1_000).held == {HoldReason.HYSTERESIS: 1}
    world.now_ns += 1
    assert moves(world.room(HOST, used=1_000)) == [(1, HOST, NVME, MoveReason.WATERMARK)]


def test_what_was_demoted_stays_away_for_ten_seconds() -> None:
    world = World()
    world.put(1)
    world.wait(11)
    (command,) = world.room(HOST, used=950).commands
    world.end(command)
    world.room(HOST, used=0)
    world.now_ns += 9 * NS_PER_S
    assert world.touch(1) == Plan((), {HoldReason.HYSTERESIS: 1})
    world.wait(1)
    assert moves(world.touch(1)) == [(1, NVME, HOST, MoveReason.ROOM)]


def test_what_the_data_plane_sent_away_is_not_fetched_back_at_once() -> None:
    world = World()
    world.room(HOST, used=0)
    world.put(1)
    world.put(1, tiers=[NVME])
    assert world.touch(1) == Plan((), {HoldReason.HYSTERESIS: 1})


def test_a_tick_moves_no_more_bytes_than_its_budget() -> None:
    world = World(promote_bytes_per_tick=25)
    world.room(HOST, used=0)
    world.put(1, 2, 3, 4, 5, tiers=[NVME])
    plan = world.touch(1, 2, 3)
    assert len(plan.commands) == 2
    assert plan.held == {HoldReason.BUDGET: 1}
    assert world.tell(TouchesReported(WORKER, world.tick, (Touch(SegmentId(4), 1.0),))).held == {HoldReason.BUDGET: 1}
    assert len(world.touch(3, 4).commands) == 2


def test_directions_have_budgets_of_their_own() -> None:
    world = World(promote_bytes_per_tick=10, demote_bytes_per_tick=20)
    world.put(1, 2, 3)
    world.put(4, 5, tiers=[NVME])
    world.wait(11)
    world.room(HOST, used=800)
    assert len(world.touch(4, 5).commands) == 1
    plan = world.room(HOST, used=960)
    assert len(plan.commands) == 2
    assert plan.held == {HoldReason.BUDGET: 1}


def test_a_segment_larger_than_the_budget_takes_those_of_the_ticks_after_it() -> None:
    world = World(promote_bytes_per_tick=4)
    world.room(HOST, used=0)
    world.put(1, 2, tiers=[NVME])
    assert len(world.touch(1, 2).commands) == 1
    assert len(world.touch(2).commands) == 0
    assert world.touch(2).held == {HoldReason.BUDGET: 1}
    assert len(world.touch(2).commands) == 1


def test_a_command_is_not_repeated_while_it_is_under_way() -> None:
    world = World()
    world.room(HOST, used=0)
    world.put(1, tiers=[NVME])
    assert len(world.touch(1).commands) == 1
    assert world.touch(1) == Plan((), {HoldReason.IN_FLIGHT: 1})


def test_a_command_is_forgotten_at_its_deadline_and_its_segment_counts_as_moved() -> None:
    world = World()
    world.room(HOST, used=0)
    world.put(1, tiers=[NVME])
    (command,) = world.touch(1).commands
    assert command.deadline_ns == world.now_ns + 2 * NS_PER_S
    world.now_ns = command.deadline_ns - 1
    assert world.tell().held == {}
    world.now_ns += TICK_NS
    assert world.tell().held == {HoldReason.EXPIRED: 1}
    assert world.state.commands == {}
    assert world.end(command) == Plan((), {HoldReason.UNKNOWN_COMMAND: 1})
    assert len(world.touch(1).commands) == 1, "it still lies where it lay, by its owner's word"


def test_the_end_of_a_command_counts_once() -> None:
    world = World()
    world.room(HOST, used=0)
    world.put(1, tiers=[NVME])
    (command,) = world.touch(1).commands
    world.end(command)
    before = world.state
    assert world.end(command) == Plan((), {HoldReason.UNKNOWN_COMMAND: 1})
    assert world.state == before


def test_a_move_that_failed_is_not_tried_again_at_once() -> None:
    world = World()
    world.room(HOST, used=0)
    world.put(1, tiers=[NVME])
    (command,) = world.touch(1).commands
    assert world.end(command, error="TIER_FULL") == Plan((), {HoldReason.FAILED: 1})
    assert world.touch(1) == Plan((), {HoldReason.HYSTERESIS: 1})
    world.wait(10)
    assert len(world.touch(1).commands) == 1


def test_a_command_names_all_that_makes_it_act_once() -> None:
    world = World()
    world.room(HOST, used=0)
    world.tell(SegmentReported(WORKER, SegmentId(7), 42, SIZE, frozenset({NVME})))
    (command,) = world.touch(7).commands
    assert command == Command(
        id=CommandId(1),
        owner=WORKER,
        segment=SegmentId(7),
        generation=42,
        source=NVME,
        target=HOST,
        size_bytes=SIZE,
        moved_bytes=SIZE,
        deadline_ns=world.now_ns + 2 * NS_PER_S,
        reason=MoveReason.ROOM,
    )
