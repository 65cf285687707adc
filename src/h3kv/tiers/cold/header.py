"""The header of an extent: what a segment is, how its slabs are stored, and the checksum of each of their pieces.

    offset  0       8      12      16     20     24       56          64       96
            +-------+------+-------+------+------+--------+-----------+--------+
            | magic | vers.| bytes | crc  | room | finger-| serial    | parent |
            |       |      |       |      |      | print  |           | key    |
            +-------+------+-------+------+------+--------+-----------+--------+
            96      104        108      112      116    120     124     128           512 more    1024
            +-------+----------+--------+--------+------+-------+-------+-------------+-----+---------+---------+
            | enco- | layout   | count  | pieces | la-  | block | check | keys of up  |     | wrapped | crc32c  |
            | ding  | version  | of keys|        | yers | bytes | bytes | to 16 blocks|zeros| by layer| by piece|
            +-------+----------+--------+--------+------+-------+-------+-------------+-----+---------+---------+

`pieces` is how many checked pieces of each slab were written, from its start. `wrapped` is how many bytes a slab has as
it is stored, where that is not as it is read (`wrap.py`), else 0. The checksums, `[layer][piece]` with the stride of
a whole slab, are those of the stored bytes. The header's own crc32c covers all of its cells with its own field zero. A
header without keys belongs to a segment that has no name: it ends with the process.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from h3kv.core.hashing import KEY_BYTES
from h3kv.core.limits import EXTENT_CLASSES_BLOCKS, SEGMENT_BLOCKS_MAX
from h3kv.core.types import BlockKey, SegmentLabel
from h3kv.tiers.cold.geometry import EXTENT_FIXED_BYTES, AreaGeometry
from h3kv.tiers.cold.record import FORMAT_VERSION
from h3kv.tiers.cold.seam import crc32c

EXTENT_MAGIC: Final = b"H3EXTENT"
_FIXED: Final = struct.Struct("<8sIIII32sQ32s8sIIIIII")
_CRC_OFFSET: Final = 16

assert _FIXED.size + SEGMENT_BLOCKS_MAX * KEY_BYTES <= EXTENT_FIXED_BYTES


@dataclass(frozen=True, slots=True, eq=False)
class ExtentHeader:
    """One extent as its header tells it. Shapes: L layers, C checked pieces."""

    fingerprint: bytes
    serial: int
    """Store-wide and increasing: the newer of two extents has the higher one."""
    room_blocks: int
    pieces: int
    """Of each slab that were written, from its start."""
    label: SegmentLabel | None
    wrapped_L: NDArray[np.uint32]
    """Bytes of each slab as it is stored; 0: as it is read."""
    crcs_LC: NDArray[np.uint32]
    """crc32c of each piece."""

    def stored_bytes(self, layer: int, geometry: AreaGeometry) -> int:
        """Bytes that a slab takes on the disk, whole pieces."""
        wrapped = int(self.wrapped_L[layer])
        return (geometry.pieces_in(wrapped) if wrapped else self.pieces) * geometry.mark.check_bytes


def pack_header(header: ExtentHeader, geometry: AreaGeometry) -> bytes:
    """The bytes of all of an extent's header cells."""
    size = header.room_blocks * geometry.header_bytes
    keys = () if header.label is None else header.label.keys
    parent = bytes(KEY_BYTES) if header.label is None else header.label.parent
    packed = bytearray(size)
    _FIXED.pack_into(
        packed,
        0,
        EXTENT_MAGIC,
        FORMAT_VERSION,
        size,
        0,
        header.room_blocks,
        header.fingerprint,
        header.serial,
        parent,
        *geometry.mark[:2],
        len(keys),
        header.pieces,
        *geometry.mark[2:],
    )
    packed[_FIXED.size : _FIXED.size + len(keys) * KEY_BYTES] = b"".join(keys)
    tables = b"".join(table.astype("<u4", copy=False).tobytes() for table in (header.wrapped_L, header.crcs_LC))
    packed[EXTENT_FIXED_BYTES : EXTENT_FIXED_BYTES + len(tables)] = tables
    struct.pack_into("<I", packed, _CRC_OFFSET, crc32c(bytes(packed)))
    return bytes(packed)


def whole_bytes(packed: bytes) -> int | None:
    """Size of the header of any model that starts here with all of its bytes as they were written; None without one."""
    if len(packed) < EXTENT_FIXED_BYTES or not packed.startswith(EXTENT_MAGIC):
        return None
    _, version, size, crc = _FIXED.unpack_from(packed)[:4]
    if version != FORMAT_VERSION or not EXTENT_FIXED_BYTES <= size <= len(packed):
        return None
    is_whole = crc32c(packed[:_CRC_OFFSET] + bytes(4) + packed[_CRC_OFFSET + 4 : size]) == int(crc)
    return int(size) if is_whole else None


def unpack_header(packed: bytes, geometry: AreaGeometry) -> ExtentHeader | None:
    """The header at the start of `packed`; None where there is none, or one that is damaged or of another layout.

    Args:
        packed: the header cells of the table from the extent's first one on; more than its own do no harm.
        geometry: of the area that it was read from.
    """
    if whole_bytes(packed) is None:
        return None
    _, _, size, _, room, fingerprint, serial, parent, *rest = _FIXED.unpack_from(packed)
    encoding, version, keys, pieces, *sizes = rest
    if (encoding, version, *sizes) != geometry.mark:
        return None
    if room not in EXTENT_CLASSES_BLOCKS or size != room * geometry.header_bytes:
        return None
    if keys > room or pieces > geometry.slab_pieces(room):
        return None
    names = tuple(
        BlockKey(packed[at : at + KEY_BYTES]) for at in range(_FIXED.size, _FIXED.size + keys * KEY_BYTES, KEY_BYTES)
    )
    layers = geometry.mark.layers
    count = layers * (1 + geometry.slab_pieces(room))
    tables = np.frombuffer(packed, dtype="<u4", count=count, offset=EXTENT_FIXED_BYTES).astype(np.uint32)
    wrapped_L, crcs_LC = tables[:layers], tables[layers:].reshape(layers, -1)
    if int(wrapped_L.max(initial=0)) > pieces * geometry.mark.check_bytes:
        return None
    label = SegmentLabel(names, BlockKey(parent)) if names else None
    return ExtentHeader(fingerprint, serial, room, pieces, label, wrapped_L, crcs_LC)
