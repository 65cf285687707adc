"""Room in a region that several processes share: units of 16 blocks, leased to holders, who divide them into slots.

    unit 0, holder 2                  unit 1, holder 2         unit 2, holder 0: free      unit 3, holder 3
    |  4 used |2 used|2 free|8 free   |        16 used         |                           | 1 used | ...

All state lies in the region's slot table: who holds a unit in the unit's first entry, which slots there are in the
entries where they begin. Nobody but the owner of the region writes holders; nobody but its holder writes the slots of a
unit. So an owner that was restarted reads off what was leased, and takes back what belonged to a holder that died.

A generation counts the releases of a slot at its offset, whoever releases it. It outlives holders and owners.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Final

import numpy as np

from h3kv.core.errors import StaleHandleError
from h3kv.core.types import SlotHandle, Tier
from h3kv.memory.buddy import UNIT_BLOCKS, BuddyAllocator, extent_class
from h3kv.memory.region_format import SlotTableView

NOBODY: Final = 0
"""Holds free units."""
OWNER: Final = 1
"""The holder number of the process that owns the region, for slots of its own."""
HOLDER_MAX: Final = 0xFFFE
RETIRED: Final = 0xFFFF
"""Holds units whose holder died and that others may still write into."""


def _end_slots(table: SlotTableView, unit: int) -> None:
    """Release every slot in a unit."""
    first = unit * UNIT_BLOCKS
    for slot in (first + np.flatnonzero(table["blocks"][first : first + UNIT_BLOCKS])).tolist():
        end_slot(table, slot)


def end_slot(table: SlotTableView, slot: int) -> None:
    """Release a slot. The generation first: whoever reads both never sees an old one in room that is free."""
    table["generation"][slot] += 1
    table["blocks"][slot] = 0


def check_current(table: SlotTableView, handle: SlotHandle) -> None:
    """Raise StaleHandleError unless there is such a slot now. Any handle may be asked for, also a made-up one."""
    slot = handle.slot
    if 0 <= slot < len(table):
        # The generation last: a slot that was released and begun anew in between is noticed.
        blocks, generation = int(table["blocks"][slot]), int(table["generation"][slot])
        if handle.blocks == blocks > 0 and handle.generation == generation:
            return
    raise StaleHandleError(
        f"{handle.tier} slot {slot} (generation {handle.generation}, {handle.blocks} blocks) was released: "
        "look the slab up again"
    )


class LeaseTable:
    """Who holds which units. On the side of the region's owner; not thread-safe.

    Args:
        table: of the region. Leases that it names are kept: of an owner before this one.
    """

    def __init__(self, table: SlotTableView) -> None:
        self._table = table
        self._holders = table["holder"][::UNIT_BLOCKS]
        self._free = np.flatnonzero(self._holders == NOBODY).tolist()
        # Of an owner that was stopped between two writes: room that nobody holds has no slots.
        for unit in self._free:
            _end_slots(table, unit)
        heapq.heapify(self._free)

    @property
    def free_units(self) -> int:
        """Units that nobody holds."""
        return len(self._free)

    @property
    def holders(self) -> frozenset[int]:
        """Who holds anything."""
        return frozenset(np.unique(self._holders).tolist()) - {NOBODY, RETIRED}

    def units_of(self, holder: int) -> list[int]:
        """Numbers of the units that a holder has, ascending."""
        return [int(unit) for unit in np.flatnonzero(self._holders == holder)]

    def lease(self, holder: int, units: int) -> list[int] | None:
        """Numbers of so many units that the holder has from now on, the lowest; None when there are not so many."""
        assert NOBODY < holder <= HOLDER_MAX
        if units > len(self._free):
            return None
        taken = [heapq.heappop(self._free) for _ in range(units)]
        for unit in taken:
            self._holders[unit] = holder
        return taken

    def give_back(self, holder: int, units: Collection[int]) -> None:
        """Units that a holder has no more use for. Slots in them are released.

        Raises:
            StaleHandleError: one of them is not this holder's, or comes twice. Nothing was given back.
        """
        for unit in units:
            if not 0 <= unit < len(self._holders) or self._holders[unit] != holder or holder in {NOBODY, RETIRED}:
                raise StaleHandleError(f"unit {unit} is not leased to holder {holder}: it may have been taken back")
        if len(set(units)) != len(units):
            raise StaleHandleError("a unit was named twice in one return")
        self._free_all(units)

    def reclaim(self, holder: int) -> list[int]:
        """Take back all that a holder has, which is dead: all its slots are released. The units, ascending.

        Nobody may still be writing into them: see `retire`.
        """
        return self.settle(self.retire(holder))

    def retire(self, holder: int) -> list[int]:
        """Release all slots of a holder that is dead, but lease their units to nobody until `settle`. The units.

        Reads from a device into these slots, and other processes that fill them, must have ended before that.
        """
        assert NOBODY < holder <= HOLDER_MAX
        units = self.units_of(holder)
        for unit in units:
            self._holders[unit] = RETIRED
            _end_slots(self._table, unit)
        return units

    def settle(self, units: Iterable[int]) -> list[int]:
        """Make retired units free. They come back, ascending."""
        settled = sorted(units)
        assert all(self._holders[unit] == RETIRED for unit in settled), "only retired units are settled"
        self._free_all(settled)
        return settled

    def settle_all(self) -> list[int]:
        """Make all retired units free, also those that an owner before this one left behind."""
        return self.settle(self.units_of(RETIRED))

    def check_integrity(self) -> None:
        """Assert that each unit is free or leased, and that slots are whole, apart, and in leased units."""
        free = np.flatnonzero(self._holders == NOBODY).tolist()
        assert sorted(self._free) == free, "the table knows other free units than the list"
        assert not self._table["holder"].reshape(-1, UNIT_BLOCKS)[:, 1:].any(), "a holder stands inside of a unit"
        blocks_UB = self._table["blocks"].reshape(-1, UNIT_BLOCKS)
        assert not blocks_UB[free].any(), "a free unit has slots"
        assert not blocks_UB[self.units_of(RETIRED)].any(), "a retired unit has slots"

    def _free_all(self, units: Iterable[int]) -> None:
        for unit in units:
            _end_slots(self._table, unit)
            self._holders[unit] = NOBODY
            heapq.heappush(self._free, unit)


class LeasedRoom:
    """Slots in the units that one holder has leased. Not thread-safe.

    Args:
        tier: of the store.
        table: of the region.
        more: asks the owner of the region for so many units; gives their numbers, none where there are not so many.
            It may wait for another process: `top_up` keeps that off the path on which slots are reserved.
    """

    def __init__(self, tier: Tier, table: SlotTableView, more: Callable[[int], Collection[int]]) -> None:
        self._tier = tier
        self._table = table
        self._more = more
        self._room = BuddyAllocator()
        self._owned: dict[int, SlotHandle] = {}

    @property
    def used_blocks(self) -> int:
        """Blocks that slots hold now, rounding to classes included."""
        return self._room.used_blocks

    @property
    def free_blocks(self) -> int:
        """Blocks that no slot holds, in leased units and in those that nobody has. They may lie apart."""
        unleased = np.count_nonzero(self._table["holder"][::UNIT_BLOCKS] == NOBODY)
        return self._room.free_blocks + UNIT_BLOCKS * int(unleased)

    @property
    def units(self) -> frozenset[int]:
        """Numbers of the leased units."""
        return self._room.units

    @property
    def free_units(self) -> int:
        """Leased units without any slot."""
        return len(self._room.free_units)

    def top_up(self, units: int) -> bool:
        """Lease as many units as are missing for so many without any slot. Whether they are there now."""
        missing = units - self.free_units
        return missing <= 0 or self._lease(missing)

    def take_spare(self, keep: int) -> list[int]:
        """Units without any slot beyond the first so many: they are no longer used here, and go back to the owner."""
        spare = self._room.free_units[keep:]
        for unit in spare:
            self._room.remove(unit)
        return spare

    def reserve(self, blocks: Sequence[int]) -> list[SlotHandle] | None:
        """One slot for each size, or None when not all of them fit and no more is leased; then nothing was taken."""
        sizes = [extent_class(size) for size in blocks]
        offsets: list[int] = []
        for size in sizes:
            offset = self._room.allocate(size)
            if offset is None and self._lease_for(sizes[len(offsets) :]):
                offset = self._room.allocate(size)
            if offset is None:
                for taken in offsets:
                    self._room.release(taken)
                return None
            offsets.append(offset)
        return [self._hand_out(offset, size) for offset, size in zip(offsets, sizes, strict=True)]

    def validate(self, handle: SlotHandle) -> None:
        """Raise StaleHandleError unless the handle owns its slot now.

        The table decides: an owner that took the units back has released their slots.
        """
        if self._owned.get(handle.slot) != handle:
            raise StaleHandleError(
                f"{handle.tier} slot {handle.slot} (generation {handle.generation}, {handle.blocks} blocks) was "
                "released: look the slab up again"
            )
        check_current(self._table, handle)

    def release(self, handles: Sequence[SlotHandle]) -> None:
        """Give slots back.

        Raises:
            StaleHandleError: a handle does not own its slot, or comes twice. Nothing was given back.
        """
        for handle in handles:
            self.validate(handle)
        if len({handle.slot for handle in handles}) != len(handles):
            raise StaleHandleError("a slot was named twice in one release")
        for handle in handles:
            end_slot(self._table, handle.slot)
            del self._owned[handle.slot]
            self._room.release(handle.slot)

    def check_integrity(self) -> None:
        """Assert that every block of a leased unit is free or belongs to exactly one slot, as the table says."""
        self._room.check_integrity()
        assert sum(handle.blocks for handle in self._owned.values()) == self._room.used_blocks
        for slot, handle in self._owned.items():
            assert handle.slot == slot
            check_current(self._table, handle)
        units = sorted(self._room.units)
        blocks_UB = self._table["blocks"].reshape(-1, UNIT_BLOCKS)
        assert int(blocks_UB[units].sum()) == self._room.used_blocks, "the table knows other slots than the allocator"

    def _lease(self, units: int) -> bool:
        added = self._more(units)
        for unit in added:
            self._room.add(unit)
        return len(added) >= units

    def _lease_for(self, sizes: Sequence[int]) -> bool:
        """Lease room for the first of these slots at least, in one request for as many of them as it may take."""
        units = -(-sum(sizes) // UNIT_BLOCKS)
        return self._lease(units) or (units > 1 and self._lease(1))

    def _hand_out(self, offset: int, size: int) -> SlotHandle:
        handle = SlotHandle(
            tier=self._tier, slot=offset, blocks=size, generation=int(self._table["generation"][offset])
        )
        self._table["blocks"][offset] = size
        self._owned[offset] = handle
        return handle
