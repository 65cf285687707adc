"""The host tier: a bounded pool of slabs in a region of shared memory."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from h3kv.core.layout import SlabLayout
from h3kv.core.types import SlotHandle, Tier
from h3kv.memory.buddy import UNIT_BLOCKS
from h3kv.memory.region import Region, RegionKind
from h3kv.memory.region_format import RegionGeometry
from h3kv.tiers.slab_store import SlabStore, count_units


@dataclass(frozen=True, slots=True)
class HostStoreConfig:
    """Size and make of the host tier."""

    capacity_bytes: int
    """Cap of the slots in total. Rounded down to whole units of 16 blocks of one layer. The region is larger by its
    header, 16 bytes for each block, and the rounding to 2 MiB."""
    kinds: tuple[RegionKind, ...] = (RegionKind.HUGETLB, RegionKind.MEMFD, RegionKind.ANONYMOUS)
    """What the region may be made of: the first that has huge pages is taken, else a plain memfd. A process that passes
    its region to another one leaves `ANONYMOUS` out."""


class HostStore(SlabStore):
    """Slabs in a region, whose slot table another process can read. Satisfies `AddressableStore`."""

    def __init__(self, layout: SlabLayout, config: HostStoreConfig) -> None:
        """Make the region.

        Raises:
            ConfigError: the cap is below one unit; the message has the sum.
            HostMemoryError: the machine has too little memory left.
        """
        units = count_units(layout, config.capacity_bytes, tier=Tier.HOST)
        geometry = RegionGeometry(block_bytes=layout.block_bytes, blocks=units * UNIT_BLOCKS)
        self._region = Region.create(geometry, kinds=config.kinds)
        super().__init__(layout, self._region.data, self._region.table, tier=Tier.HOST)

    @property
    def region(self) -> Region:
        """Where the slots lie; closed by `close`."""
        return self._region

    @property
    def arena(self) -> Tensor:
        """The store's memory, uint8, in main memory. Slots lie at multiples of the block size from its start."""
        return self._open_memory()

    @property
    def buffers(self) -> list[tuple[int, int]]:
        """Address and size of each range that slots lie in, for an I/O engine that registers its buffers."""
        return [(self._open_memory().data_ptr(), self._capacity_bytes)]

    def view(self, handle: SlotHandle) -> memoryview:
        """A slot's bytes, writable. Do not use it after `release`.

        Raises:
            StaleHandleError: the slot was released.
        """
        self._open_slots().validate(handle)
        start = self._layout.size_bytes(handle.slot)
        return self._region.slots[start : start + self._layout.size_bytes(handle.blocks)]

    def close(self) -> None:
        """See `BlockStore.close`. The memory goes back to the system with the last view of it."""
        super().close()
        self._region.close()
