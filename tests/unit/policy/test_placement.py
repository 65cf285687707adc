from collections.abc import Iterable
from dataclasses import replace

from h3kv.core.types import SegmentId, Tier
from h3kv.policy.placement import (
    Copy,
    Drop,
    Event,
    MoveAsked,
    MoveFailed,
    MoveNotAsked,
    PlacementConfig,
    PlacementState,
    Plan,
    RoomNeeded,
    RoomReported,
    SegmentAppeared,
    SegmentGone,
    SegmentLeft,
    SegmentPinned,
    SegmentPlaced,
    SegmentTouched,
    SegmentUnpinned,
    step,
)

HOST, NVME = Tier.HOST, Tier.NVME
BOTH = frozenset({HOST, NVME})


class World:
    """A policy, and an executor that carries out each drop at once and each copy when a test says so."""

    def __init__(self, *, host: int = 64, nvme: int | None = 256, headroom: int = 0, write_behind: bool = True) -> None:
        config = PlacementConfig(has_nvme=nvme is not None, write_behind=write_behind, host_free_blocks_min=headroom)
        self.state = PlacementState(config)
        self.tell(RoomReported(HOST, host, host))
        if nvme is not None:
            self.tell(RoomReported(NVME, nvme, nvme))

    def tell(self, *events: Event) -> Plan:
        self.state, plan = step(self.state, events, self.state.now_ns + 1)
        again, nothing = step(self.state, (), self.state.now_ns)
        assert again == self.state
        assert nothing == ()
        return plan

    def seal(
        self,
        segment: int,
        blocks: int = 16,
        *,
        parent: int | None = None,
        tiers: Iterable[Tier] = (HOST,),
        pins: int = 0,
    ) -> Plan:
        above = None if parent is None else SegmentId(parent)
        events: list[Event] = [SegmentAppeared(SegmentId(segment), above, blocks, frozenset(tiers))]
        for tier in tiers:
            room = self.state.rooms[tier]
            events.append(RoomReported(tier, room.capacity_blocks, room.free_blocks - blocks))
        return self.tell(*events, *[SegmentPinned(SegmentId(segment))] * pins)

    def free(self, tier: Tier) -> int:
        return self.state.rooms[tier].free_blocks


def written(segment: int, reason: str = "write_behind") -> Copy:
    return Copy(SegmentId(segment), HOST, NVME, reason)


def dropped(segment: int, tier: Tier) -> Drop:
    return Drop(SegmentId(segment), tier, "room")


def placed(segment: int, tier: Tier = NVME) -> SegmentPlaced:
    return SegmentPlaced(SegmentId(segment), tier)


def pinned(segment: int) -> SegmentPinned:
    return SegmentPinned(SegmentId(segment))


def touched(segment: int) -> SegmentTouched:
    return SegmentTouched(SegmentId(segment))


def asked(segment: int, target: Tier = NVME) -> MoveAsked:
    return MoveAsked(SegmentId(segment), target, "watermark")


# Writing behind


def test_sealed_segments_are_written_oldest_first_and_two_at_a_time() -> None:
    world = World()
    assert world.seal(1) == (written(1),)
    assert world.seal(2) == (written(2),)
    assert world.seal(3) == ()
    assert world.seal(4, 1) == ()
    assert world.tell(touched(4), touched(3)) == ()
    assert world.tell(placed(2)) == (written(3),)
    assert world.tell(placed(1), placed(3)) == (written(4),)
    assert world.tell(placed(4)) == ()
    assert all(each.tiers == BOTH for each in world.state.segments.values())


def test_segment_that_was_restored_is_not_written_again() -> None:
    assert World().seal(1, tiers=[NVME]) == ()


def test_failed_write_waits_until_the_segment_is_used_again() -> None:
    world = World()
    world.seal(1)
    assert world.tell(MoveFailed(SegmentId(1), NVME)) == ()
    assert world.tell(RoomReported(HOST, 64, 48)) == ()
    assert world.tell(touched(1)) == (written(1),)


def test_without_write_behind_or_cold_store_nothing_is_written() -> None:
    assert World(write_behind=False).seal(1) == ()
    assert World(nvme=None).seal(1) == ()


