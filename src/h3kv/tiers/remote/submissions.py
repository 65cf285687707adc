"""What a client asks for, checked: sizes and handles of its own, memory that it leases.

What no honest client sends raises RequestError, and its channel is ended. What may happen to an honest one (a slab that
went meanwhile) is an error of that request alone.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from h3kv.core.errors import H3Error, RequestError, SlabBusyError, StaleHandleError
from h3kv.core.hashing import KEY_BYTES
from h3kv.core.limits import DIRECT_IO_BYTES, EXTENT_CLASSES_BLOCKS, SEGMENT_BLOCKS_MAX
from h3kv.core.types import BlockKey, Fetch, Move, SegmentLabel, SlabKey, SlotHandle
from h3kv.tiers.cold import ColdStore
from h3kv.tiers.cold.unit_reads import UNIT_READ_DTYPE
from h3kv.tiers.remote import records
from h3kv.tiers.remote.leased_memory import LeasedMemory, Units
from h3kv.tiers.remote.ownership import OwnedSegment, Ownership
from h3kv.tiers.remote.records import FETCH_DTYPE, HANDLE_DTYPE, WRITE_DTYPE, Record

LISTS_MAX: Final = 1024
"""Lists of slabs of one client: as many as the layers of some sequences. One more, and all before are forgotten."""
SEGMENTS_MAX: Final = 1024
"""In one reservation."""

_LIST_NUMBER: Final = np.dtype("<u8")


@dataclass(frozen=True, slots=True, eq=False)
class SlabList:
    """Slabs that reads count in."""

    handles: tuple[SlotHandle, ...]
    sizes_S: NDArray[np.uint64]
    """Bytes that were written of each."""
    error: H3Error | None
    """Why none of them can be read, where one cannot."""


class Submissions:
    """Turns records into what the store takes. Starts nothing."""

    def __init__(self, store: ColdStore, ownership: Ownership, memory: LeasedMemory) -> None:
        self._store = store
        self._ownership = ownership
        self._memory = memory
        mark = store.layout.mark
        self._layers, self._check_bytes, self._block_bytes = mark.layers, mark.check_bytes, mark.block_bytes

    def reserve(self, holder: int, record: Record) -> bytes:
        """HANDLE_DTYPE of the first slab of each segment that room was taken for. Raises as `BlockStore.reserve`."""
        sizes = bytes(record.body)
        if len(sizes) != record.count or record.count > SEGMENTS_MAX or not set(sizes) <= set(EXTENT_CLASSES_BLOCKS):
            raise RequestError("a reservation names sizes that no segment has")
        handles = self._store.reserve([size for size in sizes for _ in range(self._layers)])
        firsts = handles[:: self._layers]
        for at in range(0, len(handles), self._layers):
            self._ownership.give(holder, tuple(handles[at : at + self._layers]))
        return records.handle_rows(firsts)

    def write(self, holder: int, record: Record) -> tuple[OwnedSegment, list[Move], Units]:
        """The moves of one segment, and the units that they read."""
        keys_bytes = record.count * KEY_BYTES
        addresses_end = WRITE_DTYPE.itemsize + 8 * self._layers
        if record.count > SEGMENT_BLOCKS_MAX or len(record.body) != addresses_end + KEY_BYTES + keys_bytes:
            raise RequestError("a move is not as long as its segment makes it")
        slot, generation, blocks, has_label, size = np.frombuffer(record.body, WRITE_DTYPE, count=1)[0].item()
        owned, layer = self._ownership.find(holder, SlotHandle(self._store.tier, slot, blocks, generation))
        room = blocks * self._block_bytes
        if layer != 0 or size > room or size % self._check_bytes or has_label not in {0, 1} or has_label > record.count:
            raise RequestError("a move does not fit its slot")
        if owned.left < self._layers:
            raise StaleHandleError(f"a slab of the segment at slot {slot} was released")
        addresses_L = np.frombuffer(record.body, "<u8", count=self._layers, offset=WRITE_DTYPE.itemsize)
        units = self._find(holder, addresses_L, np.full(self._layers, size, dtype=np.uint64))
        label = None
        if has_label:
            tail = bytes(record.body[addresses_end:])
            keys = [BlockKey(tail[at : at + KEY_BYTES]) for at in range(KEY_BYTES, len(tail), KEY_BYTES)]
            label = SegmentLabel(tuple(keys), BlockKey(tail[:KEY_BYTES]))
        moves = [
            Move(SlabKey(owned.segment, at), handle, self._memory.view(address, size), label)
            for at, (handle, address) in enumerate(zip(owned.handles_L, addresses_L.tolist(), strict=True))
        ]
        return owned, moves, units

    def fetches(self, holder: int, record: Record) -> Iterator[tuple[Fetch | H3Error, Units]]:
        """Each fetch with the units that it writes, or why it cannot be."""
        rows = records.items(record, FETCH_DTYPE)
        for slot, generation, blocks, _, offset, address, size in rows.tolist():
            end = offset + size
            if offset % self._check_bytes or size % self._check_bytes or end > blocks * self._block_bytes:
                raise RequestError("a fetch is not of whole units of its slab")
            try:
                handle = SlotHandle(self._store.tier, slot, blocks, generation)
                owned, layer = self._ownership.find(holder, handle)
            except StaleHandleError as error:
                yield error, []
                continue
            units = self._find(holder, np.array([address], dtype=np.uint64), np.array([size], dtype=np.uint64))
            target = self._memory.view(address, size)
            yield Fetch(SlabKey(owned.segment, layer), handle, target, offset), units

    def note_slabs(self, holder: int, lists: dict[int, SlabList], record: Record) -> None:
        """Remember a list of slabs under its number."""
        handles = records.read_handles(records.items(record, HANDLE_DTYPE))
        sizes_S = np.zeros(len(handles), dtype=np.uint64)
        error: H3Error | None = None
        try:
            for at, handle in enumerate(handles):
                owned, layer = self._ownership.find(holder, handle)
                if not owned.is_written:
                    key = SlabKey(owned.segment, layer)
                    raise SlabBusyError(f"slab {key} is not visible yet", key=key)
                if self._store.is_wrapped(handle):
                    raise StaleHandleError("a wrapped slab is read whole")
                sizes_S[at] = self._store.written_bytes(handle)
        except H3Error as fault:
            error = fault
        if len(lists) >= LISTS_MAX:
            lists.clear()
        lists[record.number] = SlabList(tuple(handles), sizes_S, error)

    def units(
        self, holder: int, lists: dict[int, SlabList], record: Record
    ) -> tuple[SlabList, NDArray[np.void], Units]:
        """The slabs and reads of a call, the reads as a copy, and the units that they write."""
        reads_N = records.items(record, UNIT_READ_DTYPE, offset=_LIST_NUMBER.itemsize).copy()
        slabs = lists.get(int.from_bytes(record.body[: _LIST_NUMBER.itemsize], "little"))
        if slabs is None:
            raise RequestError("reads of a list of slabs that was never sent")
        if slabs.error is not None:
            raise slabs.error
        if not records.are_sound_reads(reads_N, slabs.sizes_S, check_bytes=self._check_bytes, align=DIRECT_IO_BYTES):
            raise RequestError("a read goes beyond what was written, or is not of whole units at whole sectors")
        units = self._find(holder, reads_N["target"], reads_N["size"].astype(np.uint64)) if reads_N.size else []
        return slabs, reads_N, units

    def _find(self, holder: int, addresses_N: NDArray[Any], sizes_N: NDArray[Any]) -> Units:
        units = self._memory.find(holder, addresses_N, sizes_N)
        if units is None:
            raise RequestError("an address lies in no unit that this client leases")
        return units
