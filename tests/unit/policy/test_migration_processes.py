from dataclasses import replace

import pytest
from tests.unit.policy.migration_world import DEVICE, HOST, NVME, SIZE, WORKER, World

from h3kv.core.errors import ConfigError
from h3kv.core.types import SegmentId
from h3kv.policy.migration_config import HOST_NVME, MigrationConfig, TierPair
from h3kv.policy.migration_state import (
    HoldReason,
    Owner,
    OwnerJoined,
    OwnerLeft,
    Plan,
    SegmentGone,
    SegmentReported,
)


def test_a_new_boot_token_makes_the_old_segments_vanish_until_they_are_reported_again() -> None:
    world = World()
    world.room(HOST, used=0)
    world.put(1, tiers=[NVME])
    world.touch(1)
    reborn = Owner(WORKER.name, "boot-2")
    world.tell(OwnerJoined(reborn))
    state = world.state
    assert (state.segments, state.commands, state.rooms, dict(state.lying)) == ({}, {}, {}, {HOST: {}})
    assert world.touch(1) == Plan((), {HoldReason.UNKNOWN_OWNER: 1})
    world.tell(SegmentReported(reborn, SegmentId(1), 1, SIZE, frozenset({NVME})))
    assert world.segment(1) in world.state.segments


def test_joining_again_under_the_same_boot_token_changes_nothing() -> None:
    world = World()
    world.put(1)
    before = world.state
    world.tell(OwnerJoined(WORKER))
    assert world.state == before


def test_a_process_that_leaves_takes_its_segments_along() -> None:
    world = World()
    world.put(1)
    world.tell(OwnerLeft(Owner(WORKER.name, "boot-0")))
    assert world.segment(1) in world.state.segments, "a late word about an earlier life"
    world.tell(OwnerLeft(WORKER))
    assert (world.state.segments, world.state.owners) == ({}, {})


def test_a_segment_that_is_gone_takes_its_command_along() -> None:
    world = World()
    world.room(HOST, used=0)
    world.put(1, tiers=[NVME])
    world.touch(1)
    world.tell(SegmentGone(WORKER, SegmentId(1)))
    assert (world.state.segments, world.state.commands) == ({}, {})


def test_the_table_of_segments_is_bounded() -> None:
    world = World(segments_max=2, owners_max=1)
    world.put(1, 2, 3)
    assert len(world.state.segments) == 2
    plan = world.tell(OwnerJoined(Owner("nvme_io", "boot-1")))
    assert plan.held == {HoldReason.TABLE_FULL: 1}


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("tick_ns", 0),
        ("promote_free_fraction_min", 1.5),
        ("watermark_low", 0.96),
        ("displace_margin", 0.5),
        ("promote_bytes_per_tick", 0),
        ("hysteresis_ns", -1),
        ("pairs", (TierPair(HOST, DEVICE),)),
        ("pairs", (HOST_NVME, HOST_NVME)),
    ],
)
def test_a_threshold_that_no_rule_can_work_with_is_refused_by_name(field: str, value: object) -> None:
    with pytest.raises(ConfigError, match=field) as caught:
        replace(MigrationConfig(), **{field: value})
    assert caught.value.field == field