def test_segment_that_went_while_it_was_written_frees_its_place() -> None:
    world = World()
    world.seal(1)
    world.seal(2)
    world.seal(3)
    assert world.tell(SegmentGone(SegmentId(1))) == (written(3),)
    assert world.tell(placed(1), touched(1)) == ()


# Room in HOST


def full_host(*segments: int, **options: int) -> World:
    """Written segments of 16 blocks that fill HOST."""
    world = World(host=16 * len(segments), **options)
    for segment in segments:
        world.seal(segment, tiers=[HOST, NVME])
    assert world.free(HOST) == 0
    return world


def test_room_in_host_comes_from_the_least_recently_used_that_also_lie_on_nvme() -> None:
    world = full_host(1, 2, 3)
    world.tell(touched(1))
    assert world.tell(RoomNeeded(HOST, 20)) == (dropped(2, HOST), dropped(3, HOST))
    assert world.free(HOST) == 32
    assert world.state.needs == {}


def test_pinned_segments_leave_host_last_and_stay_on_nvme() -> None:
    world = full_host(1, 2)
    world.tell(pinned(1))
    world.tell(touched(2))
    assert world.tell(RoomNeeded(HOST, 16)) == (dropped(2, HOST),)
    assert world.tell(RoomNeeded(HOST, 32)) == (dropped(1, HOST),)
    assert world.state.segments[SegmentId(1)].tiers == {NVME}
    assert world.tell(RoomReported(HOST, 32, 16)) == (), "it was taken from a running sequence only just now"
    assert world.tell(pinned(1)) == (Copy(SegmentId(1), NVME, HOST, "reuse"),)


def test_unwritten_segments_are_written_under_pressure_and_dropped_when_that_is_done() -> None:
    world = World(host=32, write_behind=False)
    world.seal(1, pins=1)
    world.seal(2)
    assert world.tell(RoomNeeded(HOST, 16)) == (written(2, "pressure"),)
    assert world.tell(touched(1)) == ()
    assert world.tell(placed(2)) == (dropped(2, HOST),)
    assert world.state.needs == {}


def test_write_that_is_under_way_is_waited_for_instead_of_another() -> None:
    world = World(host=32)
    world.seal(1)
    assert world.tell(RoomNeeded(HOST, 32)) == ()
    assert world.tell(placed(1)) == (dropped(1, HOST),)


def test_need_that_was_withdrawn_drops_nothing_later() -> None:
    world = World(host=16, write_behind=False)
    world.seal(1)
    assert world.tell(RoomNeeded(HOST, 16)) == (written(1, "pressure"),)
    assert world.tell(RoomNeeded(HOST, 0)) == ()
    assert world.tell(placed(1)) == ()


def test_without_cold_store_documents_lose_their_ends_first() -> None:
    world = World(host=48, nvme=None)
    world.seal(1)
    world.seal(2, parent=1)
    world.seal(3, parent=2)
    assert world.tell(RoomNeeded(HOST, 17)) == (dropped(3, HOST), dropped(2, HOST))


def test_without_cold_store_pinned_segments_and_those_before_them_stay() -> None:
    world = World(host=48, nvme=None)
    world.seal(1)
    world.seal(2, parent=1, pins=1)
    world.seal(3)
    assert world.tell(RoomNeeded(HOST, 32)) == ()
    assert world.state.needs == {HOST: 32}
    assert world.tell(SegmentUnpinned(SegmentId(2))) == (dropped(3, HOST), dropped(2, HOST))


def test_segments_that_cannot_be_written_are_given_up_under_pressure() -> None:
    world = World(host=32)
    world.seal(1)
    world.seal(2)
    world.tell(MoveFailed(SegmentId(1), NVME), MoveFailed(SegmentId(2), NVME))
    assert world.tell(RoomNeeded(HOST, 16)) == (dropped(1, HOST),)


def test_headroom_is_kept_free_at_the_cost_of_what_nobody_uses() -> None:
    world = World(host=64, headroom=24)
    world.seal(1, tiers=[HOST, NVME], pins=1)
    world.seal(2, tiers=[HOST, NVME])
    assert world.seal(3, tiers=[HOST, NVME]) == (dropped(2, HOST),)
    world.tell(pinned(3))
    assert world.seal(4, tiers=[HOST, NVME], pins=1) == ()


# Room on NVME


