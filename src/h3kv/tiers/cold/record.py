"""Small facts on disk that change: each in two sectors that are written in turn.

    offset 0        8      12      16           24     28     32                       4096
    +--------------+-------+-------+------------+------+------+------------------------+
    | magic        | kind  | vers. | sequence   | size | crc  | payload, then zeros    |
    +--------------+-------+-------+------------+------+------+------------------------+

The crc32c covers the whole sector with its own field zero. A write goes to the older of the two sectors, so a torn one
loses the new fact and never the old one. Of two valid sectors the higher sequence is the truth.
"""

from __future__ import annotations

import enum
import struct
from dataclasses import dataclass
from typing import Final

from h3kv.tiers.cold.seam import crc32c

SECTOR_BYTES: Final = 4096
"""Of one copy: the alignment of O_DIRECT, and what a device writes at once."""

TWIN_BYTES: Final = 2 * SECTOR_BYTES

FORMAT_VERSION: Final = 2
"""Of everything in a store but the pages, whose order is `core.layout.LAYOUT_VERSION`."""

MAGIC: Final = b"H3 COLD\n"
_HEAD: Final = struct.Struct("<8sIIQII")
_CRC_OFFSET: Final = 28


class Kind(enum.IntEnum):
    """What a record is about."""

    SUPERBLOCK = 1
    BUDGET = 2
    AREA = 3


@dataclass(frozen=True, slots=True)
class Record:
    """One valid sector."""

    sequence: int
    payload: bytes


def pack_record(kind: Kind, sequence: int, payload: bytes) -> bytes:
    """The sector of a record."""
    assert len(payload) <= SECTOR_BYTES - _HEAD.size
    sector = bytearray(SECTOR_BYTES)
    _HEAD.pack_into(sector, 0, MAGIC, kind, FORMAT_VERSION, sequence, len(payload), 0)
    sector[_HEAD.size : _HEAD.size + len(payload)] = payload
    struct.pack_into("<I", sector, _CRC_OFFSET, crc32c(bytes(sector)))
    return bytes(sector)


def unpack_twin(kind: Kind, twin: bytes) -> Record | None:
    """The newer valid record of two sectors; None where neither is valid."""
    records = [_unpack(kind, twin[at : at + SECTOR_BYTES]) for at in (0, SECTOR_BYTES)]
    return max((record for record in records if record is not None), key=lambda record: record.sequence, default=None)


def damaged_sectors(kind: Kind, twin: bytes) -> int:
    """How many of two sectors are neither valid nor zero, as they are before the first write."""
    sectors = [twin[at : at + SECTOR_BYTES] for at in (0, SECTOR_BYTES)]
    return sum(any(sector) and _unpack(kind, sector) is None for sector in sectors)


def twin_offset(offset: int, sequence: int) -> int:
    """Where the record of this number goes in the twin at `offset`: each number overwrites the one before the last."""
    return offset + sequence % 2 * SECTOR_BYTES


def versions(twin: bytes) -> set[int]:
    """Format versions of the sectors that look like ours, valid or not. Empty: this was never a store."""
    heads = [_HEAD.unpack_from(twin, at) for at in (0, SECTOR_BYTES)]
    return {head[2] for head in heads if head[0] == MAGIC}


def _unpack(kind: Kind, sector: bytes) -> Record | None:
    magic, found, version, sequence, size, crc = _HEAD.unpack_from(sector)
    if (magic, found, version) != (MAGIC, kind, FORMAT_VERSION) or size > SECTOR_BYTES - _HEAD.size:
        return None
    if crc32c(sector[:_CRC_OFFSET] + bytes(4) + sector[_CRC_OFFSET + 4 :]) != crc:
        return None
    return Record(sequence, sector[_HEAD.size : _HEAD.size + size])
