"""Slabs on their way from the disk into memory, each piece checked."""

from __future__ import annotations

import mmap
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final, TypeAlias

import numpy as np

from h3kv.core.limits import SEGMENT_BLOCKS_MAX
from h3kv.core.types import Fetch
from h3kv.memory.copies import CopyMeter
from h3kv.tiers.cold.codec import Codec, Job
from h3kv.tiers.cold.data_writes import DataWrites
from h3kv.tiers.cold.extents import Extent
from h3kv.tiers.cold.geometry import AreaGeometry
from h3kv.tiers.cold.ops import Op, Outcome, address_of
from h3kv.tiers.cold.record import SECTOR_BYTES
from h3kv.tiers.cold.slab_memory import SlabMemory
from h3kv.tiers.cold.wrap import unwrap
from h3kv.tiers.io import CHECKSUM_MISMATCH, ERROR, READ

BESIDE_SLOT: Final = "beside_slot"
"""A way of `CopyMeter`: from where the device could write to where the bytes are wanted."""
LANDING_BYTES: Final = 64 << 20
"""Room for slabs that cannot land where they are wanted: wrapped ones, and those whose target is not aligned."""

Read: TypeAlias = tuple[Op, Callable[[Outcome], None]]
"""An op and what is done with its outcome."""


@dataclass(slots=True, eq=False)
class _Pending:
    number: int
    fetch: Fetch
    extent: Extent
    layer: int
    size: int = 0
    """Bytes of the slab that were asked for and are there."""
    copy: mmap.mmap | None = None
    """Where the bytes land first, if they cannot land in the target."""
    wrapped: int = 0
    """Bytes that stand for the whole slab, or 0: it is stored as it is."""
    is_unwrapped: bool = False
    fault: Outcome | None = None


