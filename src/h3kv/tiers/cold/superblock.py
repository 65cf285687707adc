"""The two kinds of facts about a whole store: its superblock, and whose each area is."""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import Final

from h3kv.tiers.cold.geometry import SUPERBLOCK_OFFSET, LayoutMark, VolumeGeometry
from h3kv.tiers.cold.ops import Op, write_of
from h3kv.tiers.cold.record import Kind, pack_record, twin_offset

_SUPERBLOCK: Final = struct.Struct("<16sQQQQ")
_AREA: Final = struct.Struct("<32s8sIIIIQQ")


@dataclass(frozen=True, slots=True)
class Superblock:
    """What the whole store agrees on."""

    store_id: bytes
    """16 random bytes of the day it was made."""
    geometry: VolumeGeometry
    epoch: int
    """How often the store was opened: the high half of every serial."""

    def write(self, sequence: int) -> Op:
        """The write of this superblock under a number."""
        payload = _SUPERBLOCK.pack(
            self.store_id,
            self.geometry.capacity_bytes,
            self.geometry.area_bytes,
            self.geometry.table_entries,
            self.epoch,
        )
        return write_of(twin_offset(SUPERBLOCK_OFFSET, sequence), pack_record(Kind.SUPERBLOCK, sequence, payload))

    @classmethod
    def unpack(cls, payload: bytes) -> Superblock:
        """The superblock of a valid record."""
        store_id, capacity, area, entries, epoch = _SUPERBLOCK.unpack(payload)
        return cls(store_id, VolumeGeometry(capacity, area, entries), epoch)


@dataclass(frozen=True, slots=True)
class AreaEntry:
    """Whose an area is."""

    fingerprint: bytes
    mark: LayoutMark
    claimed: int
    """Serial at which this model took the area. Headers of an older one are left from the owner before."""
    used: int
    """Epoch in which its model last opened the store."""

    def write(self, offset: int, sequence: int) -> Op:
        """The write of this entry to its twin at `offset` under a number."""
        payload = _AREA.pack(self.fingerprint, *self.mark, self.claimed, self.used)
        return write_of(twin_offset(offset, sequence), pack_record(Kind.AREA, sequence, payload))

    @classmethod
    def unpack(cls, payload: bytes) -> AreaEntry:
        """The entry of a valid record."""
        fingerprint, *mark, claimed, used = _AREA.unpack(payload)
        return cls(fingerprint, LayoutMark(*mark), claimed, used)