def test_room_on_nvme_comes_from_the_ends_of_old_documents() -> None:
    world = World(host=0, nvme=64)
    world.seal(1, tiers=[NVME])
    world.seal(2, parent=1, tiers=[NVME])
    world.seal(3, tiers=[NVME])
    world.seal(4, tiers=[NVME], pins=1)
    assert world.tell(RoomNeeded(NVME, 17)) == (dropped(2, NVME), dropped(1, NVME))
    assert world.tell(RoomNeeded(NVME, 64)) == ()
    assert world.tell(SegmentUnpinned(SegmentId(4))) == (dropped(3, NVME), dropped(4, NVME))


def test_beginning_stays_on_nvme_while_its_end_lies_in_host() -> None:
    world = World(nvme=32, write_behind=False)
    world.seal(1, tiers=[NVME])
    world.seal(2, parent=1)
    world.seal(3, tiers=[NVME])
    assert world.tell(RoomNeeded(NVME, 16)) == (dropped(3, NVME),)
    assert world.tell(RoomNeeded(NVME, 32)) == ()


def test_new_segment_takes_the_place_of_an_older_one_on_nvme() -> None:
    world = World(nvme=32)
    world.seal(1, tiers=[NVME])
    world.seal(2, tiers=[NVME])
    assert world.seal(3) == (dropped(1, NVME), written(3))


def test_nothing_on_nvme_goes_for_what_was_used_longer_ago() -> None:
    world = World(nvme=16)
    world.seal(1)
    world.tell(MoveFailed(SegmentId(1), NVME), RoomReported(NVME, 16, 16))
    world.seal(2, tiers=[NVME])
    world.tell(touched(1), touched(2))
    assert world.state.copies == {}
    assert world.tell(touched(1)) == (dropped(2, NVME), written(1))


def test_segment_that_made_room_on_nvme_is_not_written_again_before_it_is_used() -> None:
    """Otherwise two segments that lie in HOST would push each other out for ever."""
    world = World(nvme=16)
    world.seal(1, tiers=[HOST, NVME])
    assert world.seal(2) == (dropped(1, NVME), written(2))
    assert world.tell(placed(2)) == ()
    assert world.tell(touched(1)) == (dropped(2, NVME), written(1))


def test_segment_in_flight_and_all_before_it_stay_on_nvme() -> None:
    world = World(host=16, nvme=48)
    world.seal(1, tiers=[NVME])
    world.seal(2, parent=1, tiers=[NVME])
    assert world.tell(pinned(2)) == (Copy(SegmentId(2), NVME, HOST, "reuse"),)
    assert world.tell(SegmentUnpinned(SegmentId(2)), RoomNeeded(NVME, 32)) == ()
    assert world.tell(placed(2, HOST)) == (dropped(2, NVME),)


# Reuse


def test_pinned_segments_come_back_as_far_as_room_beyond_the_headroom_is_free() -> None:
    world = World(host=40, headroom=8)
    for segment in (1, 2, 3, 4, 5):
        world.seal(segment, 8, tiers=[NVME])
    back = tuple(Copy(SegmentId(segment), NVME, HOST, "reuse") for segment in (3, 1, 2, 5))
    assert world.tell(*(pinned(segment) for segment in (3, 1, 2, 5, 4))) == back
    assert world.free(HOST) == 8
    assert world.tell(*(placed(segment, HOST) for segment in (1, 2, 3, 5))) == ()


def test_pinned_segment_never_displaces_another_one() -> None:
    world = World(host=40, headroom=8)
    world.seal(1, tiers=[HOST, NVME])
    world.seal(2, tiers=[NVME])
    world.tell(RoomReported(HOST, 40, 23))
    assert world.tell(pinned(2)) == ()
    assert world.tell(RoomReported(HOST, 40, 24)) == (Copy(SegmentId(2), NVME, HOST, "reuse"),)


def test_room_that_is_waited_for_is_not_taken_by_reuse() -> None:
    world = World(host=32)
    world.seal(1, tiers=[NVME])
    world.tell(RoomReported(HOST, 32, 0), RoomNeeded(HOST, 32))
    assert world.tell(pinned(1), RoomReported(HOST, 32, 16)) == ()
    assert world.state.needs == {HOST: 32}
    assert world.tell(RoomReported(HOST, 32, 32)) == ()
    assert world.state.needs == {}
    assert world.tell(RoomReported(HOST, 32, 16)) == (Copy(SegmentId(1), NVME, HOST, "reuse"),)


