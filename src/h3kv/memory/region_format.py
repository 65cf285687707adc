"""What a region begins with: a header and perhaps a table of slots, so that another process can tell what lies in it.

    offset 0        4096           data_offset            data_offset + blocks x block_bytes    size_bytes
    +---------------+--------------+---------------------------------------------+--------------+
    | header        | slot table   | slots, in blocks of block_bytes             | rounding     |
    +---------------+--------------+---------------------------------------------+--------------+
    | header        | data of any form (a table, a mailbox): no slots            | rounding     |
    +---------------+------------------------------------------------------------+--------------+

    header   magic 8s | version u32 | id u32 | size_bytes u64 | block_bytes u64 | blocks u64 | data_offset u64 |
             data_bytes u64 | address u64 | purpose 16s, padded with zeros | boot token 16s |
             crc u32, zlib's CRC-32 of all before it
    table    for each block offset: generation u64 | blocks u32 of the slot that begins there, 0 for none |
             holder u16 | zero u16

Everything is little-endian. `block_bytes` and `blocks` are 0 in a region without slots. `holder` is set in the first
entry of a unit of 16 blocks and names who leased the unit, 0 for nobody; in other entries it is 0.

Where a region is shared, all processes map it at the same address, so that tables with addresses in them are valid in
each. Region `id` has the range of 1 TiB that begins at 0x3000_0000_0000 + id x 2^40:

    x86-64   0x3000_0000_0000 .. 0x4fff_ffff_ffff lies below programs (from 0x5555_5555_4000) and libraries, which grow
             down from 0x7fff_ffff_ffff; above the shadow of the address sanitizer, which ends at 0x1000_7fff_8000
    arm64    with addresses of 48 bits: below programs (from 0xaaaa_aaaa_0000); above the sanitizer's shadow, which ends
             at 0x2010_0000_0000. A kernel with addresses of 39 or 42 bits has no such range and refuses it

Memory that can change its size is sealed, so that a peer cannot take it away from under a reader. A DMA buffer has the
size that it was made with, and neither seals nor `read`: its header is read through a mapping.
"""

from __future__ import annotations

import fcntl
import os
import re
import struct
import zlib
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from h3kv.core.errors import StoreFormatError
from h3kv.core.limits import DIRECT_IO_BYTES, EXTENT_CLASSES_BLOCKS, SEGMENT_BLOCKS_MAX
from h3kv.memory.dma_heap import dma_buffer_bytes
from h3kv.memory.file_names import name_of
from h3kv.memory.mapping import HUGE_PAGE_BYTES, Mapping

MAGIC: Final = b"H3REGION"
VERSION: Final = 2
TABLE_OFFSET: Final = DIRECT_IO_BYTES
SLOT_DTYPE: Final = np.dtype([("generation", "<u8"), ("blocks", "<u4"), ("holder", "<u2"), ("zero", "<u2")])
"""One entry of the slot table."""
SEALS: Final = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL

ADDRESS_BASE: Final = 0x3000_0000_0000
WINDOW_BYTES: Final = 1 << 40
REGIONS_MAX: Final = 32
"""Windows up to 0x5000_0000_0000. Also bounds the descriptors in one message."""
BOOT_TOKEN_BYTES: Final = 16

_PURPOSE: Final = re.compile(rb"[a-z][a-z0-9_]{0,15}")
_HEADER: Final = struct.Struct("<8sIIQQQQQQ16s16s")
_CRC: Final = struct.Struct("<I")
_HEAD_BYTES: Final = _HEADER.size + _CRC.size

assert _HEAD_BYTES <= TABLE_OFFSET
assert SLOT_DTYPE.itemsize == 16

SlotTableView = npt.NDArray[Any]
"""Array of SLOT_DTYPE, one entry for each block offset."""


@dataclass(frozen=True, slots=True)
class RegionGeometry:
    """How a region with slots is divided."""

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

    @property
    def is_sound(self) -> bool:
        """Whether the numbers are as they must be."""
        return (
            self.block_bytes > 0
            and self.block_bytes % DIRECT_IO_BYTES == 0
            and self.blocks > 0
            and self.blocks % SEGMENT_BLOCKS_MAX == 0
        )


