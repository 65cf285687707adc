"""Units of one region, leased to holders that come, go and die, while the owner is restarted now and then."""

from collections.abc import Callable, Collection

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, multiple, rule

from h3kv.core.errors import StaleHandleError
from h3kv.core.types import SlotHandle, Tier
from h3kv.memory.leases import LeasedRoom, LeaseTable, check_current
from h3kv.memory.region_format import make_table, validate_table

UNITS = 5
HOLDERS = st.integers(1, 4)

Owned = tuple[int, SlotHandle]
"""A slot and who reserved it."""


class Leases(RuleBasedStateMachine):
    live = Bundle("live")
    stale = Bundle("stale")

    def __init__(self) -> None:
        super().__init__()
        self.table = make_table(16 * UNITS)
        self.leases = LeaseTable(self.table)
        self.rooms: dict[int, LeasedRoom] = {}
        self.expected: dict[int, set[SlotHandle]] = {}
        self.dead: set[SlotHandle] = set()

    def room(self, holder: int) -> LeasedRoom:
        self.expected.setdefault(holder, set())
        if holder not in self.rooms:
            self.rooms[holder] = LeasedRoom(Tier.HOST, self.table, self.more(holder))
        return self.rooms[holder]

    def more(self, holder: int) -> Callable[[int], Collection[int]]:
        return lambda units: self.leases.lease(holder, units) or []

    @rule(target=live, holder=HOLDERS, sizes=st.lists(st.integers(1, 16), max_size=4))
    def reserve(self, holder: int, sizes: list[int]) -> object:
        room = self.room(holder)
        free_before = room.free_blocks
        handles = room.reserve(sizes)
        if handles is None:
            # Rounded to classes, they exceed what whole free units and broken ones surely hold.
            assert sum(sizes) * 2 + 16 * len(sizes) > free_before
            return multiple()
        self.expected[holder] |= set(handles)
        return multiple(*((holder, handle) for handle in handles))

    @rule(target=stale, owned=consumes(live))
    def release(self, owned: Owned) -> SlotHandle:
        holder, handle = owned
        if handle in self.dead:
            return handle
        self.rooms[holder].release([handle])
        self.expected[holder].remove(handle)
        self.dead.add(handle)
        return handle

    @rule(holder=HOLDERS, keep=st.integers(0, 2))
    def give_spare_units_back(self, holder: int, keep: int) -> None:
        room = self.room(holder)
        spare = room.take_spare(keep)
        self.leases.give_back(holder, spare)
        assert room.free_units <= keep

    @rule(holder=HOLDERS, units=st.integers(0, 3))
    def top_up(self, holder: int, units: int) -> None:
        room = self.room(holder)
        missing = max(0, units - room.free_units)
        enough = missing <= self.leases.free_units
        assert room.top_up(units) == enough

    @rule(holder=HOLDERS)
    def holder_dies(self, holder: int) -> None:
        units = sorted(self.room(holder).units)
        assert self.leases.reclaim(holder) == units
        self.dead |= self.expected.pop(holder, set())
        del self.rooms[holder]

    @rule(holder=HOLDERS)
    def holder_dies_while_others_may_write_for_it(self, holder: int) -> None:
        free = self.leases.free_units
        units = self.leases.retire(holder)
        self.dead |= self.expected.pop(holder, set())
        self.rooms.pop(holder, None)
        assert self.leases.free_units == free
        self.leases = LeaseTable(self.table)
        self.leases.check_integrity()
        assert self.leases.settle_all() == units

    @rule()
    def owner_is_restarted(self) -> None:
        validate_table(self.table, name="the table")
        self.leases = LeaseTable(self.table)

    @rule(holder=HOLDERS, other=HOLDERS)
    def nobody_gives_back_what_another_has(self, holder: int, other: int) -> None:
        units = self.leases.units_of(other)
        if holder != other and units:
            with pytest.raises(StaleHandleError):
                self.leases.give_back(holder, units)

    @rule(handle=stale)
    def stale_handles_are_refused(self, handle: SlotHandle) -> None:
        with pytest.raises(StaleHandleError):
            check_current(self.table, handle)

    @invariant()
    def table_knows_exactly_the_live_slots(self) -> None:
        self.leases.check_integrity()
        for room in self.rooms.values():
            room.check_integrity()
        handles = {handle.slot: handle for each in self.expected.values() for handle in each}
        begun = np.flatnonzero(self.table["blocks"]).tolist()
        assert begun == sorted(handles)
        for handle in handles.values():
            check_current(self.table, handle)
        for handle in self.dead:
            with pytest.raises(StaleHandleError):
                check_current(self.table, handle)
        for holder, room in self.rooms.items():
            assert self.leases.units_of(holder) == sorted(room.units)
            assert {handle.slot // 16 for handle in self.expected[holder]} <= room.units


TestLeases = Leases.TestCase
TestLeases.settings = settings(max_examples=60, stateful_step_count=40)
