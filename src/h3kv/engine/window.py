"""The newest blocks of one sequence, and its first one, on the device.

    blocks    0 |  1 ............ 40 | 41 .............. 57 | 58
           sink |  in segments       | window               | being filled
         device |  HOST or NVMe      | device               | device

Each block has slots of its own, one for each layer, so that it comes and goes alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from h3kv.core.layout import CacheLayout
from h3kv.core.ports import AddressableStore
from h3kv.core.types import SlotHandle


class ArenaStore(AddressableStore, Protocol):
    """A store whose slots lie in one tensor, at multiples of the block size from its start."""

    @property
    def arena(self) -> Tensor:
        """The store's memory, uint8, on its device."""
        ...


@dataclass(frozen=True, slots=True)
class WindowConfig:
    """What of a sequence stays on the device."""

    blocks: int
    """Newest whole blocks that stay, at least 1."""


class Window:
    """Device slots of one sequence, from the first chunk to `close`.

    Args:
        device: where the blocks lie.
        home: where they go when they leave.
        layout: of both.
        config: how much stays.
    """

    def __init__(self, device: ArenaStore, home: ArenaStore, layout: CacheLayout, config: WindowConfig) -> None:
        self._device = device
        self._home = home
        self._layout = layout
        self._config = config
        self._slots: dict[int, list[SlotHandle]] = {}

    def __contains__(self, block: int) -> bool:
        return block in self._slots

    def first_kept(self, whole_blocks: int) -> int:
        """The first block that stays, of a sequence with so many whole blocks; the sink stays besides."""
        return max(whole_blocks - self._config.blocks, 0)

    def take(self, blocks: Sequence[int]) -> list[tuple[int, ...]]:
        """Room for these blocks. Returns for each the address in every layer.

        Raises:
            TierFullError: the device tier is full; nothing was taken.
        """
        layers = self._layout.layers
        handles = self._device.reserve([1] * (layers * len(blocks)))
        addresses = []
        for place, block in enumerate(blocks):
            self._slots[block] = handles[place * layers : (place + 1) * layers]
            addresses.append(tuple(self._device.address(handle) for handle in self._slots[block]))
        return addresses

    def copy_out(self, block: int, addresses_L: Sequence[int], *, first_block: int, room_blocks: int) -> None:
        """Copy a block into slots of its home, one for each layer, as their block number `first_block`."""
        slab = self._layout.slab
        heads = range(slab.kv_heads)
        source = [
            self._device.address(handle) + slab.page_offset(0, head, blocks=1)
            for handle in self._slots[block]
            for head in heads
        ]
        target = [
            address + slab.page_offset(first_block, head, blocks=room_blocks)
            for address in addresses_L
            for head in heads
        ]
        pages = self._pages(self._device)[self._numbers(self._device, source)]
        home = self._pages(self._home)
        home.index_copy_(0, self._numbers(self._home, target), pages.to(home.device))

    def drop(self, block: int) -> None:
        """Give the room of a block back."""
        self._device.release(self._slots.pop(block))

    def drop_from(self, block: int) -> None:
        """Give back the room of this block and of all behind it."""
        for held in [held for held in self._slots if held >= block]:
            self.drop(held)

    def close(self) -> None:
        """Give all room back."""
        self.drop_from(0)

    def _pages(self, store: ArenaStore) -> Tensor:
        size_bytes = self._layout.slab.page.size_bytes
        arena = store.arena
        return arena[: arena.numel() // size_bytes * size_bytes].view(-1, size_bytes)

    def _numbers(self, store: ArenaStore, addresses: Sequence[int]) -> Tensor:
        base, size_bytes = store.arena.data_ptr(), self._layout.slab.page.size_bytes
        numbers = [(address - base) // size_bytes for address in addresses]
        return torch.tensor(numbers, dtype=torch.int64, device=store.arena.device)
