"""Segments that continue others, where these are given up."""

from __future__ import annotations

from tests.unit.policy.test_placement import HOST, NVME, World, dropped

from h3kv.core.types import SegmentId
from h3kv.policy.placement import MoveFailed, RoomNeeded, RoomReported


def test_what_continues_a_segment_on_nvme_goes_with_it_where_nothing_else_may_go() -> None:
    world = World(host=48, nvme=96)
    world.seal(1, tiers=[NVME], pins=1)
    world.seal(2, tiers=[NVME], pins=1)
    world.seal(3)
    world.tell(MoveFailed(SegmentId(3), NVME))
    world.seal(4, tiers=[NVME], parent=3)
    world.seal(5, tiers=[NVME], parent=4)
    plan = world.tell(RoomReported(HOST, 48, 0), RoomReported(NVME, 48, 0), RoomNeeded(HOST, 16))
    assert plan == (dropped(5, NVME), dropped(4, NVME), dropped(3, HOST))
