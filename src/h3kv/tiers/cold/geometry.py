"""Where everything lies in a store: the volume's own tables, and a model's extents in its areas.

    volume   0          8 KiB    16 KiB                       data_offset (whole MiB)
             +----------+--------+-----------------------+---+--------+--------+-----
             |superblock| budget | area table: a twin of |   | area 0 | area 1 | ...
             |  (twin)  | (twin) | 8 KiB for each area   |   |        |        |
             +----------+--------+-----------------------+---+--------+--------+-----

    area     0                                   blocks x header_bytes
             +--------+--------+--------+-------+-----------------------------------+----+
             | header | header | header |  ...  | block 0 | block 1 | block 2 | ...  |    |
             | cell 0 | cell 1 | cell 2 |       | all layers of it  |                |    |
             +--------+--------+--------+-------+-----------------------------------+----+

An extent of n blocks at block b owns header cells b..b+n-1 and the data of blocks b..b+n-1; in there its slabs follow
each other by layer, so that one slab is one contiguous read. A slab is a row of checked pieces, each with a checksum of
its own: pages in the encoding `raw`, 4 KiB in the others.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, NamedTuple

from h3kv.core.errors import ConfigError
from h3kv.core.layout import LAYOUT_VERSION, CacheLayout
from h3kv.core.limits import SEGMENT_BLOCKS_MAX
from h3kv.core.units import describe_size
from h3kv.tiers.cold.record import SECTOR_BYTES, TWIN_BYTES
from h3kv.tiers.cold.wrap import element_bytes

SUPERBLOCK_OFFSET: Final = 0
BUDGET_OFFSET: Final = TWIN_BYTES
TABLE_OFFSET: Final = 2 * TWIN_BYTES

MIB: Final = 1 << 20
AREA_BYTES_MIN: Final = 64 * MIB
AREA_BYTES_MAX: Final = 4096 * MIB
AREAS_WANTED: Final = 16
"""As many models side by side, before one has to take an area from another."""

AREA_ALIGNMENT: Final = 64 * 1024
TABLE_ENTRIES_MIN: Final = 64
"""The table is as long as it was made: with room to grow, so that a higher cap adds areas to a store in use."""

EXTENT_FIXED_BYTES: Final = 1024
"""Of an extent's header, before what it says of each slab and piece."""