@dataclass(frozen=True, slots=True)
class OpaqueGeometry:
    """A region without slots: a table or a mailbox, whose form only its users know."""

    data_bytes: int
    """A multiple of 4 KiB."""

    @property
    def block_bytes(self) -> int:
        """There are no blocks."""
        return 0

    @property
    def blocks(self) -> int:
        """There are no blocks."""
        return 0

    @property
    def data_offset(self) -> int:
        """Where the data begins."""
        return DIRECT_IO_BYTES

    @property
    def size_bytes(self) -> int:
        """Bytes of the whole region, rounded up to whole huge pages."""
        return -(-(self.data_offset + self.data_bytes) // HUGE_PAGE_BYTES) * HUGE_PAGE_BYTES

    @property
    def is_sound(self) -> bool:
        """Whether the numbers are as they must be."""
        return self.data_bytes > 0 and self.data_bytes % DIRECT_IO_BYTES == 0


Geometry = RegionGeometry | OpaqueGeometry


@dataclass(frozen=True, slots=True)
class RegionIdentity:
    """Which of a node's regions it is."""

    id: int
    """From 0 to 31, unique among the regions of a node. It fixes the address."""
    purpose: str
    """What lies in it, such as `host`, `index`, `table`: 1 to 16 of a-z, 0-9 and _. A node has one of each."""
    boot_token: bytes
    """16 bytes, of the process that made it. A region that is made anew has another one, whatever its id."""

    @property
    def address(self) -> int:
        """Where every process maps it."""
        return ADDRESS_BASE + self.id * WINDOW_BYTES

    @property
    def is_sound(self) -> bool:
        """Whether the fields are as they must be."""
        return (
            0 <= self.id < REGIONS_MAX
            and _PURPOSE.fullmatch(self.purpose.encode()) is not None
            and len(self.boot_token) == BOOT_TOKEN_BYTES
        )


@dataclass(frozen=True, slots=True)
class RegionHeader:
    """What a region says of itself."""

    geometry: Geometry
    identity: RegionIdentity | None
    """None for a region of one process, which may lie at any address."""

    @property
    def address(self) -> int | None:
        """Where it must be mapped; None: anywhere."""
        return None if self.identity is None else self.identity.address


def make_table(blocks: int) -> SlotTableView:
    """A slot table in memory of its own, all slots free."""
    return np.zeros(blocks, dtype=SLOT_DTYPE)


def pack_header(geometry: Geometry, identity: RegionIdentity | None = None) -> bytes:
    """The header of a region, without the zeros that follow it."""
    assert geometry.is_sound, geometry
    assert identity is None or (identity.is_sound and geometry.size_bytes <= WINDOW_BYTES), identity
    header = _HEADER.pack(
        MAGIC,
        VERSION,
        0 if identity is None else identity.id,
        geometry.size_bytes,
        geometry.block_bytes,
        geometry.blocks,
        geometry.data_offset,
        geometry.data_bytes,
        0 if identity is None else identity.address,
        b"" if identity is None else identity.purpose.encode(),
        b"" if identity is None else identity.boot_token,
    )
    return header + _CRC.pack(zlib.crc32(header))


def validate_header(fd: int) -> RegionHeader:
    """What the region behind a descriptor says of itself, or StoreFormatError."""
    name = name_of(fd)
    dma_bytes = dma_buffer_bytes(fd)
    try:
        head = os.pread(fd, _HEAD_BYTES, 0) if dma_bytes is None else _mapped_head(fd)
        seals = fcntl.fcntl(fd, fcntl.F_GET_SEALS) if dma_bytes is None else SEALS
    except OSError as error:
        raise StoreFormatError(f"{name} is no region: {error.strerror}; pass a descriptor of one", path=name) from error
    if len(head) < _HEAD_BYTES or not head.startswith(MAGIC):
        raise StoreFormatError(f"{name} does not begin as a region does: pass a descriptor of one", path=name)
    version = int.from_bytes(head[8:12], "little")
    if version != VERSION:
        raise StoreFormatError(f"{name} is a region of version {version}, not {VERSION}: make it anew", path=name)
    header = _parse(head, os.fstat(fd).st_size if dma_bytes is None else dma_bytes)
    if header is None:
        raise StoreFormatError(f"the header of {name} is damaged: make the region anew", path=name)
    if seals & SEALS != SEALS:
        raise StoreFormatError(f"{name} is not sealed against a change of size: make the region anew", path=name)
    return header


def validate_table(table: SlotTableView, *, name: str) -> None:
    """Raise StoreFormatError unless the slots are aligned extents that do not overlap."""
    end = 0
    for offset in np.flatnonzero(table["blocks"]).tolist():
        blocks = int(table["blocks"][offset])
        if offset < end or blocks not in EXTENT_CLASSES_BLOCKS or offset % blocks:
            raise StoreFormatError(f"the slot table of {name} is damaged at block {offset}: make it anew", path=name)
        end = offset + blocks
    strayed = np.flatnonzero(table["holder"])
    if (strayed % SEGMENT_BLOCKS_MAX).any():
        raise StoreFormatError(f"the slot table of {name} has holders inside of units: make it anew", path=name)


def _mapped_head(fd: int) -> bytes:
    return bytes(Mapping(DIRECT_IO_BYTES, fd=fd).view()[:_HEAD_BYTES])


def _parse(head: bytes, found_bytes: int) -> RegionHeader | None:
    """The header in these bytes of a file of this size, or None where anything in it is not as `pack_header` writes."""
    fields = _HEADER.unpack_from(head)
    _, _, number, size_bytes, block_bytes, blocks, data_offset, data_bytes, address, purpose, token = fields
    geometry = RegionGeometry(block_bytes, blocks) if blocks or block_bytes else OpaqueGeometry(data_bytes)
    identity: RegionIdentity | None = None
    if address:
        identity = RegionIdentity(number, purpose.rstrip(b"\0").decode("ascii", "replace"), token)
    is_whole = (
        _CRC.unpack_from(head, _HEADER.size)[0] == zlib.crc32(head[: _HEADER.size])
        and geometry.is_sound
        and data_offset == geometry.data_offset
        and size_bytes == geometry.size_bytes == found_bytes
        and (identity is None or (identity.is_sound and size_bytes <= WINDOW_BYTES))
    )
    # What was not compared above, and padding, must be what would be written.
    if not is_whole or head[: _HEADER.size] != pack_header(geometry, identity)[: _HEADER.size]:
        return None
    return RegionHeader(geometry, identity)
