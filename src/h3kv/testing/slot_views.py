"""Views of one slot: bytes, tensors, the index part of a slab. Nothing is copied; the slot's bytes are what is seen.

A view does not keep its slot. Whoever reads what another process may release meanwhile asks `is_current` before and
after, and throws away what was read in between when the answer changed (`read` does all of it).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

from h3kv.core.errors import ShapeError, StaleHandleError
from h3kv.core.layout import SlabLayout
from h3kv.core.types import SlotHandle
from h3kv.memory.copies import SLOT_TO_READER, CopyMeter
from h3kv.memory.leases import check_current
from h3kv.memory.region import Region

if TYPE_CHECKING:
    # A process that only moves bytes runs without torch.
    import torch
    from torch import Tensor


class SlotViews:
    """Views of the slots of one region.

    Args:
        region: with slots. Views keep its memory mapped.
        copies: where copies made here are counted.

    Any method raises StaleHandleError for a handle that names no slot of now, whatever its numbers are.
    """

    def __init__(self, region: Region, *, copies: CopyMeter | None = None) -> None:
        assert region.geometry.blocks, "a region without slots has no slots to view"
        self._block_bytes = region.geometry.block_bytes
        self._slots = region.slots
        self._region = region
        self._table = region.table
        self._copies = CopyMeter() if copies is None else copies

    def is_current(self, handle: SlotHandle) -> bool:
        """Whether the handle still names a slot."""
        try:
            check_current(self._table, handle)
        except StaleHandleError:
            return False
        return True

    def bytes(self, handle: SlotHandle) -> memoryview:
        """All bytes of a slot, writable."""
        check_current(self._table, handle)
        return self._slots[handle.slot * self._block_bytes :][: handle.blocks * self._block_bytes]

    def tensor(self, handle: SlotHandle, dtype: torch.dtype, shape: Sequence[int], *, offset_bytes: int = 0) -> Tensor:
        """A part of a slot as a contiguous tensor on the CPU, writable.

        Args:
            handle: of the slot.
            dtype: of the elements.
            shape: of the tensor.
            offset_bytes: where it begins, a multiple of the element's size.

        Raises:
            ShapeError: it does not lie within the slot.
        """
        check_current(self._table, handle)
        room_bytes = handle.blocks * self._block_bytes
        size_bytes = math.prod(shape) * dtype.itemsize
        if min(shape, default=0) < 0 or offset_bytes < 0 or offset_bytes + size_bytes > room_bytes:
            raise ShapeError(
                f"{tuple(shape)} of {dtype} are {size_bytes} bytes from {offset_bytes} on: the slot has {room_bytes}"
            )
        if offset_bytes % dtype.itemsize:
            raise ShapeError(f"elements of {dtype} lie at multiples of {dtype.itemsize} bytes, not at {offset_bytes}")
        start = handle.slot * self._block_bytes + offset_bytes
        return self._region.data[start : start + size_bytes].view(dtype).view(tuple(shape))

    def index(self, handle: SlotHandle, layout: SlabLayout) -> memoryview:
        """The index part of a slab that fills its slot: planes, then summaries; writable.

        Raises:
            ShapeError: the region is divided for another layout.
        """
        if layout.block_bytes != self._block_bytes:
            raise ShapeError(
                f"blocks of this layout have {layout.block_bytes} bytes, those of the region {self._block_bytes}"
            )
        start = layout.index_offset(handle.blocks)
        return self.bytes(handle)[start : start + layout.index_bytes(handle.blocks)]

    def read(self, handle: SlotHandle, into: memoryview, *, offset_bytes: int = 0) -> None:
        """Copy a part of a slot, whole or not at all.

        Args:
            handle: of the slot.
            into: writable; holds anything after an error.
            offset_bytes: where in the slot to begin.

        Raises:
            ShapeError: it does not lie within the slot.
            StaleHandleError: the slot was released before, or while it was read.
        """
        source = self.bytes(handle)
        if offset_bytes < 0 or offset_bytes + into.nbytes > source.nbytes:
            raise ShapeError(f"{into.nbytes} bytes from {offset_bytes} on exceed the slot, which has {source.nbytes}")
        into.cast("B")[:] = source[offset_bytes : offset_bytes + into.nbytes]
        self._copies.count(SLOT_TO_READER, into.nbytes)
        check_current(self._table, handle)