class Fetches:
    """Starts reads and collects their ends.

    Args:
        writes: knows where slabs lie.
        geometry: of the model's areas.
        codec: unwraps what was wrapped.
        element: bytes of one element of a slab.
    """

    def __init__(self, writes: DataWrites, geometry: AreaGeometry, codec: Codec, *, element: int) -> None:
        self._writes = writes
        self._geometry = geometry
        self._codec = codec
        self._element = element
        self._started = 0
        self._ended: list[_Pending] = []
        self._to_land: deque[_Pending] = deque()
        self._landing = SlabMemory(geometry.slab_bytes(SEGMENT_BLOCKS_MAX), kept_bytes=LANDING_BYTES)
        self._landing_left = max(1, LANDING_BYTES // self._landing.slab_bytes)
        """Slabs for which there is room to land."""
        self._to_unwrap: list[_Pending] = []
        self.read_bytes = 0
        """In total, by reads that brought what was written."""
        self.copies = CopyMeter()
        """Bytes that the processor copied: none of a slab that is stored as it is and lands where it is wanted."""

    @property
    def has_ended(self) -> bool:
        """Whether `ended` would give something."""
        return bool(self._ended)

    def read(self, fetch: Fetch, extent: Extent, layer: int) -> Read | None:
        """The op that begins a fetch and what its end does; None where there is nothing to read yet."""
        self._started += 1
        extent.fetches += 1
        check_bytes = self._geometry.mark.check_bytes
        pending = _Pending(self._started, fetch, extent, layer)
        pending.size = size = min(fetch.target.nbytes, extent.pieces * check_bytes - fetch.offset_bytes)
        if size <= 0:
            self._ended.append(pending)
            return None
        pending.wrapped = int(extent.wrapped_L[layer])
        address = address_of(fetch.target)
        if address % SECTOR_BYTES or pending.wrapped:
            self._to_land.append(pending)
            return None
        return self._read(pending, address)

    def land(self) -> list[Read]:
        """Reads whose bytes land beside their place, as many as there is room for now."""
        reads = []
        while self._to_land and self._landing_left:
            pending = self._to_land.popleft()
            try:
                pending.copy = self._landing.take()
            except (MemoryError, OSError):
                pending.fault = Outcome(ERROR, "no memory to read it: free memory")
                self._ended.append(pending)
                continue
            self._landing_left -= 1
            reads.append(self._read(pending, address_of(pending.copy)))
        return reads

    def hand_over(self) -> None:
        """Give the codec what was read since the last call and is wrapped."""
        if self._to_unwrap:
            self._codec.start(_UnwrapJob(self, self._to_unwrap))
            self._to_unwrap = []

    def ended(self) -> list[tuple[Fetch, Extent, Outcome | None]]:
        """Reads that ended since the last call, in the order in which they began; each with its fault."""
        ended, self._ended = sorted(self._ended, key=lambda pending: pending.number), []
        for pending in ended:
            pending.extent.fetches -= 1
        return [(pending.fetch, pending.extent, pending.fault) for pending in ended]

    def unwrap(self, pending: _Pending) -> None:
        """Put the wrapped bytes that were read in their place. On any thread."""
        fetch, size = pending.fetch, pending.extent.pieces * self._geometry.mark.check_bytes
        assert pending.copy is not None, "what is wrapped lands beside its place"
        stored, room = memoryview(pending.copy)[: pending.wrapped], fetch.target.cast("B")[: pending.size]
        is_part = pending.size < size
        try:
            whole = memoryview(bytearray(size)) if is_part else room
            if not unwrap(stored, whole, element=self._element, copies=self.copies):
                pending.fault = Outcome(CHECKSUM_MISMATCH, "it cannot be unwrapped")
                return
        except MemoryError:
            pending.fault = Outcome(ERROR, "no memory to unwrap it: free memory")
            return
        if is_part:
            room[:] = whole[fetch.offset_bytes : fetch.offset_bytes + pending.size]
            self.copies.count(BESIDE_SLOT, pending.size)
        pending.is_unwrapped = True

    def note_unwrapped(self, pending: Sequence[_Pending]) -> None:
        """These were put in their place, or cannot be."""
        for each in pending:
            if not each.is_unwrapped and each.fault is None:
                each.fault = Outcome(ERROR, "it could not be unwrapped")
            self._end_landed(each)

    def _read(self, pending: _Pending, address: int) -> Read:
        extent, layer, check_bytes = pending.extent, pending.layer, self._geometry.mark.check_bytes
        offset, size = pending.fetch.offset_bytes, pending.size
        if pending.wrapped:
            offset, size = 0, self._geometry.pieces_in(pending.wrapped) * check_bytes
        op = Op(
            kind=READ,
            offset=self._writes.slab_offset(extent, layer) + offset,
            address=address,
            size=size,
            crcs=extent.crcs_address(layer, offset // check_bytes),
            page_bytes=check_bytes,
            keep=(pending.fetch.target, pending.copy),
        )
        return op, lambda outcome: self._end(pending, outcome, size)

    def _end(self, pending: _Pending, outcome: Outcome, size: int) -> None:
        if outcome.is_good:
            self.read_bytes += size
            if pending.wrapped:
                self._to_unwrap.append(pending)
                return
            if pending.copy is not None:
                # Not by a slice of the mapping: that would be a copy more.
                target_N = np.frombuffer(pending.fetch.target.cast("B"), dtype=np.uint8, count=size)
                np.copyto(target_N, np.frombuffer(pending.copy, dtype=np.uint8, count=size))
                self.copies.count(BESIDE_SLOT, size)
        else:
            pending.fault = outcome
        self._end_landed(pending)

    def _end_landed(self, pending: _Pending) -> None:
        if pending.copy is not None:
            self._landing.give_back(pending.copy)
            self._landing_left += 1
            pending.copy = None
        self._ended.append(pending)


class _UnwrapJob(Job):
    def __init__(self, fetches: Fetches, pending: list[_Pending]) -> None:
        self._fetches = fetches
        self._pending = pending

    def run(self) -> None:
        for pending in self._pending:
            self._fetches.unwrap(pending)

    def end(self) -> None:
        self._fetches.note_unwrapped(self._pending)
