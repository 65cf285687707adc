"""Memory that a client may name: the units that it leases. Nothing else is given to the kernel.

Shapes: N ranges of memory.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
from numpy.typing import NDArray

from h3kv.memory.buddy import UNIT_BLOCKS
from h3kv.memory.region import Region

Units = list[tuple[int, NDArray[np.int64]]]
"""For each region, its index and the units that ranges of memory lie in."""


class LeasedMemory:
    """Which units of the shared regions hold what, and how much I/O is under way in each. On the owner's side.

    Args:
        regions: with slots.
    """

    def __init__(self, regions: Sequence[Region]) -> None:
        assert all(region.geometry.blocks for region in regions)
        self._slots = [region.slots for region in regions]
        self._holders = [region.table["holder"][::UNIT_BLOCKS] for region in regions]
        self._unit_bytes = [UNIT_BLOCKS * region.geometry.block_bytes for region in regions]
        self._starts = [region.address + region.geometry.data_offset for region in regions]
        self._in_use = [np.zeros(len(holders), dtype=np.int64) for holders in self._holders]

    def find(self, holder: int, addresses_N: NDArray[np.uint64], sizes_N: NDArray[np.uint64]) -> Units | None:
        """The units that ranges lie in, if the holder leases all of them; None for anything else.

        Ranges longer than a unit are refused: no slot is.
        """
        found: Units = []
        seen = 0
        for index, start in enumerate(self._starts):
            unit_bytes, count = self._unit_bytes[index], len(self._holders[index])
            is_here_N = (addresses_N >= start) & (addresses_N < start + count * unit_bytes)
            if not is_here_N.any():
                continue
            offset_N, size_N = (addresses_N[is_here_N] - np.uint64(start)).astype(np.int64), sizes_N[is_here_N]
            if int(size_N.max()) > unit_bytes or int(size_N.min()) == 0:
                return None
            first_N = offset_N // unit_bytes
            last_N = (offset_N + size_N.astype(np.int64) - 1) // unit_bytes
            if int(last_N.max()) >= count:
                return None
            unit_N = np.unique(np.concatenate([first_N, last_N]))
            if (self._holders[index][unit_N] != holder).any():
                return None
            found.append((index, unit_N))
            seen += int(is_here_N.sum())
        return found if seen == addresses_N.size else None

    def view(self, address: int, size_bytes: int) -> memoryview:
        """The bytes of a range that `find` has found."""
        for index, start in enumerate(self._starts):
            offset = address - start
            if 0 <= offset < self._slots[index].nbytes:
                return self._slots[index][offset : offset + size_bytes]
        raise AssertionError("an address of no region")

    def begin(self, units: Units) -> None:
        """I/O begins in these units."""
        for index, unit_N in units:
            self._in_use[index][unit_N] += 1

    def end(self, units: Units) -> None:
        """It has ended."""
        for index, unit_N in units:
            self._in_use[index][unit_N] -= 1

    def is_in_use(self, region: int, units: Iterable[int]) -> bool:
        """Whether I/O is under way in any of a region's units."""
        return bool(self._in_use[region][list(units)].any())

    def check_idle(self) -> None:
        """Assert that no I/O is under way anywhere."""
        assert not any(in_use_U.any() for in_use_U in self._in_use), "I/O was begun that did not end"
