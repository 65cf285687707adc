"""The writes of a segment's slabs, as they are or wrapped."""

from __future__ import annotations

import mmap
from collections.abc import Callable
from typing import Final

import numpy as np

from h3kv.core.limits import SEGMENT_BLOCKS_MAX
from h3kv.core.types import Move
from h3kv.tiers.cold.codec import Job
from h3kv.tiers.cold.extents import Extent
from h3kv.tiers.cold.geometry import AreaGeometry
from h3kv.tiers.cold.ops import Op, address_of, array_of
from h3kv.tiers.cold.record import SECTOR_BYTES
from h3kv.tiers.cold.slab_memory import SlabMemory
from h3kv.tiers.cold.volume import Volume
from h3kv.tiers.cold.wrap import wrap
from h3kv.tiers.io import OP_DTYPE, WRITE

WRAPPED_BYTES: Final = 64 << 20
"""Of data in one batch where segments are wrapped, unless one of them is larger: their copies take as much memory, and
keep it."""


class DataWrites:
    """Makes the ops of extents whose slabs were all submitted; one op for each slab.

    Args:
        volume: where they go.
        geometry: of the model's areas.
        element: bytes of one element of a slab.
    """

    def __init__(self, volume: Volume, geometry: AreaGeometry, *, element: int) -> None:
        self._geometry = geometry
        self._element = element
        # Sizes that each slab needs: a geometry works them out anew each time.
        self._area_blocks = geometry.blocks
        self._first = volume.geometry.area_offset(0) + geometry.slab_offset(0, 0, blocks=1)
        self._area_bytes = volume.geometry.area_bytes
        self._block_bytes = geometry.block_bytes
        self.memory = SlabMemory(geometry.slab_bytes(SEGMENT_BLOCKS_MAX), kept_bytes=WRAPPED_BYTES)
        """Of slabs that were wrapped, or were not aligned, until they are written."""

    def slab_offset(self, extent: Extent, layer: int) -> int:
        """Where a slab lies in the volume."""
        area, block = divmod(extent.block, self._area_blocks)
        slab = layer * extent.blocks * self._geometry.mark.block_bytes
        return self._first + area * self._area_bytes + block * self._block_bytes + slab

    def plain(self, extent: Extent) -> list[Op]:
        """Writes of the slabs as they are. Sources that are not aligned are copied first."""
        return [self._plain(extent, layer, move) for layer, move in extent.moves.items()]

    def wrapped(self, extent: Extent) -> list[Op]:
        """Writes of the slabs wrapped, those that take fewer pieces so; `wrapped_L` says which. On any thread."""
        return [self._wrapped(extent, layer, move) for layer, move in extent.moves.items()]

    def _plain(self, extent: Extent, layer: int, move: Move) -> Op:
        assert move.source is not None
        size = extent.pieces * self._geometry.mark.check_bytes
        address = address_of(move.source) if move.source.nbytes else 0
        if address % SECTOR_BYTES == 0 and move.source.nbytes == size:
            return self._op(extent, layer, address=address, size=size, keep=move.source)
        memory = self.memory.take()
        memory[: move.source.nbytes] = move.source.cast("B")
        memory[move.source.nbytes : size] = bytes(size - move.source.nbytes)
        return self._op(extent, layer, address=address_of(memory), size=size, keep=memory)

    def _wrapped(self, extent: Extent, layer: int, move: Move) -> Op:
        assert move.source is not None
        check_bytes = self._geometry.mark.check_bytes
        size = extent.pieces * check_bytes
        if move.source.nbytes != size:
            return self._plain(extent, layer, move)
        packed = wrap(move.source, element=self._element)
        pieces = self._geometry.pieces_in(len(packed))
        if pieces >= extent.pieces:
            return self._plain(extent, layer, move)
        extent.wrapped_L[layer] = len(packed)
        memory = self.memory.take()
        room_N = np.frombuffer(memory, dtype=np.uint8, count=pieces * check_bytes)
        # Not by a slice of the mapping: that would hold the interpreter meanwhile.
        np.copyto(room_N[: len(packed)], np.frombuffer(packed, dtype=np.uint8))
        # What another slab left there is not written.
        room_N[len(packed) :] = 0
        return self._op(extent, layer, address=address_of(memory), size=pieces * check_bytes, keep=memory)

    def _op(self, extent: Extent, layer: int, *, address: int, size: int, keep: object) -> Op:
        return Op(
            kind=WRITE,
            offset=self.slab_offset(extent, layer),
            address=address,
            size=size,
            crcs=extent.crcs_address(layer),
            page_bytes=self._geometry.mark.check_bytes,
            keep=keep,
        )


class WrapJob(Job):
    """Wraps the slabs of one extent."""

    def __init__(self, writes: DataWrites, extent: Extent, done: Callable[[Exception | None], None]) -> None:
        self._writes = writes
        self._extent = extent
        self._done = done
        self.ops_N = np.empty(0, dtype=OP_DTYPE)
        """The writes when it has ended, without tags."""
        self._keep: list[Op] = []

    def run(self) -> None:
        """See `Job.run`. Where memory runs out the slabs are written as they are."""
        try:
            self._keep = self._writes.wrapped(self._extent)
        except (MemoryError, OSError):
            self._extent.wrapped_L[:] = 0
            self._keep = self._writes.plain(self._extent)
        self.ops_N = array_of(self._keep)

    def end(self) -> None:
        """See `Job.end`."""
        self._done(self.failure)

    def give_back(self) -> None:
        """The writes have ended: their memory may be used again. Once."""
        for op in self._keep:
            if isinstance(op.keep, mmap.mmap):
                self._writes.memory.give_back(op.keep)
        self._keep = []
