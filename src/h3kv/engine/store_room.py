"""Which cap a cold store needs to hold a model's blocks, and whether a place can serve the model at all.

Of a cap the store's tables are taken, then it is cut into whole areas, and those into whole units of 16 blocks with
their headers: what is left over holds nothing.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Final

from h3kv.core.errors import ConfigError
from h3kv.core.layout import CacheLayout
from h3kv.core.limits import BLOCK_TOKENS, SEGMENT_BLOCKS_MAX
from h3kv.core.units import describe_size, format_size
from h3kv.tiers.cold.geometry import MIB, AreaGeometry, VolumeGeometry, capacity_for, layout_mark, plan_volume

GROWTH: Final = 16
"""A cap that is too small is tried again with a sixteenth more: what areas and units cost is found, not guessed."""


def room_blocks(geometry: VolumeGeometry, layout: CacheLayout) -> int:
    """Blocks of one model that a whole store holds."""
    return geometry.areas * AreaGeometry(layout_mark(layout), geometry.area_bytes).blocks


def cap_for_blocks(layout: CacheLayout, blocks: int) -> int:
    """A cap under which a new store holds so many blocks of a model, more than 0: bytes, whole MiB."""
    units = -(-blocks // SEGMENT_BLOCKS_MAX)
    cap = _whole_mib(capacity_for(layout, units=units))
    while room_blocks(plan_volume(cap, layout=layout), layout) < blocks:
        cap = _whole_mib(cap + cap // GROWTH)
    return cap


def grown_cap(layout: CacheLayout, blocks: int, made: VolumeGeometry) -> int | None:
    """The cap under which an existing store, whose areas keep their size, holds so many blocks.

    None: its table is too short for as many areas.
    """
    per_area = AreaGeometry(layout_mark(layout), made.area_bytes).blocks
    areas = -(-blocks // per_area)
    return _whole_mib(made.area_offset(areas)) if areas <= made.table_entries else None


def cure_for_blocks(layout: CacheLayout, blocks: int, *, path: Path, made: VolumeGeometry) -> str:
    """What makes a store hold so many blocks: a cap that suffices for it and for a new one."""
    cap, grown = cap_for_blocks(layout, blocks), grown_cap(layout, blocks, made)
    if grown is None:
        return f"name another store and raise nvme.capacity to at least {format_size(cap)}: {path} cannot grow so far"
    return f"raise nvme.capacity to at least {format_size(max(cap, grown))}"


def check_new_store(path: Path, layout: CacheLayout, capacity_bytes: int) -> None:
    """See that a store under this cap would hold a segment of the model, before it is made.

    Raises:
        ConfigError: it would not; the message has the smallest cap that would do.
    """
    enough = cap_for_blocks(layout, SEGMENT_BLOCKS_MAX)
    if capacity_bytes < enough and not _holds_a_segment(capacity_bytes, layout):
        raise ConfigError(
            f"nvme.capacity of {describe_size(capacity_bytes)} for the new cold store {path} holds no segment of this "
            f"model, {SEGMENT_BLOCKS_MAX * BLOCK_TOKENS:,} tokens or "
            f"{describe_size(SEGMENT_BLOCKS_MAX * layout.block_bytes)}: raise it to at least {format_size(enough)}",
            field="nvme.capacity",
        )


def check_area(path: Path, layout: CacheLayout, geometry: VolumeGeometry) -> None:
    """See that a segment of the model fits an area of an existing store.

    Raises:
        ConfigError: it does not; the message says how to make the store anew.
    """
    area = AreaGeometry(layout_mark(layout), geometry.area_bytes)
    if area.units:
        return
    smallest = _whole_mib(area.unit_bytes)
    grown = max(geometry.capacity_bytes, replace(geometry, area_bytes=smallest).area_offset(1))
    raise ConfigError(
        f"a segment of this model takes {describe_size(area.unit_bytes)} on disk, and the areas of {path} have "
        f"{describe_size(geometry.area_bytes)}: name another store, or give up what this one holds and make it anew "
        f"with `h3 format {path} --capacity {format_size(_whole_mib(grown))} --area {format_size(smallest)}`",
        field="nvme.store",
    )


def _holds_a_segment(capacity_bytes: int, layout: CacheLayout) -> bool:
    try:
        return room_blocks(plan_volume(capacity_bytes, layout=layout), layout) > 0
    except ConfigError:
        return False


def _whole_mib(size_bytes: int) -> int:
    return -(-size_bytes // MIB) * MIB