def test_copy_that_left_is_forgotten() -> None:
    world = World()
    world.seal(1, tiers=[HOST, NVME])
    assert world.tell(SegmentLeft(SegmentId(1), NVME)) == (written(1),)
    assert world.tell(SegmentLeft(SegmentId(1), HOST)) == ()


def test_bounds_belong_to_the_state_and_may_change() -> None:
    """As when a cold store stops to take writes."""
    world = World()
    world.state = replace(world.state, config=replace(world.state.config, has_nvme=False))
    assert world.seal(1) == ()


# Moves that others ask for


def test_asked_demotion_drops_what_nvme_has_and_writes_what_it_lacks_first() -> None:
    world = World(write_behind=False)
    world.seal(1, tiers=BOTH)
    world.seal(2)
    assert world.tell(asked(1)) == (Drop(SegmentId(1), HOST, "watermark"),)
    assert world.tell(asked(2)) == (written(2, "watermark"),)
    assert list(world.state.asked) == [2]
    assert world.tell(placed(2)) == (Drop(SegmentId(2), HOST, "watermark"),)
    assert not world.state.asked
    assert world.state.segments[SegmentId(2)].tiers == {NVME}


def test_asked_demotions_wait_for_their_turn_and_end_when_they_cannot_be_done() -> None:
    world = World(write_behind=False)
    for segment in (1, 2, 3):
        world.seal(segment)
    assert world.tell(*map(asked, (1, 2, 3))) == (written(1, "watermark"), written(2, "watermark"))
    assert world.tell(MoveFailed(SegmentId(1), NVME)) == (written(3, "watermark"),)
    assert list(world.state.asked) == [2, 3]
    world.tell(MoveNotAsked(SegmentId(3)))
    world.tell(placed(3), SegmentGone(SegmentId(2)))
    assert not world.state.asked
    assert world.state.segments[SegmentId(3)].tiers == BOTH, "what began went on"


def test_demotion_finds_no_room_on_nvme_that_newer_segments_take() -> None:
    world = World(nvme=16, write_behind=False)
    world.seal(1)
    world.seal(2, tiers=BOTH)
    assert world.tell(asked(1)) == ()
    assert not world.state.asked


def test_demoted_segment_comes_back_when_a_sequence_begins_to_use_it_and_not_before() -> None:
    world = World(headroom=16)
    world.seal(1, tiers=BOTH, pins=1)
    assert world.tell(asked(1)) == (Drop(SegmentId(1), HOST, "watermark"),)
    room = RoomReported(HOST, 64, 64)
    assert world.tell(room, touched(1), SegmentUnpinned(SegmentId(1)), touched(1)) == ()
    assert world.tell(room, touched(1), pinned(1)) == (Copy(SegmentId(1), NVME, HOST, "reuse"),)


def test_asked_promotion_takes_free_room_alone_and_is_spared_by_headroom_for_a_while() -> None:
    world = World(host=32, headroom=16)
    world.seal(1, tiers=[NVME])
    world.seal(2, tiers=BOTH)
    assert world.tell(asked(1, HOST)) == (), "the headroom stays free"
    world.tell(asked(2))
    assert world.tell(RoomReported(HOST, 32, 32), asked(1, HOST)) == (Copy(SegmentId(1), NVME, HOST, "watermark"),)
    world.tell(placed(1, HOST))
    assert not world.state.asked
    assert world.tell(RoomReported(HOST, 32, 8)) == ()
    world.state = replace(world.state, now_ns=world.state.now_ns + world.state.config.hysteresis_ns)
    assert world.tell(RoomReported(HOST, 32, 8)) == (dropped(1, HOST),)


def test_room_that_is_needed_goes_before_what_was_asked_for() -> None:
    world = World(host=32)
    world.seal(1, tiers=[NVME])
    world.tell(asked(1, HOST))
    world.tell(placed(1, HOST), RoomReported(HOST, 32, 0))
    assert world.tell(RoomNeeded(HOST, 8), asked(1, HOST)) == (dropped(1, HOST),)
    assert world.tell(RoomNeeded(HOST, 64), asked(1, HOST)) == (), "nothing comes while someone waits"
    assert not world.state.asked
