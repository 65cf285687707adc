"""The slabs of one model's segments: which are on their way, which are visible, and under which numbers."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from h3kv.core.errors import SlabBusyError, StaleHandleError, TierBrokenError
from h3kv.core.types import Completion, Fetch, Move, SegmentId, SlabKey, SlotHandle, StoredSegment
from h3kv.tiers.cold.extents import Extent, ExtentTable, Phase
from h3kv.tiers.cold.geometry import AreaGeometry


class Segments:
    """What `lookup` sees. Knows extents and moves, and nothing of files.

    Args:
        geometry: of this model's areas.
    """

    def __init__(self, geometry: AreaGeometry) -> None:
        self._geometry = geometry
        self._layers = geometry.mark.layers
        self.extents = ExtentTable(geometry)
        self.visible: dict[SlabKey, SlotHandle] = {}
        self._in_flight: set[SlabKey] = set()
        self.changes = 0
        """How often slabs were hidden: what was looked up before may be gone."""
        self.moves_total = 0
        self.bytes_moved_total = 0

    def check_moves(self, moves: Sequence[Move]) -> list[tuple[Extent, int]]:
        """The extent and layer of each move's target, if all of them can start.

        Raises:
            SlabBusyError: a key or slot is taken.
            StaleHandleError: a slot was released.
        """
        targets = [self.extents.find(move.target) for move in moves]
        keys: set[SlabKey] = set()
        slots: set[int] = set()
        for move, (extent, layer) in zip(moves, targets, strict=True):
            if move.key in self.visible or move.key in self._in_flight or move.key in keys:
                raise SlabBusyError(f"slab {move.key} is visible or in flight already", key=move.key)
            if extent.phase is not Phase.RESERVED or layer in extent.moves or move.target.slot in slots:
                raise SlabBusyError(f"slot {move.target.slot} holds another slab than {move.key}", key=move.key)
            assert move.source is not None, "the cold tier has no memory to write in place: a move brings its bytes"
            assert move.source.nbytes <= self._geometry.slab_bytes(move.target.blocks)
            assert move.key.layer == layer, f"slot {move.target.slot} is for layer {layer}, not for {move.key}"
            keys.add(move.key)
            slots.add(move.target.slot)
        return targets

    def check_fetch(self, fetch: Fetch) -> tuple[Extent, int]:
        """The extent and layer of a fetch's source.

        Raises:
            SlabBusyError: the slab is not visible there.
            StaleHandleError: the slot was released.
        """
        extent, layer = self.extents.find(fetch.source)
        end_bytes = fetch.offset_bytes + fetch.target.nbytes
        assert fetch.offset_bytes >= 0 and end_bytes <= self._geometry.slab_bytes(fetch.source.blocks)
        check_bytes = self._geometry.mark.check_bytes
        assert fetch.offset_bytes % check_bytes == fetch.target.nbytes % check_bytes == 0, "a fetch takes whole pieces"
        if extent.phase is not Phase.RETIRED and self.visible.get(fetch.key) != fetch.source:
            raise SlabBusyError(f"slab {fetch.key} is not visible in slot {fetch.source.slot} yet", key=fetch.key)
        return extent, layer

    def join(self, extent: Extent, layer: int, move: Move) -> list[Completion]:
        """Add a slab to its segment, which is to be written when its phase says so.

        Returns the completions of a segment that cannot become whole, since one of its slots was released.
        """
        assert move.source is not None
        pieces = self._geometry.pieces_in(move.source.nbytes)
        if extent.moves:
            assert (extent.segment, extent.label, extent.pieces) == (move.key.segment, move.label, pieces), (
                "the slabs of a segment have one number, one label and one size"
            )
        extent.segment, extent.label, extent.pieces = move.key.segment, move.label, pieces
        extent.moves[layer] = move
        self._in_flight.add(move.key)
        if extent.owned_layers < self._layers:
            return self.end_waiting(extent)
        if len(extent.moves) == self._layers:
            extent.phase = Phase.WRITING
        return []

    def end_waiting(self, extent: Extent) -> list[Completion]:
        """End the moves of a segment that waits for slabs that will not come."""
        ended = [Completion(move, _stale(move)) for move in extent.moves.values()]
        self._in_flight -= {move.key for move in extent.moves.values()}
        extent.moves.clear()
        return ended

    def end_writing(self, extent: Extent, error: TierBrokenError | None) -> list[Completion]:
        """The completions of a segment that was written. Its slabs become visible now, but for those released."""
        ended = []
        for layer, move in extent.moves.items():
            self._in_flight.discard(move.key)
            fault: Exception | None = error
            if error is None and not self.extents.owns(extent.handles_L[layer]):
                fault = _stale(move)
            if fault is None:
                assert move.source is not None
                self.visible[move.key] = move.target
                self.moves_total += 1
                self.bytes_moved_total += move.source.nbytes
            ended.append(Completion(move, fault))
        extent.moves.clear()
        extent.phase = Phase.VISIBLE if error is None else Phase.RETIRED
        return ended

    def show(self, extent: Extent, segment: SegmentId) -> StoredSegment:
        """Make a segment of an earlier process visible under a number of this one."""
        assert extent.label is not None and extent.phase is Phase.VISIBLE
        extent.segment = segment
        for layer, handle in enumerate(extent.handles_L):
            self.visible[SlabKey(segment, layer)] = handle
        return StoredSegment(segment, extent.label, tuple(extent.handles_L))

    def release(self, handles: Sequence[SlotHandle]) -> list[Extent]:
        """Give handles back and hide their slabs; the extents that lost one, each once.

        Raises:
            StaleHandleError: a handle owns nothing, or comes twice. Nothing was given back.
        """
        extents = self.extents.release(handles)
        self.changes += 1
        for handle, extent in zip(handles, extents, strict=True):
            self._hide(extent, handle)
        return list({id(extent): extent for extent in extents}.values())

    def retire(self, extent: Extent) -> bool:
        """Hide a damaged segment for good. False: it was not visible any more."""
        if extent.phase is not Phase.VISIBLE:
            return False
        extent.phase = Phase.RETIRED
        self.changes += 1
        for handle in extent.handles_L:
            self._hide(extent, handle)
        return True

    def _hide(self, extent: Extent, handle: SlotHandle) -> None:
        """Forget a slab, unless its segment has been written to other slots since."""
        if extent.segment is not None:
            key = SlabKey(extent.segment, extent.layer_of(handle))
            if self.visible.get(key) == handle:
                del self.visible[key]

    def check_integrity(self) -> None:
        """Assert that no two extents share a block, and that each visible slab has the slot it is shown with."""
        spans = sorted((extent.block, extent.block + extent.blocks) for extent in self.extents.extents())
        assert all(left[1] <= right[0] for left, right in itertools.pairwise(spans)), "two extents overlap"
        for key, handle in self.visible.items():
            extent, layer = self.extents.find(handle)
            assert (extent.segment, layer) == (key.segment, key.layer), f"slab {key} shows another's slot"
            assert extent.phase is Phase.VISIBLE


def _stale(move: Move) -> StaleHandleError:
    return StaleHandleError(f"slot {move.target.slot}, or another of its segment, was released in flight")
