"""What a store kept: the headers of a model's areas, read once at start."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import numpy as np

from h3kv.tiers.cold.geometry import AreaGeometry, LayoutMark
from h3kv.tiers.cold.header import EXTENT_MAGIC, ExtentHeader, unpack_header
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


def scan_area(volume: Volume, area: int, geometry: AreaGeometry) -> list[FoundExtent]:
    """The extents of an area that its owner's process would find again, oldest first. None overlap.

    Headers from before the area was claimed were another model's neighbours, or ours before that one took it.
    """
    entry = volume.areas[area]
    assert entry is not None and entry.mark == geometry.mark
    found = [
        extent
        for extent in _headers(volume, area, geometry)
        if extent.header.label is not None
        and extent.header.fingerprint == entry.fingerprint
        and extent.header.generation >= entry.claimed
    ]
    return without_overlaps(found)


def without_overlaps(found: Iterable[FoundExtent]) -> list[FoundExtent]:
    """Of extents that share a block, the newest; oldest first."""
    taken: set[int] = set()
    kept = []
    for extent in sorted(found, key=lambda extent: extent.header.generation, reverse=True):
        blocks = range(extent.block, extent.block + extent.header.room_blocks)
        if taken.isdisjoint(blocks):
            taken.update(blocks)
            kept.append(extent)
    return kept[::-1]


def _headers(volume: Volume, area: int, geometry: AreaGeometry) -> Iterator[FoundExtent]:
    """Every valid header of an area, in order."""
    table = b"".join(volume.read_all(volume.geometry.area_offset(area), geometry.table_bytes))
    slots = np.frombuffer(table, dtype=np.uint8).reshape(geometry.blocks, geometry.header_bytes)
    magic = np.frombuffer(EXTENT_MAGIC, dtype=np.uint8)
    for block in np.flatnonzero((slots[:, : magic.size] == magic).all(axis=1)).tolist():
        start = block * geometry.header_bytes
        header = unpack_header(table[start : start + 16 * geometry.header_bytes], geometry)
        if header is not None and block % header.room_blocks == 0:
            yield FoundExtent(block, header)
