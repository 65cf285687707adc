"""Memory that slabs pass through on their way to the disk and back, kept from one to the next."""

from __future__ import annotations

import mmap
from collections import deque

from h3kv.tiers.cold.ops import aligned_memory


class SlabMemory:
    """Aligned room for one slab each, for any thread.

    It is kept, as new pages cost as much as what is done with them, and pages that go interrupt every thread.

    Args:
        slab_bytes: of each.
        kept_bytes: of memory that nobody uses, at most, and at least one slab.
    """

    def __init__(self, slab_bytes: int, *, kept_bytes: int) -> None:
        self.slab_bytes = slab_bytes
        self._free: deque[mmap.mmap] = deque(maxlen=max(1, kept_bytes // slab_bytes))

    def take(self) -> mmap.mmap:
        """Room for a slab; what it holds is no one's. Raises MemoryError or OSError."""
        try:
            return self._free.pop()
        except IndexError:
            return aligned_memory(self.slab_bytes)

    def give_back(self, memory: mmap.mmap) -> None:
        """Nobody reads or writes it any more."""
        self._free.append(memory)
