"""Room for one model's extents: which areas it has, and what is free in them.

Extents are named by their first block. Blocks count through all areas of the volume, whoever has them, so that a number
never changes its place: area a has the blocks from a x blocks-per-area.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from h3kv.core.limits import EXTENT_CLASSES_BLOCKS
from h3kv.memory.buddy import BuddyAllocator, extent_class
from h3kv.tiers.cold.geometry import AreaGeometry
from h3kv.tiers.cold.superblock import AreaEntry


class Room:
    """Hands out extents in this model's areas; takes more areas as they are needed.

    Args:
        geometry: of this model's areas.
        areas: whose each area of the volume is.
        ours: numbers of this model's areas.
    """

    def __init__(self, geometry: AreaGeometry, areas: Sequence[AreaEntry | None], ours: Iterable[int]) -> None:
        self.geometry = geometry
        """Of this model's areas."""
        self._areas = list(areas)
        self._buddies = {area: BuddyAllocator(geometry.units) for area in ours}
        self._claimed: list[int] = []

    @property
    def capacity_blocks(self) -> int:
        """Blocks of all areas: others' areas can be taken."""
        return len(self._areas) * self.geometry.blocks

    @property
    def used_blocks(self) -> int:
        """Blocks handed out, rounding to classes included."""
        return sum(buddy.used_blocks for buddy in self._buddies.values())

    def reserve(self, sizes: Sequence[int]) -> list[int] | None:
        """First blocks of one extent for each size, or None when not all of them fit; then nothing was taken."""
        blocks: list[int] = []
        claimed_before = len(self._claimed)
        for size in sizes:
            block = self._allocate(size)
            if block is None:
                self.release(blocks)
                self._give_areas_back(self._claimed[claimed_before:])
                return None
            blocks.append(block)
        return blocks

    def release(self, blocks: Iterable[int]) -> None:
        """Give extents back."""
        for block in blocks:
            area, offset = divmod(block, self.geometry.blocks)
            self._buddies[area].release(offset)

    def take_claims(self) -> list[int]:
        """Areas taken since the last call: the disk does not say so yet."""
        claimed, self._claimed = self._claimed, []
        return claimed

    def restore(self, area: int, extents: Iterable[tuple[int, int]]) -> None:
        """Take exactly these extents of an area of which nothing was taken yet.

        Args:
            area: one of this model's.
            extents: first block within the area, and class; none overlap.

        The allocator gives the smallest extent that fits, the lowest first. So what is taken from left to right lands
        where it should, if the gaps are taken too, and given back at the end.
        """
        buddy, end, gaps = self._buddies[area], 0, []
        for offset, size in sorted(extents):
            while end < offset:
                gap = max(c for c in EXTENT_CLASSES_BLOCKS if end % c == 0 and end + c <= offset)
                assert buddy.allocate(gap) == end
                gaps.append(end)
                end += gap
            assert buddy.allocate(size) == offset
            end = offset + size
        for offset in gaps:
            buddy.release(offset)

    def check_integrity(self) -> None:
        """Assert that each block of each area is free or used exactly once."""
        for buddy in self._buddies.values():
            buddy.check_integrity()

    def _allocate(self, size: int) -> int | None:
        for area in sorted(self._buddies):
            offset = self._buddies[area].allocate(extent_class(size))
            if offset is not None:
                return area * self.geometry.blocks + offset
        taken = self._take_area()
        if taken is None:
            return None
        offset = self._buddies[taken].allocate(extent_class(size))
        assert offset is not None, "an empty area has room for any extent"
        return taken * self.geometry.blocks + offset

    def _give_areas_back(self, areas: Sequence[int]) -> None:
        """Leave areas, the last ones taken, to whom the disk says they belong: nothing lies in them."""
        for area in areas:
            assert self._buddies.pop(area).used_blocks == 0
            self._claimed.remove(area)

    def _take_area(self) -> int | None:
        """A free area, else the one whose model was used least recently, else None."""
        others = [area for area in range(len(self._areas)) if area not in self._buddies]
        if not others:
            return None
        entries = self._areas
        area = min(others, key=lambda area: (0 if (entry := entries[area]) is None else 1 + entry.used, area))
        self._buddies[area] = BuddyAllocator(self.geometry.units)
        self._claimed.append(area)
        return area
