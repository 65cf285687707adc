"""The host tier: a bounded pool of slabs in a region of shared memory."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from h3kv.core.errors import ShapeError
from h3kv.core.layout import SlabLayout
from h3kv.core.types import SlotHandle, Tier
from h3kv.memory.buddy import UNIT_BLOCKS
from h3kv.memory.leases import LeasedRoom
from h3kv.memory.region import Region, RegionKind
from h3kv.memory.region_format import RegionGeometry, RegionIdentity
from h3kv.tiers.slab_store import SlabStore, count_units
from h3kv.tiers.slots import SlotRoom, SlotTable


@dataclass(frozen=True, slots=True)
class HostStoreConfig:
    """Size and make of the host tier."""

    capacity_bytes: int
    """Cap of the slots in total. Rounded down to whole units of 16 blocks of one layer. The region is larger by its
    header, 16 bytes for each block, and the rounding to 2 MiB."""
    kinds: tuple[RegionKind, ...] = (RegionKind.HUGETLB, RegionKind.MEMFD, RegionKind.ANONYMOUS)
    """What the region may be made of: the first that has huge pages is taken, else a plain memfd. A process that passes
    its region to another one leaves `ANONYMOUS` out."""
    identity: RegionIdentity | None = None
    """Of a region that other processes map; it lies at the address that this says."""


class RegionStore(SlabStore):
    """Slabs in a region, whose slot table another process can read. Satisfies `AddressableStore`.

    Args:
        layout: sizes of blocks.
        region: with slots of that size.
        slots: hands out the room in it.
    """

    def __init__(self, layout: SlabLayout, region: Region, slots: SlotRoom) -> None:
        self._region = region
        super().__init__(layout, region.data, slots, tier=Tier.HOST)

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
        """Address and size of each range that slots lie in, for an I/O engine that registers its buffers. Memory that
        must not be registered is left out.
        """
        return [(self._open_memory().data_ptr(), self._capacity_bytes)] if self._region.can_register else []

    def view(self, handle: SlotHandle) -> memoryview:
        """A slot's bytes, writable. Do not use it after `release`.

        Raises:
            StaleHandleError: the slot was released.
        """
        self._open_slots().validate(handle)
        start = self._layout.size_bytes(handle.slot)
        return self._region.slots[start : start + self._layout.size_bytes(handle.blocks)]


class HostStore(RegionStore):
    """The host tier of one process: it makes the region and has all of it."""

    def __init__(self, layout: SlabLayout, config: HostStoreConfig) -> None:
        """Make the region.

        Raises:
            ConfigError: the cap is below one unit; the message has the sum.
            HostMemoryError: the machine has too little memory left.
        """
        units = count_units(layout, config.capacity_bytes, tier=Tier.HOST)
        geometry = RegionGeometry(block_bytes=layout.block_bytes, blocks=units * UNIT_BLOCKS)
        region = Region.create(geometry, identity=config.identity, kinds=config.kinds)
        super().__init__(layout, region, SlotTable(Tier.HOST, region.table))

    def close(self) -> None:
        """See `BlockStore.close`. The memory goes back to the system with the last view of it."""
        super().close()
        self._region.close()


class SharedHostStore(RegionStore):
    """The host tier of a process that leases its room in a region of another one.

    Args:
        layout: sizes of blocks.
        region: mapped from its owner; it stays whose it is.
        room: the slots that this process may hand out.

    Raises:
        ShapeError: the region is divided for another layout.
    """

    def __init__(self, layout: SlabLayout, region: Region, room: LeasedRoom) -> None:
        if region.geometry.block_bytes != layout.block_bytes:
            raise ShapeError(
                f"blocks of this model have {layout.block_bytes} bytes, those of the host region "
                f"{region.geometry.block_bytes}: start all processes with the same model and encoding"
            )
        super().__init__(layout, region, room)
        self._leased = room

    def top_up(self, units: int) -> bool:
        """See `LeasedRoom.top_up`."""
        return self._leased.top_up(units)

    def take_spare(self, keep: int) -> list[int]:
        """See `LeasedRoom.take_spare`."""
        return self._leased.take_spare(keep)
