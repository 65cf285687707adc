import pytest

from h3kv.core.errors import StaleHandleError
from h3kv.core.types import SlotHandle, Tier
from h3kv.memory.leases import OWNER, LeasedRoom, LeaseTable, check_current
from h3kv.memory.region_format import make_table


def test_units_are_leased_all_or_none_and_the_lowest_first() -> None:
    leases = LeaseTable(make_table(64))
    assert leases.lease(2, 3) == [0, 1, 2]
    assert leases.lease(3, 2) is None
    assert leases.free_units == 1
    leases.give_back(2, [1])
    assert leases.lease(3, 2) == [1, 3]
    assert (leases.units_of(2), leases.units_of(3), leases.holders) == ([0, 2], [1, 3], {2, 3})
    leases.check_integrity()


@pytest.mark.parametrize("units", [[2], [-1], [4], [0, 2], [0, 0]])
def test_units_that_are_not_the_holders_are_not_taken(units: list[int]) -> None:
    leases = LeaseTable(make_table(64))
    leases.lease(2, 2)
    leases.lease(OWNER, 1)
    with pytest.raises(StaleHandleError):
        leases.give_back(2, units)
    assert (leases.units_of(2), leases.units_of(OWNER), leases.free_units) == ([0, 1], [2], 1)
    leases.check_integrity()


def test_slots_of_a_holder_that_died_are_stale_and_stay_so() -> None:
    table = make_table(32)
    leases = LeaseTable(table)
    room = LeasedRoom(Tier.HOST, table, lambda units: leases.lease(2, units) or [])
    first = room.reserve([4, 8]) or []
    assert leases.reclaim(2) == [0]
    with pytest.raises(StaleHandleError):
        room.validate(first[0])
    other = LeasedRoom(Tier.HOST, table, lambda units: leases.lease(3, units) or [])
    second = other.reserve([4, 8]) or []
    assert [handle.slot for handle in second] == [handle.slot for handle in first]
    for handle in first:
        with pytest.raises(StaleHandleError):
            check_current(table, handle)
    other.release(second)
    assert leases.lease(4, 1) == [1]
    leases.give_back(3, other.take_spare(0))
    leases.check_integrity()


@pytest.mark.parametrize(
    "handle",
    [
        SlotHandle(Tier.HOST, -1, 1, 0),
        SlotHandle(Tier.HOST, 32, 1, 0),
        SlotHandle(Tier.HOST, 1 << 70, 1, 0),
        SlotHandle(Tier.HOST, 1, 1, 0),
        SlotHandle(Tier.HOST, 0, 0, 0),
        SlotHandle(Tier.HOST, 0, 4, 1),
        SlotHandle(Tier.HOST, 0, 8, 0),
    ],
)
def test_made_up_handles_are_refused(handle: SlotHandle) -> None:
    table = make_table(32)
    leases = LeaseTable(table)
    room = LeasedRoom(Tier.HOST, table, lambda units: leases.lease(2, units) or [])
    assert room.reserve([4]) == [SlotHandle(Tier.HOST, 0, 4, 0)]
    with pytest.raises(StaleHandleError):
        check_current(table, handle)


def test_room_that_was_leased_ahead_is_divided_without_asking_again() -> None:
    table = make_table(64)
    leases = LeaseTable(table)
    asked: list[int] = []

    def more(units: int) -> list[int]:
        asked.append(units)
        return leases.lease(2, units) or []

    room = LeasedRoom(Tier.HOST, table, more)
    assert room.top_up(3)
    assert room.top_up(2)
    assert room.reserve([16, 16, 8]) is not None
    assert asked == [3]
    assert room.reserve([16, 16]) is None
    assert room.used_blocks == 40
    room.check_integrity()
    leases.check_integrity()
