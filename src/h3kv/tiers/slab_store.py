"""What the tiers in memory have in common: slabs in one range of memory, copied by the processor."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from h3kv.core.errors import ConfigError, SlabBusyError, StaleHandleError, TierClosedError, TierFullError
from h3kv.core.layout import SlabLayout
from h3kv.core.types import Completion, Fetch, Move, SlabKey, SlotHandle, StoreStatistics, Tier
from h3kv.memory.buddy import UNIT_BLOCKS, extent_class
from h3kv.memory.copies import INTO_SLOT, OUT_OF_SLOT, CopyMeter
from h3kv.tiers.slots import SlotRoom


def count_units(layout: SlabLayout, capacity_bytes: int, *, tier: Tier) -> int:
    """How many units of 16 blocks fit under a tier's cap.

    Raises:
        ConfigError: not one does; the message has the sum.
    """
    unit_bytes = layout.size_bytes(UNIT_BLOCKS)
    if capacity_bytes < unit_bytes:
        raise ConfigError(
            f"the {tier} tier's cap of {capacity_bytes} bytes is below one unit: {UNIT_BLOCKS} blocks x "
            f"{layout.block_bytes} bytes = {unit_bytes} bytes; "
            f"raise {tier}.kv_bytes",
            field=f"{tier}.kv_bytes",
        )
    return capacity_bytes // unit_bytes


class SlabStore:
    """Slabs in one range of memory. Satisfies `AddressableStore`; subclasses say where the memory comes from.

    Bytes are copied before `submit` returns, so room can be handed out again at any time; slabs become visible and
    completions come in `poll` all the same. Labels are ignored: nothing here outlives the process.

    Args:
        layout: sizes of blocks.
        memory: uint8, all slots, on the tier's device. Gone from here after `close`.
        slots: hands out the room in it.
        tier: of the store.
    """

    def __init__(self, layout: SlabLayout, memory: Tensor, slots: SlotRoom, *, tier: Tier) -> None:
        self.tier = tier
        self._layout = layout
        self._memory: Tensor | None = memory
        self._address = memory.data_ptr()
        self._capacity_bytes = memory.numel()
        self._slots: SlotRoom | None = slots
        self._visible: dict[SlabKey, SlotHandle] = {}
        self._in_flight: dict[SlabKey, Move] = {}
        # Every submitted slab by its slot's offset: those in flight and those visible.
        self._slab_at: dict[int, SlabKey] = {}
        # Moves and fetches in the order in which they were submitted.
        self._ended: list[Move | Fetch] = []
        self._moves_total = 0
        self._bytes_moved_total = 0
        self.copies = CopyMeter()
        """Bytes that `submit` copied."""

    def reserve(self, blocks: Sequence[int]) -> list[SlotHandle]:
        """See `BlockStore.reserve`."""
        slots = self._open_slots()
        handles = slots.reserve(blocks)
        if handles is None:
            needed_bytes = self._layout.size_bytes(sum(map(extent_class, blocks)))
            free_bytes = self._layout.size_bytes(slots.free_blocks)
            raise TierFullError(
                f"{len(blocks)} slots with {needed_bytes} bytes do not fit: {free_bytes} of {self._capacity_bytes} "
                f"bytes are free, perhaps apart; release something first or raise {self.tier}.kv_bytes",
                tier=self.tier,
                needed_bytes=needed_bytes,
                free_bytes=free_bytes,
            )
        return handles

    def address(self, handle: SlotHandle) -> int:
        """See `AddressableStore.address`."""
        self._open_slots().validate(handle)
        return self._address + self._layout.size_bytes(handle.slot)

    def submit(self, moves: Sequence[Move | Fetch]) -> None:
        """See `BlockStore.submit`."""
        self._check_targets([move for move in moves if isinstance(move, Move)])
        for fetch in moves:
            if isinstance(fetch, Fetch):
                self._check_source(fetch)
        for move in moves:
            if isinstance(move, Fetch):
                self._copy_out(move)
            else:
                if move.source is not None:
                    self._copy_in(move.source, move.target)
                self._in_flight[move.key] = move
                self._slab_at[move.target.slot] = move.key
            self._ended.append(move)

    def poll(self) -> list[Completion]:
        """See `BlockStore.poll`. A move whose slot was released in between ends with StaleHandleError."""
        self._open_slots()
        ended, self._ended = self._ended, []
        self._in_flight.clear()
        return [Completion(move, self._publish(move) if isinstance(move, Move) else None) for move in ended]

    def wait(self, timeout_ns: int) -> None:
        """See `BlockStore.wait`. Returns at once: all that was submitted has ended."""
        assert timeout_ns >= 0
        self._open_slots()

    def lookup(self, key: SlabKey) -> SlotHandle | None:
        """See `BlockStore.lookup`."""
        self._open_slots()
        return self._visible.get(key)

    def release(self, handles: Sequence[SlotHandle]) -> None:
        """See `BlockStore.release`."""
        self._open_slots().release(handles)
        for handle in handles:
            key = self._slab_at.pop(handle.slot, None)
            if key is not None:
                self._visible.pop(key, None)

    def erase(self, handles: Sequence[SlotHandle]) -> None:
        """See `BlockStore.erase`."""
        for handle in handles:
            self._open_slots().validate(handle)
        for handle in handles:
            self._room(handle, self._layout.size_bytes(handle.blocks)).zero_()
        self.release(handles)

    def statistics(self) -> StoreStatistics:
        """See `BlockStore.statistics`."""
        return StoreStatistics(
            tier=self.tier,
            capacity_bytes=self._capacity_bytes,
            used_bytes=0 if self._slots is None else self._layout.size_bytes(self._slots.used_blocks),
            slabs_visible=len(self._visible),
            moves_total=self._moves_total,
            bytes_moved_total=self._bytes_moved_total,
        )

    def check_integrity(self) -> None:
        """See `BlockStore.check_integrity`."""
        if self._slots is None:
            return
        self._slots.check_integrity()
        for key, handle in self._visible.items():
            self._slots.validate(handle)
            assert self._slab_at[handle.slot] == key, f"slot {handle.slot} is named by two slabs"

    def close(self) -> None:
        """Let go of the memory. Addresses and views must no longer be used. Calling it again does nothing."""
        self._memory = None
        self._slots = None
        self._visible.clear()
        self._in_flight.clear()
        self._slab_at.clear()
        self._ended.clear()

    def _open_memory(self) -> Tensor:
        if self._memory is None:
            raise self._closed()
        return self._memory

    def _open_slots(self) -> SlotRoom:
        if self._slots is None:
            raise self._closed()
        return self._slots

    def _closed(self) -> TierClosedError:
        return TierClosedError(f"the {self.tier} tier was closed: open a new node", tier=self.tier)

    def _check_targets(self, moves: Sequence[Move]) -> None:
        slots = self._open_slots()
        started: dict[int, SlabKey] = {}
        keys: set[SlabKey] = set()
        for move in moves:
            slots.validate(move.target)
            slot, key = move.target.slot, move.key
            if key in self._visible or key in self._in_flight or key in keys:
                raise SlabBusyError(f"slab {key} is visible or in flight already", key=key)
            if slot in self._slab_at or slot in started:
                raise SlabBusyError(f"slot {slot} holds another slab than {key}", key=key)
            assert move.source is None or move.source.nbytes <= self._layout.size_bytes(move.target.blocks)
            started[slot] = key
            keys.add(key)

    def _check_source(self, fetch: Fetch) -> None:
        self._open_slots().validate(fetch.source)
        if self._visible.get(fetch.key) != fetch.source:
            raise SlabBusyError(f"slab {fetch.key} is not visible in slot {fetch.source.slot} yet", key=fetch.key)
        assert not fetch.target.readonly
        end_bytes = fetch.offset_bytes + fetch.target.nbytes
        assert fetch.offset_bytes >= 0 and end_bytes <= self._layout.size_bytes(fetch.source.blocks)
        check_bytes = self._layout.check_bytes
        assert fetch.offset_bytes % check_bytes == fetch.target.nbytes % check_bytes == 0, "a fetch takes whole pieces"

    def _publish(self, move: Move) -> StaleHandleError | None:
        try:
            self._open_slots().validate(move.target)
        except StaleHandleError as error:
            return error
        self._visible[move.key] = move.target
        self._moves_total += 1
        self._bytes_moved_total += 0 if move.source is None else move.source.nbytes
        return None

    def _room(self, handle: SlotHandle, size_bytes: int, *, offset_bytes: int = 0) -> Tensor:
        """Some bytes of a slot."""
        start = self._layout.size_bytes(handle.slot) + offset_bytes
        return self._open_memory()[start : start + size_bytes]

    def _copy_in(self, source: memoryview, target: SlotHandle) -> None:
        room = self._room(target, source.nbytes)
        self.copies.count(INTO_SLOT, source.nbytes)
        if room.device.type == "cpu":
            room.numpy()[:] = np.frombuffer(source, dtype=np.uint8)
        else:
            room.copy_(torch.frombuffer(bytearray(source), dtype=torch.uint8))

    def _copy_out(self, fetch: Fetch) -> None:
        room = self._room(fetch.source, fetch.target.nbytes, offset_bytes=fetch.offset_bytes)
        self.copies.count(OUT_OF_SLOT, fetch.target.nbytes)
        if room.device.type == "cpu":
            np.frombuffer(fetch.target, dtype=np.uint8)[:] = room.numpy()
        else:
            torch.frombuffer(fetch.target, dtype=torch.uint8).copy_(room)
