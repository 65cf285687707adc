"""What a store kept: the headers of a model's areas, read once at start."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from h3kv.core.limits import SEGMENT_BLOCKS_MAX
from h3kv.tiers.cold.geometry import AreaGeometry, LayoutMark
from h3kv.tiers.cold.header import EXTENT_MAGIC, ExtentHeader, unpack_header, whole_bytes
from h3kv.tiers.cold.superblock import AreaEntry
from h3kv.tiers.cold.volume import Volume


@dataclass(frozen=True, slots=True, eq=False)
class FoundExtent:
    """A valid header and its place."""

    block: int
    """First block within the area."""
    header: ExtentHeader


def belongs(entry: AreaEntry | None, fingerprint: bytes, mark: LayoutMark) -> bool:
    """Whether an area is this model's, in this layout of bytes."""
    return entry is not None and entry.fingerprint == fingerprint and entry.mark == mark


@dataclass(frozen=True, slots=True)
class AreaScan:
    """The header table of one area."""

    kept: list[FoundExtent]
    """What its owner finds again, oldest first. None overlap."""
    stale: list[FoundExtent]
    """Whole headers that mean nothing: of segments without a name, or from before the area was claimed."""
    damaged: list[range]
    """Blocks whose header cells hold something that is no whole header, nor a part of one: of each header one range."""


def scan_area(volume: Volume, area: int, geometry: AreaGeometry) -> AreaScan:
    """Read the headers of an area that has an owner.

    Raises:
        StoreError: reading failed.
    """
    entry = volume.areas[area]
    assert entry is not None and entry.mark == geometry.mark
    table = b"".join(volume.read_all(volume.geometry.area_offset(area), geometry.table_bytes))
    cells = np.frombuffer(table, dtype=np.uint64).reshape(geometry.blocks, geometry.header_bytes // 8)
    found: list[FoundExtent] = []
    damaged: list[range] = []
    end = 0
    for block in np.flatnonzero(cells.any(axis=1)).tolist():
        if block < end:  # the header before goes on here
            continue
        start = block * geometry.header_bytes
        packed = table[start : start + SEGMENT_BLOCKS_MAX * geometry.header_bytes]
        size = whole_bytes(packed)
        if size is None:
            _add_damaged(damaged, block, is_start=packed.startswith(EXTENT_MAGIC))
            continue
        end = block + -(-size // geometry.header_bytes)
        header = unpack_header(packed, geometry)
        if header is not None and block % header.room_blocks == 0:
            found.append(FoundExtent(block, header))
    kept = without_overlaps(extent for extent in found if _is_kept(extent.header, entry))
    return AreaScan(kept, [extent for extent in found if extent not in kept], damaged)


def _add_damaged(damaged: list[range], block: int, *, is_start: bool) -> None:
    """Note a damaged cell. Next to another it belongs to the same header, unless it begins like one of its own."""
    if damaged and damaged[-1].stop == block and len(damaged[-1]) < SEGMENT_BLOCKS_MAX and not is_start:
        damaged[-1] = range(damaged[-1].start, block + 1)
    else:
        damaged.append(range(block, block + 1))


def _is_kept(header: ExtentHeader, entry: AreaEntry) -> bool:
    """Whether a header outlives the process that wrote it.

    One from before the area was claimed is another model's, or this one's from before that one took it.
    """
    return header.label is not None and header.fingerprint == entry.fingerprint and header.serial >= entry.claimed


def without_overlaps(found: Iterable[FoundExtent]) -> list[FoundExtent]:
    """Of extents that share a block, the newest; oldest first."""
    taken: set[int] = set()
    kept = []
    for extent in sorted(found, key=lambda extent: extent.header.serial, reverse=True):
        blocks = range(extent.block, extent.block + extent.header.room_blocks)
        if taken.isdisjoint(blocks):
            taken.update(blocks)
            kept.append(extent)
    return kept[::-1]
