"""The slabs of a remote store under numbers of this process, which outlive the server.

A handle that was given out here never changes; what it means to the server does, each time that the server begins anew.
So whoever holds handles need not know of restarts: a segment that the store kept is found by its keys.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np

from h3kv.core.limits import SEGMENT_BLOCKS_MAX
from h3kv.core.types import SegmentLabel, SlotHandle
from h3kv.tiers.cold.extents import Extent, Phase
from h3kv.tiers.cold.geometry import AreaGeometry, ColdLayout
from h3kv.tiers.cold.segments import Segments
from h3kv.tiers.remote.session import KeptSegment


@dataclass(slots=True, eq=False)
class _Known:
    """An extent, and what it is to the server."""

    extent: Extent
    theirs_L: tuple[SlotHandle, ...] | None
    """None: the server has it no more."""
    wrapped_L: list[bool] | None = None
    """None: not asked yet."""


@dataclass(slots=True)
class Rejoined:
    """What became of segments when the server came back."""

    lost: list[Extent] = field(default_factory=list)
    strangers: list[SlotHandle] = field(default_factory=list)
    """The server's handles of segments that nobody here knows."""


class SlabMirror:
    """Extents and handles of this process. Not thread-safe.

    Args:
        layout: of the store.
    """

    def __init__(self, layout: ColdLayout) -> None:
        self.geometry = AreaGeometry(layout.mark, 0)
        self.segments = Segments(self.geometry)
        self._layers = layout.layers
        self._next_block = 0
        self._known: dict[int, _Known] = {}

    def add(self, theirs: SlotHandle) -> Extent:
        """Room that the server reserved: the extent of its own handles. `theirs` is of the first slab."""
        extent = self.segments.extents.open(self._next_block, theirs.blocks)
        # Numbers are never used twice, and far enough apart for any class.
        self._next_block += SEGMENT_BLOCKS_MAX
        self._known[extent.block] = _Known(extent, self.slabs_from(theirs))
        return extent

    def add_kept(self, kept: KeptSegment) -> Extent:
        """A segment that the server kept."""
        extent = self.add(kept.handles_L[0])
        extent.phase, extent.label = Phase.VISIBLE, kept.label
        extent.pieces = self.geometry.slab_pieces(extent.blocks)
        return extent

    def theirs(self, extent: Extent) -> tuple[SlotHandle, ...] | None:
        """The server's handles, None where it has the segment no more."""
        return self._known[extent.block].theirs_L

    def translate(self, handles: Iterable[SlotHandle]) -> list[SlotHandle]:
        """The server's handles of those that it still has."""
        found = []
        for handle in handles:
            extent, layer = self.segments.extents.find(handle)
            theirs_L = self.theirs(extent)
            if theirs_L is not None:
                found.append(theirs_L[layer])
        return found

    def note_wrapped(self, extent: Extent, wrapped_L: Sequence[int]) -> None:
        """How each slab is stored."""
        self._known[extent.block].wrapped_L = [bool(each) for each in wrapped_L]

    def wrapped(self, extent: Extent) -> list[bool] | None:
        """Whether each slab is stored wrapped; None: not known."""
        return self._known[extent.block].wrapped_L

    def forget_released(self, extents: Iterable[Extent]) -> None:
        """Drop those of which no handle is left."""
        for extent in extents:
            if extent.owned_layers == 0:
                self._known.pop(extent.block, None)

    def knows(self, extent: Extent) -> bool:
        """Whether a handle of it is left."""
        return extent.block in self._known

    def leave(self) -> None:
        """The server is gone, and with it all that its handles meant."""
        for known in self._known.values():
            known.theirs_L = None

    def rejoin(self, kept: Sequence[KeptSegment]) -> Rejoined:
        """Find visible segments again among those that the server kept."""
        result = Rejoined()
        wanted: dict[tuple[bytes, ...], list[_Known]] = {}
        for known in self._known.values():
            if known.extent.phase is Phase.VISIBLE and known.extent.label is not None:
                wanted.setdefault(known.extent.label.keys, []).append(known)
        for each in reversed(kept):
            match = self._match(wanted.get(each.label.keys, []), each.label, each.handles_L[0].blocks)
            if match is None:
                result.strangers += each.handles_L
            else:
                match.theirs_L = each.handles_L
        result.lost = [
            known.extent
            for known in self._known.values()
            if known.extent.phase is Phase.VISIBLE and known.theirs_L is None
        ]
        return result

    def check_integrity(self) -> None:
        """Assert that each handle has an extent that is known."""
        self.segments.check_integrity()
        owned = {extent.block for extent in self.segments.extents.extents()}
        assert owned == set(self._known), "extents without handles are kept, or the other way round"

    def sizes(self, handles: Sequence[SlotHandle]) -> np.ndarray[tuple[int], np.dtype[np.uint64]]:
        """Bytes that were written of each slab, u64."""
        found = [self.segments.extents.find(handle)[0] for handle in handles]
        return np.array([extent.pieces * self.geometry.mark.check_bytes for extent in found], dtype=np.uint64)

    def slabs_from(self, first: SlotHandle) -> tuple[SlotHandle, ...]:
        """The server's handles of a whole segment."""
        return tuple(
            SlotHandle(first.tier, first.slot + layer * first.blocks, first.blocks, first.generation)
            for layer in range(self._layers)
        )

    @staticmethod
    def _match(candidates: Sequence[_Known], label: SegmentLabel, blocks: int) -> _Known | None:
        for known in candidates:
            if known.theirs_L is None and known.extent.blocks == blocks and known.extent.label == label:
                # Its slabs may be stored in another way than the last time that we asked.
                known.wrapped_L = None
                return known
        return None
