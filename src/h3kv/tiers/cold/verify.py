"""Checking a store offline: every header and every piece of every model in it."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from h3kv.core.errors import StoreError
from h3kv.tiers.cold.geometry import AreaGeometry
from h3kv.tiers.cold.ops import Op, OpQueue, address_of, aligned_memory
from h3kv.tiers.cold.place import open_place, resolve
from h3kv.tiers.cold.recovery import FoundExtent, scan_area
from h3kv.tiers.cold.seam import EngineFactory
from h3kv.tiers.cold.volume import Volume
from h3kv.tiers.io import READ

_READS: Final = 8
"""Slabs that are read at a time. Memory is bounded by it: 8 slabs of at most 4 MiB for the models of today."""


@dataclass(frozen=True, slots=True)
class AreaReport:
    """What was found in one area that a model has."""

    area: int
    fingerprint: bytes | None
    """Of the model; None: neither copy of the area's entry can be read."""
    segments: int
    pieces: int
    """That were checked."""
    damage: tuple[str, ...]
    """One line for each thing that is wrong."""


def verify_store(place: Path, make_engine: EngineFactory) -> Iterator[AreaReport]:
    """Reports of the areas that models have or had before they were damaged, one by one. Changes nothing.

    Raises:
        StoreBusyError: a process uses it.
        StoreFormatError: it is no store, or one of another version, damaged as a whole, or cut.
        StoreError: it cannot be opened.
    """
    path, _ = resolve(place)
    with contextlib.closing(open_place(path)) as opened, contextlib.closing(OpQueue(make_engine([opened.file]))) as io:
        volume = Volume(opened, io)
        for area, entry in enumerate(volume.areas):
            if entry is not None:
                yield _verify_area(
                    volume, area, AreaGeometry(entry.mark, volume.geometry.area_bytes), entry.fingerprint
                )
            elif area in volume.damaged_entries:
                lost = "the area's entry: not as it was written; what the area holds is not found"
                yield AreaReport(area, None, segments=0, pieces=0, damage=(lost,))


def _verify_area(volume: Volume, area: int, geometry: AreaGeometry, fingerprint: bytes) -> AreaReport:
    damage = ["one copy of the area's entry: not as it was written"] if area in volume.damaged_entries else []
    try:
        scan = scan_area(volume, area, geometry)
    except StoreError as error:
        return AreaReport(area, fingerprint, segments=0, pieces=0, damage=(*damage, str(error)))
    pieces = 0
    damage += [f"the header at block {blocks.start}: not as it was written" for blocks in scan.damaged]
    for extent in scan.kept:
        stored = sum(extent.header.stored_bytes(layer, geometry) for layer in range(geometry.mark.layers))
        pieces += stored // geometry.mark.check_bytes
        damage += _verify_extent(volume, area, geometry, extent)
    return AreaReport(area, fingerprint, len(scan.kept), pieces, tuple(damage))


def _verify_extent(volume: Volume, area: int, geometry: AreaGeometry, extent: FoundExtent) -> list[str]:
    """A line for each slab of an extent that does not match its checksums or cannot be read."""
    if extent.header.pieces == 0:
        return []
    damage = []
    for start in range(0, geometry.mark.layers, _READS):
        layers = range(start, min(start + _READS, geometry.mark.layers))
        outcomes = volume.ops.run([_read(volume, area, geometry, extent=extent, layer=layer) for layer in layers])
        damage += [
            f"segment at block {extent.block}, layer {layer}: {outcome}"
            for layer, outcome in zip(layers, outcomes, strict=True)
            if not outcome.is_good
        ]
    return damage


def _read(volume: Volume, area: int, geometry: AreaGeometry, *, extent: FoundExtent, layer: int) -> Op:
    header = extent.header
    size = header.stored_bytes(layer, geometry)
    memory = aligned_memory(size)
    offset = geometry.slab_offset(extent.block, layer, blocks=header.room_blocks)
    return Op(
        kind=READ,
        offset=volume.geometry.area_offset(area) + offset,
        address=address_of(memory),
        size=size,
        crcs=int(header.crcs_LC[layer].ctypes.data),
        page_bytes=geometry.mark.check_bytes,
        keep=(memory, header.crcs_LC),
    )
