"""The device tier: a bounded pool of slabs in the memory that attention reads."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from h3kv.core.errors import ConfigError, SlabBusyError, StaleHandleError, TierClosedError, TierFullError
from h3kv.core.layout import SlabLayout
from h3kv.core.types import Completion, Move, SlabKey, SlotHandle, StoreStatistics, Tier
from h3kv.memory.arena import allocate_arena
from h3kv.memory.buddy import UNIT_BLOCKS, extent_class
from h3kv.tiers.slots import SlotTable


@dataclass(frozen=True, slots=True)
class DeviceStoreConfig:
    """Size and place of the device tier."""

    capacity_bytes: int
    """Cap of the tier in total. Rounded down to whole units of 16 blocks of one layer."""
    device: str = "cpu"
    """Where the bytes lie, as torch names it."""


def _units(layout: SlabLayout, capacity_bytes: int) -> int:
    """How many units of 16 blocks fit under the cap."""
    unit_bytes = layout.size_bytes(UNIT_BLOCKS)
    if capacity_bytes < unit_bytes:
        raise ConfigError(
            f"the device tier's cap of {capacity_bytes} bytes is below one unit: {UNIT_BLOCKS} blocks x "
            f"{layout.kv_heads} KV heads x {layout.page.size_bytes} bytes a page = {unit_bytes} bytes; "
            "raise device.kv_bytes",
            field="device.kv_bytes",
        )
    return capacity_bytes // unit_bytes


class DeviceStore:
    """Slabs in one arena on a device; with device `cpu`, in main memory.

    Satisfies `BlockStore`. Copies end before `submit` returns; their slabs still become visible in `poll` only.
    """

    tier = Tier.DEVICE

    def __init__(self, layout: SlabLayout, config: DeviceStoreConfig) -> None:
        """Take the address range for the whole cap. Main memory is committed page by page as it is first written.

        Raises:
            ConfigError: the cap is below one unit; the message has the sum.
            HostMemoryError: the system refuses that much.
        """
        units = _units(layout, config.capacity_bytes)
        self._layout = layout
        self._capacity_bytes = units * layout.size_bytes(UNIT_BLOCKS)
        # First of all: a cap beyond the machine must not cost the bookkeeping for it.
        self._arena: Tensor | None = allocate_arena(self._capacity_bytes, torch.device(config.device))
        self._slots = SlotTable(self.tier, units=units)
        self._visible: dict[SlabKey, SlotHandle] = {}
        self._in_flight: dict[SlabKey, Move] = {}
        # Every submitted slab by its slot's offset: those in flight and those visible.
        self._slab_at: dict[int, SlabKey] = {}
        self._moves_total = 0
        self._bytes_moved_total = 0

    @property
    def arena(self) -> Tensor:
        """The store's memory, uint8, on its device. Slots lie at multiples of the block size from its start."""
        if self._arena is None:
            raise TierClosedError("the device tier was closed: open a new node", tier=self.tier)
        return self._arena

    def reserve(self, blocks: Sequence[int]) -> list[SlotHandle]:
        """See `BlockStore.reserve`."""
        self._check_open()
        handles = self._slots.reserve(blocks)
        if handles is None:
            needed_bytes = self._layout.size_bytes(sum(map(extent_class, blocks)))
            free_bytes = self._layout.size_bytes(self._slots.free_blocks)
            raise TierFullError(
                f"{len(blocks)} slots with {needed_bytes} bytes do not fit: {free_bytes} of {self._capacity_bytes} "
                "bytes are free, perhaps apart; release something first or raise device.kv_bytes",
                tier=self.tier,
                needed_bytes=needed_bytes,
                free_bytes=free_bytes,
            )
        return handles

    def address(self, handle: SlotHandle) -> int:
        """See `BlockStore.address`."""
        arena = self.arena
        self._slots.validate(handle)
        return arena.data_ptr() + self._layout.size_bytes(handle.slot)

    def submit(self, moves: Sequence[Move]) -> None:
        """See `BlockStore.submit`."""
        self._check_open()
        started: dict[int, SlabKey] = {}
        for move in moves:
            self._slots.validate(move.target)
            slot, key = move.target.slot, move.key
            if key in self._visible or key in self._in_flight or key in started.values():
                raise SlabBusyError(f"slab {key} is visible or in flight already", key=key)
            if slot in self._slab_at or slot in started:
                raise SlabBusyError(f"slot {slot} holds another slab than {key}", key=key)
            assert move.source is None or move.source.nbytes <= self._layout.size_bytes(move.target.blocks)
            started[slot] = key
        for move in moves:
            if move.source is not None:
                self._copy(move.source, move.target)
            self._in_flight[move.key] = move
        self._slab_at.update(started)

    def poll(self) -> list[Completion]:
        """See `BlockStore.poll`. A move whose slot was released in between ends with StaleHandleError."""
        self._check_open()
        completions: list[Completion] = []
        for key, move in self._in_flight.items():
            try:
                self._slots.validate(move.target)
            except StaleHandleError as error:
                completions.append(Completion(move, error))
                continue
            self._visible[key] = move.target
            self._moves_total += 1
            self._bytes_moved_total += 0 if move.source is None else move.source.nbytes
            completions.append(Completion(move, None))
        self._in_flight.clear()
        return completions

    def lookup(self, key: SlabKey) -> SlotHandle | None:
        """See `BlockStore.lookup`."""
        self._check_open()
        return self._visible.get(key)

    def release(self, handles: Sequence[SlotHandle]) -> None:
        """See `BlockStore.release`."""
        self._check_open()
        self._slots.release(handles)
        for handle in handles:
            key = self._slab_at.pop(handle.slot, None)
            if key is not None:
                self._visible.pop(key, None)

    def statistics(self) -> StoreStatistics:
        """See `BlockStore.statistics`."""
        return StoreStatistics(
            tier=self.tier,
            capacity_bytes=self._capacity_bytes,
            used_bytes=self._layout.size_bytes(self._slots.used_blocks),
            slabs_visible=len(self._visible),
            moves_total=self._moves_total,
            bytes_moved_total=self._bytes_moved_total,
        )

    def check_integrity(self) -> None:
        """See `BlockStore.check_integrity`."""
        self._slots.check_integrity()
        for handle in self._visible.values():
            self._slots.validate(handle)
            assert handle.slot in self._slab_at
        assert len({handle.slot for handle in self._visible.values()}) == len(self._visible), "two slabs share a slot"

    def close(self) -> None:
        """Give the memory back. Addresses and tensors over the arena must no longer be used."""
        self._arena = None
        self._visible.clear()
        self._in_flight.clear()
        self._slab_at.clear()

    def _check_open(self) -> None:
        _ = self.arena

    def _copy(self, source: memoryview, target: SlotHandle) -> None:
        start = self._layout.size_bytes(target.slot)
        room = self.arena[start : start + source.nbytes]
        if room.device.type == "cpu":
            room.numpy()[:] = np.frombuffer(source, dtype=np.uint8)
        else:
            room.copy_(torch.frombuffer(bytearray(source), dtype=torch.uint8))
