"""The device tier: a bounded pool of slabs in the memory that attention reads."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from h3kv.core.layout import SlabLayout
from h3kv.core.types import Tier
from h3kv.memory.arena import allocate_arena
from h3kv.memory.buddy import UNIT_BLOCKS
from h3kv.memory.region_format import make_table
from h3kv.tiers.slab_store import SlabStore, count_units
from h3kv.tiers.slots import SlotTable


@dataclass(frozen=True, slots=True)
class DeviceStoreConfig:
    """Size and place of the device tier."""

    capacity_bytes: int
    """Cap of the tier in total. Rounded down to whole units of 16 blocks of one layer."""
    device: str = "cpu"
    """Where the bytes lie, as torch names it."""


class DeviceStore(SlabStore):
    """Slabs in one arena on a device; with device `cpu`, in main memory. Satisfies `AddressableStore`."""

    def __init__(self, layout: SlabLayout, config: DeviceStoreConfig) -> None:
        """Take the address range for the whole cap. Main memory is committed page by page as it is first written.

        Raises:
            ConfigError: the cap is below one unit; the message has the sum.
            HostMemoryError: the system refuses that much.
        """
        units = count_units(layout, config.capacity_bytes, tier=Tier.DEVICE)
        # First of all: a cap beyond the machine must not cost the bookkeeping for it.
        arena = allocate_arena(units * layout.size_bytes(UNIT_BLOCKS), torch.device(config.device))
        slots = SlotTable(Tier.DEVICE, make_table(units * UNIT_BLOCKS))
        super().__init__(layout, arena, slots, tier=Tier.DEVICE)

    @property
    def arena(self) -> Tensor:
        """The store's memory, uint8, on its device. Slots lie at multiples of the block size from its start."""
        return self._open_memory()
