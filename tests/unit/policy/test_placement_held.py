"""Segments that a pinned document wants to stay."""

from tests.unit.policy.test_placement import HOST, NVME, World, dropped, placed

from h3kv.core.types import SegmentId
from h3kv.policy.placement import RoomNeeded, RoomReported, SegmentHeld, SegmentLetGo


def test_held_segment_leaves_host_but_not_its_last_tier() -> None:
    world = World(host=32, nvme=32)
    world.seal(1)
    world.tell(placed(1), SegmentHeld(SegmentId(1)))
    world.seal(2)
    world.tell(placed(2))
    assert world.tell(RoomNeeded(HOST, 32)) == (dropped(1, HOST), dropped(2, HOST))
    world.tell(RoomNeeded(HOST, 0), RoomReported(HOST, 32, 32), RoomReported(NVME, 32, 0))
    assert world.tell(RoomNeeded(NVME, 16)) == (dropped(2, NVME),)
    world.tell(RoomReported(NVME, 32, 16))
    assert world.tell(RoomNeeded(NVME, 32)) == ()
    assert world.tell(SegmentLetGo(SegmentId(1))) == (dropped(1, NVME),)


def test_what_a_held_segment_continues_stays_too() -> None:
    world = World(host=32, nvme=None)
    world.seal(1)
    world.seal(2, parent=1)
    world.tell(SegmentHeld(SegmentId(2)))
    assert world.tell(RoomNeeded(HOST, 16)) == ()
    assert world.tell(SegmentLetGo(SegmentId(2))) == (dropped(2, HOST),)
