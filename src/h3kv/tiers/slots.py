"""Slots with generations: which extents of a store are reserved, and whether a handle still means what it meant."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from h3kv.core.errors import StaleHandleError
from h3kv.core.types import SlotHandle, Tier
from h3kv.memory.buddy import UNIT_BLOCKS, BuddyAllocator, extent_class
from h3kv.memory.region_format import SlotTableView


class SlotRoom(Protocol):
    """Hands out slots: `SlotTable` in a table of its own, `LeasedRoom` in units that it leased of a shared one."""

    @property
    def used_blocks(self) -> int:
        """Blocks that slots hold now, rounding to classes included."""
        ...

    @property
    def free_blocks(self) -> int:
        """Blocks that no slot holds. They may lie apart."""
        ...

    def reserve(self, blocks: Sequence[int]) -> list[SlotHandle] | None:
        """One slot for each size, or None when not all of them fit; then nothing was taken."""
        ...

    def validate(self, handle: SlotHandle) -> None:
        """Raise StaleHandleError unless the handle owns its slot now."""
        ...

    def release(self, handles: Sequence[SlotHandle]) -> None:
        """Give slots back, all or none: StaleHandleError when a handle does not own its slot, or comes twice."""
        ...

    def check_integrity(self) -> None:
        """Assert that every block is free or belongs to exactly one slot."""
        ...


class SlotTable:
    """Hands out slots of one store and refuses handles whose slot has moved on. Not thread-safe.

    Args:
        tier: of the store.
        table: zeroed entries, one for each block; their count is a multiple of 16. Generations and sizes are kept
            there, for whoever else can see that memory. A generation counts the releases of a slot at its offset.
    """

    def __init__(self, tier: Tier, table: SlotTableView) -> None:
        self._tier = tier
        self._room = BuddyAllocator(len(table) // UNIT_BLOCKS)
        self._generations = table["generation"]
        self._sizes = table["blocks"]
        self._owned: dict[int, SlotHandle] = {}

    @property
    def used_blocks(self) -> int:
        """Blocks that slots hold now, rounding to classes included."""
        return self._room.used_blocks

    @property
    def free_blocks(self) -> int:
        """Blocks that no slot holds. They may lie apart."""
        return self._room.free_blocks

    def reserve(self, blocks: Sequence[int]) -> list[SlotHandle] | None:
        """One slot for each size, or None when not all of them fit; then nothing was taken."""
        offsets: list[int] = []
        sizes = [extent_class(size) for size in blocks]
        for size in sizes:
            offset = self._room.allocate(size)
            if offset is None:
                for taken in offsets:
                    self._room.release(taken)
                return None
            offsets.append(offset)
        return [self._hand_out(offset, size) for offset, size in zip(offsets, sizes, strict=True)]

    def validate(self, handle: SlotHandle) -> None:
        """Raise StaleHandleError unless the handle owns its slot now."""
        if self._owned.get(handle.slot) != handle:
            raise StaleHandleError(
                f"{handle.tier} slot {handle.slot} (generation {handle.generation}, {handle.blocks} blocks) was "
                "released: look the slab up again"
            )

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
            # The generation first: whoever reads both never sees an old one in room that is free.
            self._generations[handle.slot] += 1
            self._sizes[handle.slot] = 0
            del self._owned[handle.slot]
            self._room.release(handle.slot)

    def check_integrity(self) -> None:
        """Assert that every block is free or belongs to exactly one slot."""
        self._room.check_integrity()
        assert sum(handle.blocks for handle in self._owned.values()) == self._room.used_blocks
        assert int(self._sizes.sum()) == self._room.used_blocks, "the table knows other slots than the allocator"
        for slot, handle in self._owned.items():
            assert handle.slot == slot
            assert handle.blocks == self._sizes[slot], f"slot {slot} has two sizes"
            assert handle.generation == self._generations[slot], f"slot {slot} has two generations"

    def _hand_out(self, offset: int, size: int) -> SlotHandle:
        handle = SlotHandle(tier=self._tier, slot=offset, blocks=size, generation=int(self._generations[offset]))
        self._sizes[offset] = size
        self._owned[offset] = handle
        return handle
