"""The extents of one process's segments, and the handles to their slabs.

Shapes: L layers, C checked pieces of a slab.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from h3kv.core.errors import StaleHandleError
from h3kv.core.types import Move, SegmentId, SegmentLabel, SlotHandle, Tier
from h3kv.tiers.cold.geometry import AreaGeometry


class Phase(enum.Enum):
    """What an extent is good for."""

    RESERVED = "reserved"
    """Room; some of its slabs may be waiting for the others."""
    WRITING = "writing"
    """All slabs are submitted; on their way to the disk, or there and not polled."""
    VISIBLE = "visible"
    RETIRED = "retired"
    """Failed or damaged: never read again."""


@dataclass(slots=True, eq=False)
class Extent:
    """Room for one segment."""

    block: int
    """First block, counted through the volume."""
    blocks: int
    handles_L: list[SlotHandle]
    wrapped_L: NDArray[np.uint32]
    """Bytes of each slab as it is stored; 0: as it is read."""
    crcs_LC: NDArray[np.uint32]
    """crc32c of each piece as it is stored. The engine writes into it: it never moves."""
    phase: Phase = Phase.RESERVED
    owned_layers: int = 0
    """Handles that were not released."""
    pieces: int = 0
    """Of each slab that were written, from its start."""
    segment: SegmentId | None = None
    label: SegmentLabel | None = None
    moves: dict[int, Move] = field(default_factory=dict)
    """By layer, from submission to completion."""
    fetches: int = 0
    """In flight."""
    is_on_disk: bool = False
    """Whether its header may be on the disk, so that giving it back must undo that."""
    is_erased: bool = False
    """Whether its bytes are to go before its room is handed out again."""
    promised_bytes: int = 0
    """Its part of the write budget, until it is written."""

    is_free: bool = False
    """Whether its room was given back; nothing refers to it any more."""
    _crcs: int = field(init=False)

    def __post_init__(self) -> None:
        self._crcs = int(self.crcs_LC.ctypes.data)

    def crcs_address(self, layer: int, piece: int = 0) -> int:
        """Where the checksums of a slab's pieces lie in memory, from one piece on."""
        pieces: int = self.crcs_LC.shape[1]
        return self._crcs + 4 * (layer * pieces + piece)

    def layer_of(self, handle: SlotHandle) -> int:
        """The layer that one of its handles is for."""
        return (handle.slot - self.handles_L[0].slot) // self.blocks

    def take_promise(self) -> int:
        """Its part of the write budget, which it has no more then."""
        promised, self.promised_bytes = self.promised_bytes, 0
        return promised

    @property
    def is_idle(self) -> bool:
        """Whether nobody owns, writes or reads it: its room is free."""
        return self.owned_layers == 0 and not self.moves and self.fetches == 0


class ExtentTable:
    """Which handle means which slab of which extent. A handle's generation is never used twice."""

    def __init__(self, geometry: AreaGeometry) -> None:
        self._geometry = geometry
        self._layers = geometry.mark.layers
        self._next_generation = 0
        self._owned: dict[int, tuple[SlotHandle, Extent]] = {}
        self.owned_blocks = 0
        """Blocks of one layer that handles own."""

    def open(self, block: int, blocks: int) -> Extent:
        """A new extent, all of its handles owned."""
        self._next_generation += 1
        first = block * self._layers
        handles = [
            SlotHandle(Tier.NVME, first + layer * blocks, blocks, self._next_generation)
            for layer in range(self._layers)
        ]
        wrapped_L = np.zeros(self._layers, dtype=np.uint32)
        crcs_LC = np.zeros((self._layers, self._geometry.slab_pieces(blocks)), dtype=np.uint32)
        extent = Extent(block, blocks, handles, wrapped_L, crcs_LC, owned_layers=self._layers)
        self._owned.update({handle.slot: (handle, extent) for handle in handles})
        self.owned_blocks += blocks * self._layers
        return extent

    def find(self, handle: SlotHandle) -> tuple[Extent, int]:
        """The extent and the layer that a handle owns.

        Raises:
            StaleHandleError: it owns nothing now.
        """
        owner, extent = self._owned.get(handle.slot, (None, None))
        if extent is None or (owner is not handle and owner != handle):
            raise StaleHandleError(
                f"{handle.tier} slot {handle.slot} (generation {handle.generation}, {handle.blocks} blocks) was "
                "released: look the slab up again"
            )
        return extent, extent.layer_of(handle)

    def owns(self, handle: SlotHandle) -> bool:
        """Whether a handle owns its slot now."""
        return handle.slot in self._owned and self._owned[handle.slot][0] == handle

    def release(self, handles: Sequence[SlotHandle]) -> list[Extent]:
        """Give handles back; their extents, one for each handle.

        Raises:
            StaleHandleError: a handle owns nothing, or comes twice. Nothing was given back.
        """
        extents = [self.find(handle)[0] for handle in handles]
        if len({handle.slot for handle in handles}) != len(handles):
            raise StaleHandleError("a slot was named twice in one release")
        for handle, extent in zip(handles, extents, strict=True):
            del self._owned[handle.slot]
            extent.owned_layers -= 1
            self.owned_blocks -= handle.blocks
        return extents

    def extents(self) -> list[Extent]:
        """Every extent with an owner, once."""
        return list({id(extent): extent for _, extent in self._owned.values()}.values())
