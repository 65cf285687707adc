"""Indexes of segments whose pages lie on NVMe, in a region of their own.

    slot of a segment and layer     planes [kv_head][block] | summaries [kv_head]      as behind the pages of its slab

A segment in HOST is scanned where it lies and needs no slot here.
"""

from __future__ import annotations

from dataclasses import dataclass

from h3kv.core.errors import ConfigError, ShapeError, TierFullError
from h3kv.core.layout import CacheLayout
from h3kv.core.limits import DIRECT_IO_BYTES, SEGMENT_BLOCKS_MAX
from h3kv.core.types import SlotHandle, Tier
from h3kv.core.units import describe_size, format_size
from h3kv.memory.buddy import UNIT_BLOCKS
from h3kv.memory.leases import LeasedRoom
from h3kv.memory.region import Region, RegionKind
from h3kv.memory.region_format import RegionGeometry
from h3kv.tiers.slots import SlotRoom, SlotTable


@dataclass(frozen=True, slots=True)
class IndexStoreConfig:
    """Size and make of the index region."""

    capacity_bytes: int
    """Cap of the slots in total, rounded down to whole segments."""
    kinds: tuple[RegionKind, ...] = (RegionKind.HUGETLB, RegionKind.MEMFD, RegionKind.ANONYMOUS)
    """As of `HostStoreConfig`."""


@dataclass(frozen=True, slots=True)
class IndexSlot:
    """Room for the index of one segment of 16 blocks."""

    handles_L: tuple[SlotHandle, ...]
    addresses_L: tuple[int, ...]


class IndexStore:
    """Slots of one size. Not thread-safe.

    Args:
        layout: of the model's KV, in a clustered encoding.
        config: room for one segment at least.

    Raises:
        ConfigError: the cap is less than that; the message has the sum.
        HostMemoryError: the machine has too little memory left.
    """

    def __init__(self, layout: CacheLayout, config: IndexStoreConfig) -> None:
        slot_bytes = layout.layers * self.layer_bytes(layout)
        slots = config.capacity_bytes // slot_bytes
        if not slots:
            raise ConfigError(
                f"the index region's cap of {describe_size(config.capacity_bytes)} is below the index of one segment: "
                f"{layout.layers} layers x {describe_size(self.layer_bytes(layout))}; raise host.index_bytes to at "
                f"least {format_size(slot_bytes)}",
                field="host.index_bytes",
            )
        blocks = -(-slots * layout.layers // UNIT_BLOCKS) * UNIT_BLOCKS
        self._region = Region.create(RegionGeometry(self.layer_bytes(layout), blocks), kinds=config.kinds)
        self._set_up(layout, SlotTable(Tier.HOST, self._region.table), slots=slots)

    def _set_up(self, layout: CacheLayout, table: SlotRoom, *, slots: int) -> None:
        self.slot_bytes = layout.layers * self.layer_bytes(layout)
        """Of one segment."""
        self.slots = slots
        """Segments that there is room for."""
        self._layer_bytes = self.layer_bytes(layout)
        self._layers = layout.layers
        self._table = table
        self._address = self._region.data.data_ptr()
        self._used = 0

    @staticmethod
    def layer_bytes(layout: CacheLayout) -> int:
        """Bytes of one segment's index in one layer, a multiple of 4 KiB."""
        return -(-layout.slab.index_bytes(SEGMENT_BLOCKS_MAX) // DIRECT_IO_BYTES) * DIRECT_IO_BYTES

    @property
    def used_slots(self) -> int:
        """Segments whose index lies here."""
        return self._used

    @property
    def buffers(self) -> list[tuple[int, int]]:
        """As of `HostStore`."""
        return [(self._address, self._region.geometry.data_bytes)] if self._region.can_register else []

    def reserve(self) -> IndexSlot:
        """Room for one segment.

        Raises:
            TierFullError: all slots are in use.
        """
        handles = self._table.reserve([1] * self._layers) if self._used < self.slots else None
        if handles is None:
            raise TierFullError(
                f"the index region holds {self.slots} segments, {describe_size(self.slots * self.slot_bytes)}, and all "
                "are in use: raise host.index_bytes",
                tier=Tier.HOST,
                needed_bytes=self.slot_bytes,
                free_bytes=0,
            )
        self._used += 1
        return IndexSlot(tuple(handles), tuple(self._address + handle.slot * self._layer_bytes for handle in handles))

    def views(self, slot: IndexSlot) -> list[memoryview]:
        """Each layer's bytes, writable. Do not use them after `release`."""
        starts = [handle.slot * self._layer_bytes for handle in slot.handles_L]
        return [self._region.slots[start : start + self._layer_bytes] for start in starts]

    def release(self, slot: IndexSlot) -> None:
        """Give a slot back. Raises StaleHandleError when it was released before."""
        self._table.release(slot.handles_L)
        self._used -= 1

    def check_integrity(self) -> None:
        """Assert that every slot is free or owned exactly once."""
        self._table.check_integrity()
        assert self._table.used_blocks == self._used * self._layers

    def close(self) -> None:
        """Give the memory back. Calling it again does nothing."""
        self._region.close()


class SharedIndexStore(IndexStore):
    """The index region of a process that leases its room in a region of another one.

    Args:
        layout: of the model's KV, in a clustered encoding.
        region: mapped from its owner; it stays whose it is.
        room: the slots that this process may hand out.

    Raises:
        ShapeError: the region is divided for another layout.
    """

    def __init__(self, layout: CacheLayout, region: Region, room: LeasedRoom) -> None:
        if region.geometry.block_bytes != self.layer_bytes(layout):
            raise ShapeError(
                f"an index of one layer of this model has {self.layer_bytes(layout)} bytes, in the index region "
                f"{region.geometry.block_bytes}: start all processes with the same model and encoding"
            )
        self._region = region
        self._set_up(layout, room, slots=region.geometry.blocks // layout.layers)

    def close(self) -> None:
        """Nothing to do: the region is another's."""