def _round_up(size: int, alignment: int) -> int:
    return -(-size // alignment) * alignment


@dataclass(frozen=True, slots=True)
class VolumeGeometry:
    """Sizes that are fixed when a store is made, but for `capacity_bytes`."""

    capacity_bytes: int
    """Cap: no byte of the store lies beyond it."""
    area_bytes: int
    table_entries: int

    @property
    def data_offset(self) -> int:
        """Offset of the first area."""
        return _round_up(TABLE_OFFSET + self.table_entries * TWIN_BYTES, MIB)

    @property
    def areas(self) -> int:
        """Whole areas under the cap that the table has room for."""
        return max(0, min(self.table_entries, (self.capacity_bytes - self.data_offset) // self.area_bytes))

    def area_offset(self, area: int) -> int:
        """Offset of an area in the volume."""
        return self.data_offset + area * self.area_bytes

    def entry_offset(self, area: int) -> int:
        """Offset of an area's twin in the table."""
        return TABLE_OFFSET + area * TWIN_BYTES


class LayoutMark(NamedTuple):
    """What must be equal, besides the fingerprint, before stored bytes mean the same."""

    encoding: bytes
    """Name in ASCII, zeros up to 8 bytes."""
    layout_version: int
    layers: int
    block_bytes: int
    """Of one block of one layer."""
    check_bytes: int
    """Of one piece with a checksum."""


@dataclass(frozen=True, slots=True)
class ColdLayout:
    """All that a store has to know of a model: of whose bytes it makes nothing."""

    mark: LayoutMark
    element_bytes: int
    """Of one element of a slab, as `wrap` takes it."""

    @property
    def layers(self) -> int:
        """Of the model."""
        return self.mark.layers


def cold_layout(layout: CacheLayout) -> ColdLayout:
    """What a store has to know of a model's layout."""
    return ColdLayout(layout_mark(layout), element_bytes(layout.slab.page))


def layout_mark(layout: CacheLayout | ColdLayout) -> LayoutMark:
    """The mark of a model's layout."""
    if isinstance(layout, ColdLayout):
        return layout.mark
    slab = layout.slab
    encoding = slab.page.encoding.value.encode().ljust(8, b"\0")
    return LayoutMark(encoding, LAYOUT_VERSION, layout.layers, slab.block_bytes, slab.check_bytes)


@dataclass(frozen=True, slots=True)
class AreaGeometry:
    """How one model divides an area."""

    mark: LayoutMark
    area_bytes: int

    @property
    def block_bytes(self) -> int:
        """Bytes of one block over all layers."""
        return self.mark.layers * self.mark.block_bytes

    def slab_bytes(self, blocks: int) -> int:
        """Bytes of one layer of so many blocks."""
        return blocks * self.mark.block_bytes

    def slab_pieces(self, blocks: int) -> int:
        """Checked pieces in a slab of so many blocks."""
        return blocks * self.mark.block_bytes // self.mark.check_bytes

    def pieces_in(self, size_bytes: int) -> int:
        """Checked pieces that so many bytes take, the last one filled up."""
        return -(-size_bytes // self.mark.check_bytes)

    @property
    def header_bytes(self) -> int:
        """Of one header cell. An extent of n blocks has n of them: fixed fields and slabs once, n blocks' checksums."""
        return _round_up(EXTENT_FIXED_BYTES + 4 * self.mark.layers * (1 + self.slab_pieces(1)), SECTOR_BYTES)

    @property
    def unit_bytes(self) -> int:
        """Bytes of 16 blocks with their headers."""
        return SEGMENT_BLOCKS_MAX * (self.header_bytes + self.block_bytes)

    @property
    def units(self) -> int:
        """Units of 16 blocks that fit."""
        return self.area_bytes // self.unit_bytes

    @property
    def blocks(self) -> int:
        """Blocks that fit."""
        return self.units * SEGMENT_BLOCKS_MAX

    @property
    def table_bytes(self) -> int:
        """Of the header cells together; the data begins there."""
        return self.blocks * self.header_bytes

    def header_offset(self, block: int) -> int:
        """Of a block's header cell, from the area's start."""
        return block * self.header_bytes

    def slab_offset(self, block: int, layer: int, *, blocks: int) -> int:
        """Of one slab of the extent at `block` with room for `blocks`, from the area's start."""
        return self.table_bytes + block * self.block_bytes + layer * self.slab_bytes(blocks)


def plan_volume(
    capacity_bytes: int, *, area_bytes: int | None = None, layout: CacheLayout | ColdLayout | None = None
) -> VolumeGeometry:
    """Geometry of a new store under a cap.

    Args:
        capacity_bytes: cap of the file or device.
        area_bytes: size of an area. None: a sixteenth of the room within [64 MiB, 4 GiB].
        layout: of the model that asks for the store, whose segments must fit an area. None: any model.

    Raises:
        ConfigError: the cap is too small for one area.
    """
    entries = TABLE_ENTRIES_MIN
    if area_bytes is None:
        entries = max(entries, 2 * -(-capacity_bytes // AREA_BYTES_MAX))
        room = capacity_bytes - VolumeGeometry(capacity_bytes, AREA_BYTES_MIN, entries).data_offset
        smallest = max(AREA_BYTES_MIN, 0 if layout is None else 4 * AreaGeometry(layout_mark(layout), 0).unit_bytes)
        areas = max(1, min(AREAS_WANTED, room // smallest), -(-room // AREA_BYTES_MAX))
        area_bytes = room // areas // AREA_ALIGNMENT * AREA_ALIGNMENT
    else:
        area_bytes = area_bytes // AREA_ALIGNMENT * AREA_ALIGNMENT
        entries = max(entries, 2 * (capacity_bytes // max(area_bytes, AREA_ALIGNMENT)))
    geometry = VolumeGeometry(capacity_bytes, max(area_bytes, AREA_ALIGNMENT), entries)
    if area_bytes <= 0 or geometry.areas == 0:
        raise ConfigError(
            f"a cold store of {describe_size(capacity_bytes)} has no room for an area of "
            f"{describe_size(max(area_bytes, 0))} after its tables of {describe_size(geometry.data_offset)}: "
            "raise nvme.capacity, or lower --area of `h3 format`",
            field="nvme.capacity",
        )
    return geometry


def capacity_for(layout: CacheLayout | ColdLayout, *, units: int) -> int:
    """The smallest cap of a new store of one area that holds so many units of 16 blocks of a model."""
    area_bytes = _round_up(units * AreaGeometry(layout_mark(layout), 0).unit_bytes, AREA_ALIGNMENT)
    return VolumeGeometry(0, area_bytes, TABLE_ENTRIES_MIN).data_offset + area_bytes
