"""Room in a row of blocks, handed out in extent classes of 1, 2, 4, 8 and 16 blocks.

Each unit of 16 blocks is a buddy tree: a free extent of 2n blocks is halved to serve n, and two free halves ("buddies",
their offsets differ in one bit) become one again. Offsets are multiples of the extent's size.

    unit 0                                            unit 1
    |<--------------------- 16 --------------------->|<--------------------- 16 ----
    |  4 used   |2 used|2 free|       8 free         |  ...

The smallest free extent that fits is taken, the lowest of these first: the same calls always give the same offsets,
and small extents gather in few units instead of breaking up whole ones.
"""

from __future__ import annotations

import heapq
from typing import Final

from h3kv.core.limits import EXTENT_CLASSES_BLOCKS

UNIT_BLOCKS: Final = EXTENT_CLASSES_BLOCKS[-1]


def extent_class(blocks: int) -> int:
    """The smallest extent class that holds so many blocks.

    Raises:
        ValueError: `blocks` is not in [1, 16].
    """
    for size in EXTENT_CLASSES_BLOCKS:
        if 1 <= blocks <= size:
            return size
    raise ValueError(f"an extent holds 1 to {UNIT_BLOCKS} blocks, not {blocks}")


class _FreeList:
    """Offsets of the free extents of one class; gives the lowest first."""

    def __init__(self, offsets: range) -> None:
        # A heap with lazy removal: an offset is live while it is in `live`, and may lie in the heap more than once.
        self.live = set(offsets)
        self._heap = list(offsets)

    def add(self, offset: int) -> None:
        self.live.add(offset)
        heapq.heappush(self._heap, offset)

    def discard(self, offset: int) -> None:
        self.live.discard(offset)
        if len(self._heap) > 2 * len(self.live) + UNIT_BLOCKS:
            self._heap = sorted(self.live)

    def take_lowest(self) -> int:
        while True:
            offset = heapq.heappop(self._heap)
            if offset in self.live:
                self.live.remove(offset)
                return offset


class BuddyAllocator:
    """Room for `units` x 16 blocks, and for units that are added. Not thread-safe. Every call costs O(log n)."""

    def __init__(self, units: int = 0) -> None:
        self._units = set(range(units))
        self._free = {size: _FreeList(range(0)) for size in EXTENT_CLASSES_BLOCKS}
        self._free[UNIT_BLOCKS] = _FreeList(range(0, units * UNIT_BLOCKS, UNIT_BLOCKS))
        self._used: dict[int, int] = {}
        self._used_blocks = 0

    @property
    def capacity_blocks(self) -> int:
        """Blocks of all units."""
        return len(self._units) * UNIT_BLOCKS

    @property
    def units(self) -> frozenset[int]:
        """Numbers of the units that it has."""
        return frozenset(self._units)

    @property
    def free_units(self) -> list[int]:
        """Numbers of the units of which nothing is handed out, ascending."""
        return sorted(offset // UNIT_BLOCKS for offset in self._free[UNIT_BLOCKS].live)

    def add(self, unit: int) -> None:
        """Take a unit in, all of it free."""
        assert unit not in self._units, f"unit {unit} is here already"
        self._units.add(unit)
        self._free[UNIT_BLOCKS].add(unit * UNIT_BLOCKS)

    def remove(self, unit: int) -> None:
        """Let go of a unit of which nothing is handed out."""
        assert unit * UNIT_BLOCKS in self._free[UNIT_BLOCKS].live, f"unit {unit} is not free"
        self._units.remove(unit)
        self._free[UNIT_BLOCKS].discard(unit * UNIT_BLOCKS)

    @property
    def used_blocks(self) -> int:
        """Blocks handed out, rounding to classes included."""
        return self._used_blocks

    @property
    def free_blocks(self) -> int:
        """Blocks not handed out. They may lie apart."""
        return self.capacity_blocks - self._used_blocks

    def allocate(self, blocks: int) -> int | None:
        """Offset of an extent of at least so many blocks, or None when no free extent is that large."""
        wanted = extent_class(blocks)
        found = next((size for size in EXTENT_CLASSES_BLOCKS if size >= wanted and self._free[size].live), None)
        if found is None:
            return None
        offset = self._free[found].take_lowest()
        self._give_back_tail(offset, size=found, keep=wanted)
        self._used[offset] = wanted
        self._used_blocks += wanted
        return offset

    def release(self, offset: int) -> None:
        """Give an extent back."""
        size = self._used.pop(offset)
        self._used_blocks -= size
        while size < UNIT_BLOCKS and (offset ^ size) in self._free[size].live:
            self._free[size].discard(offset ^ size)
            offset &= ~size
            size *= 2
        self._free[size].add(offset)

    def check_integrity(self) -> None:
        """Assert that each block is free or used exactly once, and that no two free buddies lie side by side."""
        extents = sorted(
            [*self._used.items(), *((offset, size) for size in self._free for offset in self._free[size].live)]
        )
        units = iter(sorted(self._units))
        end = 0
        for offset, size in extents:
            if end % UNIT_BLOCKS == 0:
                end = next(units) * UNIT_BLOCKS
            assert offset == end, f"blocks {end} to {offset} are lost or owned twice"
            assert offset % size == 0, f"extent at {offset} of {size} blocks is not aligned"
            end = offset + size
        assert end % UNIT_BLOCKS == 0 and next(units, None) is None, f"extents end at {end}, before the last unit does"
        assert self._used_blocks == sum(self._used.values()), "the count of used blocks is wrong"
        for size in EXTENT_CLASSES_BLOCKS[:-1]:
            assert all((offset ^ size) not in self._free[size].live for offset in self._free[size].live)

    def _give_back_tail(self, offset: int, *, size: int, keep: int) -> None:
        """Free all of an extent but its first `keep` blocks. The freed halves have no free buddy: it is in use."""
        while size > keep:
            size //= 2
            self._free[size].add(offset + size)
