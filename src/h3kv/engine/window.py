"""The newest blocks of one sequence, and its first one, on the device.

    blocks    0 |  1 ............ 40 | 41 .............. 57 | 58
           sink |  in segments       | window               | being filled
         device |  HOST or NVMe      | device               | device

Each block has slots of its own, one for each layer, so that it comes and goes alone.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Final, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from h3kv.attention import native
from h3kv.core.layout import CacheLayout
from h3kv.core.ports import AddressableStore
from h3kv.core.types import SlotHandle

_UNIT_BYTES: Final = 4096
"""Pieces are copied between devices in units that divide them: offsets in a store are multiples of these."""


class ArenaStore(AddressableStore, Protocol):
    """A store whose slots lie in one tensor, at multiples of the block size from its start."""

    @property
    def arena(self) -> Tensor:
        """The store's memory, uint8, on its device."""
        ...


class Window:
    """Device slots of one sequence, from the first chunk to `close`.

    Args:
        device: where the blocks lie.
        home: where they go when they leave.
        layout: of both.
        blocks: newest whole blocks that stay, at least 1.
    """

    def __init__(self, device: ArenaStore, home: ArenaStore, layout: CacheLayout, *, blocks: int) -> None:
        self._device = device
        self._home = home
        self._layout = layout
        self._blocks = blocks
        self._slots: dict[int, list[SlotHandle]] = {}
        self._addresses: dict[int, tuple[int, ...]] = {}

    def __contains__(self, block: int) -> bool:
        return block in self._slots

    def first_kept(self, whole_blocks: int) -> int:
        """The first block that stays, of a sequence with so many whole blocks; the sink stays besides."""
        return max(whole_blocks - self._blocks, 0)

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
            self._addresses[block] = tuple(self._device.address(handle) for handle in self._slots[block])
            addresses.append(self._addresses[block])
        return addresses

    def copy_out(self, blocks: range, addresses_L: Sequence[int], *, first_block: int, room_blocks: int) -> None:
        """Copy consecutive blocks into slots of their home, one for each layer, from block number `first_block` on."""
        slab = self._layout.slab
        heads = range(slab.kv_heads)
        # Shapes: B blocks, L layers, K KV heads.
        slots_BL1 = np.array([self._addresses[block] for block in blocks], dtype=np.uint64)[..., None]
        home_L1 = np.array(addresses_L, dtype=np.uint64)[:, None]
        places = range(first_block, first_block + len(blocks))
        pieces = (
            (slab.page_offset, slab.page.size_bytes),
            (slab.plane_offset, slab.page.plane_bytes),
            (slab.residue_offset, slab.page.residues_bytes),
        )
        for offset, size_bytes in pieces:
            if size_bytes == 0:
                continue
            from_K = np.array([offset(0, head, blocks=1) for head in heads], dtype=np.uint64)
            to_BK = np.array([[offset(place, head, blocks=room_blocks) for head in heads] for place in places])
            self._copy(slots_BL1 + from_K, home_L1 + to_BK.astype(np.uint64)[:, None, :], size_bytes)

    def drop(self, block: int) -> None:
        """Give the room of a block back."""
        self._device.release(self._slots.pop(block))
        del self._addresses[block]

    def drop_from(self, block: int) -> None:
        """Give back the room of this block and of all behind it."""
        for held in [held for held in self._slots if held >= block]:
            self.drop(held)

    def close(self) -> None:
        """Give all room back."""
        self.drop_from(0)

    def _copy(self, source_BLK: NDArray[np.uint64], target_BLK: NDArray[np.uint64], size_bytes: int) -> None:
        """Copy pieces of the device's memory into the home's."""
        if self._device.arena.device.type == "cpu":
            native.copy_pages(source_BLK, target_BLK, size_bytes=size_bytes)
            return
        unit_bytes = math.gcd(size_bytes, _UNIT_BYTES)
        pieces = self._units(self._device, unit_bytes)[self._numbers(self._device, source_BLK, size_bytes, unit_bytes)]
        home = self._units(self._home, unit_bytes)
        home.index_copy_(0, self._numbers(self._home, target_BLK, size_bytes, unit_bytes), pieces.to(home.device))

    def _units(self, store: ArenaStore, unit_bytes: int) -> Tensor:
        arena = store.arena
        return arena[: arena.numel() // unit_bytes * unit_bytes].view(-1, unit_bytes)

    def _numbers(self, store: ArenaStore, addresses: NDArray[np.uint64], size_bytes: int, unit_bytes: int) -> Tensor:
        """Which of a store's units the pieces at these addresses are made of, piece by piece."""
        offsets = addresses.reshape(-1, 1).astype(np.int64) - store.arena.data_ptr()
        units = offsets // unit_bytes + np.arange(size_bytes // unit_bytes)
        return torch.from_numpy(units.reshape(-1)).to(store.arena.device)
