"""The extents that earlier processes kept, as this one has them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from h3kv.core.limits import SEGMENT_BLOCKS_MAX
from h3kv.tiers.cold.commit import Commits
from h3kv.tiers.cold.extents import Extent, ExtentTable, Phase
from h3kv.tiers.cold.header import ExtentHeader
from h3kv.tiers.cold.recovery import scan_area
from h3kv.tiers.cold.room import Room
from h3kv.tiers.cold.volume import Volume


@dataclass(slots=True)
class ReadBack:
    """What was found."""

    kept: list[Extent] = field(default_factory=list)
    """Oldest first."""
    replaced: list[Extent] = field(default_factory=list)
    """Of which there is a newer copy. To be released."""
    damaged: int = 0
    """Headers that cannot be read."""


def read_back(volume: Volume, ours: Sequence[int], *, room: Room, commits: Commits, extents: ExtentTable) -> ReadBack:
    """Take the room of all valid extents in a model's areas, and have the other headers undone.

    Args:
        volume: where they lie.
        ours: numbers of the model's areas.
        room: of these areas, of which nothing was taken yet.
        commits: undoes headers with the next batch.
        extents: where they are opened.

    Raises:
        StoreError: reading failed.
    """
    result, geometry = ReadBack(), room.geometry
    found: list[tuple[int, ExtentHeader]] = []
    for area in ours:
        scan, first = scan_area(volume, area, geometry), area * geometry.blocks
        room.restore(area, [(extent.block, extent.header.room_blocks) for extent in scan.kept])
        found += [(first + extent.block, extent.header) for extent in scan.kept]
        for blocks in scan.damaged:
            commits.undo_header(first + blocks.start, cells=len(blocks), blocks=SEGMENT_BLOCKS_MAX)
        for extent in scan.stale:
            cells = extent.header.room_blocks
            commits.undo_header(first + extent.block, cells=cells, blocks=cells)
        result.damaged += len(scan.damaged)
    newest: dict[tuple[bytes, ...], Extent] = {}
    for block, header in sorted(found, key=lambda pair: pair[1].serial):
        kept = extents.open(block, header.room_blocks)
        kept.phase, kept.is_on_disk = Phase.VISIBLE, True
        kept.label, kept.pieces = header.label, header.pieces
        kept.wrapped_L[:], kept.crcs_LC[:] = header.wrapped_L, header.crcs_LC
        assert header.label is not None
        older = newest.pop(header.label.keys, None)
        if older is not None:
            result.replaced.append(older)
        newest[header.label.keys] = kept
    result.kept = list(newest.values())
    return result
