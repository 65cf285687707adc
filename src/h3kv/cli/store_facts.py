"""What a cold store holds, read from its tables and headers. Nothing is changed."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from h3kv.core.limits import BLOCK_TOKENS
from h3kv.tiers.cold.geometry import AreaGeometry
from h3kv.tiers.cold.ops import OpQueue
from h3kv.tiers.cold.place import open_place
from h3kv.tiers.cold.recovery import scan_area
from h3kv.tiers.cold.volume import Volume
from h3kv.tiers.io import IoEngine

DEPTH: Final = 16


@dataclass(frozen=True, slots=True)
class StoreContents:
    """A whole store. Damaged headers count as empty."""

    capacity_bytes: int
    areas: int
    area_bytes: int
    areas_used: int
    models: int
    segments: int
    tokens: int
    kv_bytes: int
    """KV of the tokens, without headers and what rounding leaves empty."""


def store_contents(path: Path) -> StoreContents:
    """The contents of a store that is not in use.

    Raises:
        StoreBusyError: a process uses it.
        StoreFormatError: it is no store, or one of another version, damaged as a whole, or cut.
        StoreError: it cannot be opened or read.
    """
    with contextlib.closing(open_place(path)) as place, contextlib.closing(OpQueue(make_engine([place.file]))) as io:
        volume = Volume(place, io)
        entries = [(area, entry) for area, entry in enumerate(volume.areas) if entry is not None]
        segments = tokens = kv_bytes = 0
        for area, entry in entries:
            geometry = AreaGeometry(entry.mark, volume.geometry.area_bytes)
            headers = [extent.header for extent in scan_area(volume, area, geometry).kept]
            segments += len(headers)
            blocks = sum(len(header.label.keys) for header in headers if header.label is not None)
            tokens += blocks * BLOCK_TOKENS
            kv_bytes += blocks * geometry.block_bytes
        return StoreContents(
            capacity_bytes=volume.geometry.capacity_bytes,
            areas=volume.geometry.areas,
            area_bytes=volume.geometry.area_bytes,
            areas_used=len(entries),
            models=len({(entry.fingerprint, entry.mark) for _, entry in entries}),
            segments=segments,
            tokens=tokens,
            kv_bytes=kv_bytes,
        )


def make_engine(files: Sequence[int]) -> IoEngine:
    """The engine that checks and reports read with."""
    return IoEngine.open(files, depth=DEPTH)
