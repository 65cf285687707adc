"""Slabs on their way from the disk into memory, each piece checked."""

from __future__ import annotations

import mmap
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

from h3kv.core.types import Fetch
from h3kv.memory.copies import CopyMeter
from h3kv.tiers.cold.codec import Codec, Job
from h3kv.tiers.cold.data_writes import DataWrites
from h3kv.tiers.cold.extents import Extent
from h3kv.tiers.cold.geometry import AreaGeometry
from h3kv.tiers.cold.ops import Op, Outcome, address_of, aligned_memory
from h3kv.tiers.cold.record import SECTOR_BYTES
from h3kv.tiers.cold.wrap import unwrap
from h3kv.tiers.io import CHECKSUM_MISMATCH, ERROR, READ

BESIDE_SLOT: Final = "beside_slot"
"""A way of `CopyMeter`: from where the device could write to where the bytes are wanted."""


@dataclass(slots=True, eq=False)
class _Pending:
    number: int
    fetch: Fetch
    extent: Extent
    size: int = 0
    """Bytes of the slab that were asked for and are there."""
    copy: mmap.mmap | None = None
    """Where the bytes land first, if they cannot land in the target."""
    wrapped: int = 0
    """Bytes that stand for the whole slab, or 0: it is stored as it is."""
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
        self._to_unwrap: list[_Pending] = []
        self.read_bytes = 0
        """In total, by reads that brought what was written."""
        self.copies = CopyMeter()
        """Bytes that the processor copied: none of a slab that is stored as it is and lands where it is wanted."""

    @property
    def has_ended(self) -> bool:
        """Whether `ended` would give something."""
        return bool(self._ended)

    def read(self, fetch: Fetch, extent: Extent, layer: int) -> tuple[Op, Callable[[Outcome], None]] | None:
        """The op that begins a fetch and what its end does; None where there is nothing to read."""
        self._started += 1
        extent.fetches += 1
        check_bytes = self._geometry.mark.check_bytes
        offset, pending = fetch.offset_bytes, _Pending(self._started, fetch, extent)
        pending.size = size = min(fetch.target.nbytes, extent.pieces * check_bytes - offset)
        if size <= 0:
            self._ended.append(pending)
            return None
        pending.wrapped = int(extent.wrapped_L[layer])
        if pending.wrapped:
            offset, size = 0, self._geometry.pieces_in(pending.wrapped) * check_bytes
        address = address_of(fetch.target)
        if address % SECTOR_BYTES or size > fetch.target.nbytes or pending.wrapped:
            pending.copy = aligned_memory(size)
            address = address_of(pending.copy)
        op = Op(
            kind=READ,
            offset=self._writes.slab_offset(extent, layer) + offset,
            address=address,
            size=size,
            crcs=extent.crcs_address(layer, offset // check_bytes),
            page_bytes=check_bytes,
            keep=(fetch.target, pending.copy),
        )
        return op, lambda outcome: self._end(pending, outcome, size)

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
        try:
            is_part = pending.size < size
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
        pending.copy = None

    def note_unwrapped(self, pending: Sequence[_Pending]) -> None:
        """These were put in their place, or cannot be."""
        self._ended += pending

    def _end(self, pending: _Pending, outcome: Outcome, size: int) -> None:
        if not outcome.is_good:
            pending.fault = outcome
        else:
            self.read_bytes += size
            if pending.wrapped:
                self._to_unwrap.append(pending)
                return
            if pending.copy is not None:
                pending.fetch.target.cast("B")[:size] = pending.copy[:size]
                self.copies.count(BESIDE_SLOT, size)
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
