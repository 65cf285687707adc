"""What a region begins with: a header and a table of slots, so that another process can tell what lies in it.

    offset 0        4096           data_offset            data_offset + blocks x block_bytes    size_bytes
    +---------------+--------------+---------------------------------------------+--------------+
    | header        | slot table   | slots, in blocks of block_bytes             | rounding     |
    +---------------+--------------+---------------------------------------------+--------------+

    header   magic 8s | version u32 | zero u32 | size_bytes u64 | block_bytes u64 | blocks u64 | data_offset u64 |
             crc u32, zlib's CRC-32 of all before it
    table    for each block offset: generation u64 | blocks u32 of the slot that begins there, 0 for none | zero u32

Everything is little-endian. The descriptor is sealed against change of size, so that a peer cannot take memory away
from under a reader.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import struct
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from h3kv.core.errors import StoreFormatError
from h3kv.core.limits import DIRECT_IO_BYTES, EXTENT_CLASSES_BLOCKS, SEGMENT_BLOCKS_MAX
from h3kv.memory.mapping import HUGE_PAGE_BYTES

MAGIC: Final = b"H3REGION"
VERSION: Final = 1
TABLE_OFFSET: Final = DIRECT_IO_BYTES
SLOT_DTYPE: Final = np.dtype([("generation", "<u8"), ("blocks", "<u4"), ("zero", "<u4")])
"""One entry of the slot table."""
SEALS: Final = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL

_HEADER: Final = struct.Struct("<8sIIQQQQ")
_CRC: Final = struct.Struct("<I")
_HEAD_BYTES: Final = _HEADER.size + _CRC.size

assert _HEAD_BYTES <= TABLE_OFFSET

SlotTableView = npt.NDArray[Any]
"""Array of SLOT_DTYPE, one entry for each block offset."""


@dataclass(frozen=True, slots=True)
class RegionGeometry:
    """How a region is divided."""

    block_bytes: int
    """Of one block of one layer: a multiple of 4 KiB."""
    blocks: int
    """How many fit: a multiple of 16."""

    @property
    def data_offset(self) -> int:
        """Where the slots begin: a multiple of 4 KiB."""
        end = DIRECT_IO_BYTES + self.blocks * SLOT_DTYPE.itemsize
        return -(-end // DIRECT_IO_BYTES) * DIRECT_IO_BYTES

    @property
    def data_bytes(self) -> int:
        """Bytes of all slots together."""
        return self.blocks * self.block_bytes

    @property
    def size_bytes(self) -> int:
        """Bytes of the whole region, rounded up to whole huge pages."""
        return -(-(self.data_offset + self.data_bytes) // HUGE_PAGE_BYTES) * HUGE_PAGE_BYTES


def make_table(blocks: int) -> SlotTableView:
    """A slot table in memory of its own, all slots free."""
    return np.zeros(blocks, dtype=SLOT_DTYPE)


def pack_header(geometry: RegionGeometry) -> bytes:
    """The header of a region, without the zeros that follow it."""
    header = _HEADER.pack(
        MAGIC, VERSION, 0, geometry.size_bytes, geometry.block_bytes, geometry.blocks, geometry.data_offset
    )
    return header + _CRC.pack(zlib.crc32(header))


def name_of(fd: int) -> str:
    """What a descriptor is called in messages."""
    with contextlib.suppress(OSError):
        return str(Path(f"/proc/self/fd/{fd}").readlink())
    return f"descriptor {fd}"


def validate_header(fd: int) -> RegionGeometry:
    """Geometry of the region behind a descriptor, or StoreFormatError."""
    name = name_of(fd)
    try:
        head = os.pread(fd, _HEAD_BYTES, 0)
        seals = fcntl.fcntl(fd, fcntl.F_GET_SEALS)
    except OSError as error:
        raise StoreFormatError(f"{name} is no region: {error.strerror}; pass a descriptor of one", path=name) from error
    if len(head) < _HEAD_BYTES or not head.startswith(MAGIC):
        raise StoreFormatError(f"{name} does not begin as a region does: pass a descriptor of one", path=name)
    _, version, _, size_bytes, block_bytes, blocks, data_offset = _HEADER.unpack_from(head)
    if version != VERSION:
        raise StoreFormatError(f"{name} is a region of version {version}, not {VERSION}: make it anew", path=name)
    geometry = RegionGeometry(block_bytes, blocks)
    is_whole = (
        _CRC.unpack_from(head, _HEADER.size)[0] == zlib.crc32(head[: _HEADER.size])
        and block_bytes > 0
        and block_bytes % DIRECT_IO_BYTES == 0
        and blocks > 0
        and blocks % SEGMENT_BLOCKS_MAX == 0
        and data_offset == geometry.data_offset
        and size_bytes == geometry.size_bytes == os.fstat(fd).st_size
    )
    if not is_whole:
        raise StoreFormatError(f"the header of {name} is damaged: make the region anew", path=name)
    if seals & SEALS != SEALS:
        raise StoreFormatError(f"{name} is not sealed against a change of size: make the region anew", path=name)
    return geometry


def validate_table(table: SlotTableView, *, name: str) -> None:
    """Raise StoreFormatError unless the slots are aligned extents that do not overlap."""
    end = 0
    for offset in np.flatnonzero(table["blocks"]).tolist():
        blocks = int(table["blocks"][offset])
        if offset < end or blocks not in EXTENT_CLASSES_BLOCKS or offset % blocks:
            raise StoreFormatError(f"the slot table of {name} is damaged at block {offset}: make it anew", path=name)
        end = offset + blocks
