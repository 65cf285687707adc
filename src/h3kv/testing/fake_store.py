"""A store of slabs in a dict: obvious, slow, and late. The reference for the conformance suite."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass

from h3kv.core.errors import SlabBusyError, StaleHandleError, TierClosedError, TierFullError
from h3kv.core.layout import SlabLayout
from h3kv.core.types import Completion, Fetch, Move, SlabKey, SlotHandle, StoreStatistics, Tier
from h3kv.memory.buddy import extent_class


@dataclass
class _Slot:
    handle: SlotHandle
    memory: bytearray
    slab: SlabKey | None = None


@dataclass
class _InFlight:
    end: int
    """Number of the poll that ends it."""
    work: Move | Fetch
    slot: _Slot


class FakeStore:
    """Satisfies `AddressableStore`. Each slot is a bytearray of its own and no slot number is used twice.

    Args:
        layout: sizes of blocks.
        capacity_blocks: cap, counted in extent classes.
        latency_polls: how many calls of `poll` a move or fetch needs to end; 1 ends it in the next call.
        tier: which one it plays.
    """

    def __init__(
        self, layout: SlabLayout, *, capacity_blocks: int, latency_polls: int = 1, tier: Tier = Tier.DEVICE
    ) -> None:
        self.tier = tier
        self._layout = layout
        self._capacity_blocks = capacity_blocks
        self._latency_polls = latency_polls
        self._slots: dict[int, _Slot] = {}
        self._next_slot = 0
        self._in_flight: list[_InFlight] = []
        self._visible: dict[SlabKey, SlotHandle] = {}
        self._polls = 0
        self._moves_total = 0
        self._bytes_moved_total = 0
        self._closed = False

    def reserve(self, blocks: Sequence[int]) -> list[SlotHandle]:
        """See `BlockStore.reserve`."""
        self._check_open()
        needed = sum(map(extent_class, blocks))
        free = self._capacity_blocks - self._used_blocks()
        if needed > free:
            raise TierFullError(
                f"{needed} blocks do not fit into {free}: release something first",
                tier=self.tier,
                needed_bytes=self._layout.size_bytes(needed),
                free_bytes=self._layout.size_bytes(free),
            )
        return [self._open_slot(extent_class(size)) for size in blocks]

    def address(self, handle: SlotHandle) -> int:
        """See `AddressableStore.address`."""
        memory = self._slot(handle).memory
        return ctypes.addressof(ctypes.c_char.from_buffer(memory))

    def submit(self, moves: Sequence[Move | Fetch]) -> None:
        """See `BlockStore.submit`."""
        self._check_open()
        busy = {slot.slab for slot in self._slots.values()}
        busy |= {each.work.key for each in self._in_flight if isinstance(each.work, Move)}
        started: list[_InFlight] = []
        for work in moves:
            slot = self._slot(work.target if isinstance(work, Move) else work.source)
            if isinstance(work, Fetch):
                if self._visible.get(work.key) != work.source:
                    raise SlabBusyError(f"slab {work.key} is not visible there", key=work.key)
                check_bytes = self._layout.check_bytes
                assert 0 <= work.offset_bytes <= len(slot.memory) - work.target.nbytes
                assert work.offset_bytes % check_bytes == work.target.nbytes % check_bytes == 0
            elif work.key in busy or slot.slab is not None or any(slot is each.slot for each in started):
                raise SlabBusyError(f"slab {work.key} or its slot is taken", key=work.key)
            else:
                busy.add(work.key)
            started.append(_InFlight(self._polls + self._latency_polls, work, slot))
        for each in started:
            if isinstance(each.work, Move):
                each.slot.slab = each.work.key
                if each.work.source is not None:
                    each.slot.memory[: each.work.source.nbytes] = each.work.source
        self._in_flight += started

    def poll(self) -> list[Completion]:
        """See `BlockStore.poll`."""
        self._check_open()
        self._polls += 1
        due = [each for each in self._in_flight if each.end <= self._polls]
        self._in_flight = [each for each in self._in_flight if each.end > self._polls]
        return [Completion(each.work, self._end(each)) for each in due]

    def wait(self, timeout_ns: int) -> None:
        """See `BlockStore.wait`. Returns at once: only polls pass time here."""
        assert timeout_ns >= 0
        self._check_open()

    def lookup(self, key: SlabKey) -> SlotHandle | None:
        """See `BlockStore.lookup`."""
        self._check_open()
        return self._visible.get(key)

    def release(self, handles: Sequence[SlotHandle]) -> None:
        """See `BlockStore.release`."""
        self._check_open()
        slots = [self._slot(handle) for handle in handles]
        if len({slot.handle.slot for slot in slots}) < len(slots):
            raise StaleHandleError("a slot comes twice")
        for slot in slots:
            if slot.slab is not None:
                self._visible.pop(slot.slab, None)
            del self._slots[slot.handle.slot]

    def erase(self, handles: Sequence[SlotHandle]) -> None:
        """See `BlockStore.erase`."""
        slots = [self._slot(handle) for handle in handles]
        self.release(handles)
        for slot in slots:
            # What a fetch still reads is reached by nobody else.
            if not any(each.slot is slot for each in self._in_flight):
                slot.memory[:] = bytes(len(slot.memory))

    def statistics(self) -> StoreStatistics:
        """See `BlockStore.statistics`."""
        return StoreStatistics(
            tier=self.tier,
            capacity_bytes=self._layout.size_bytes(self._capacity_blocks),
            used_bytes=self._layout.size_bytes(self._used_blocks()),
            slabs_visible=len(self._visible),
            moves_total=self._moves_total,
            bytes_moved_total=self._bytes_moved_total,
        )

    def check_integrity(self) -> None:
        """See `BlockStore.check_integrity`."""
        assert self._used_blocks() <= self._capacity_blocks
        for key, handle in self._visible.items():
            assert self._slots[handle.slot].slab == key
            assert self._slots[handle.slot].handle == handle

    def close(self) -> None:
        """See `BlockStore.close`."""
        self._closed = True
        self._slots.clear()
        self._visible.clear()
        self._in_flight.clear()

    def _end(self, ended: _InFlight) -> StaleHandleError | None:
        work = ended.work
        if isinstance(work, Fetch):
            # The slot lives on here if it was released, and nothing can have been written into it since.
            start = work.offset_bytes
            work.target[:] = memoryview(ended.slot.memory)[start : start + work.target.nbytes]
            return None
        if self._slots.get(work.target.slot) is not ended.slot:
            return StaleHandleError("the slot was released while its move was in flight")
        self._visible[work.key] = work.target
        self._moves_total += 1
        self._bytes_moved_total += 0 if work.source is None else work.source.nbytes
        return None

    def _open_slot(self, size: int) -> SlotHandle:
        handle = SlotHandle(self.tier, self._next_slot, size, generation=0)
        self._slots[handle.slot] = _Slot(handle, bytearray(self._layout.size_bytes(size)))
        self._next_slot += 1
        return handle

    def _slot(self, handle: SlotHandle) -> _Slot:
        self._check_open()
        slot = self._slots.get(handle.slot)
        if slot is None or slot.handle != handle:
            raise StaleHandleError(f"slot {handle.slot} was released: look the slab up again")
        return slot

    def _used_blocks(self) -> int:
        return sum(slot.handle.blocks for slot in self._slots.values())

    def _check_open(self) -> None:
        if self._closed:
            raise TierClosedError("the fake store was closed", tier=self.tier)
