"""What the node directory holds: one entry for each block, and its form in bytes.

An entry in Redis, big-endian. Scripts there compare the owner as the bytes from 20 on, and read the generation:

    0         1      2       4         12           20          21         21 + n
    +---------+------+-------+---------+------------+-----------+----------+------------+
    | version | tier | index | segment | generation | n: length | boot     | name       |
    | u8      | u8   | u16   | u64     | u64        | u8        | n bytes  | up to 64   |
    +---------+------+-------+---------+------------+-----------+----------+------------+
"""

from __future__ import annotations

import re
import struct
from dataclasses import dataclass
from typing import Final

from h3kv.core.errors import RequestError
from h3kv.core.hashing import KEY_BYTES
from h3kv.core.types import BlockKey, SegmentId, Tier
from h3kv.policy.migration_state import Owner

FORMAT_VERSION: Final = 1


GENERATION_MAX: Final = 2**53 - 1
"""Scripts in Redis know numbers as doubles, which are exact so far."""

_HEAD: Final = struct.Struct(">BBHQQB")
OWNER_OFFSET: Final = _HEAD.size - 1
assert OWNER_OFFSET == 20

_TIERS: Final = (Tier.DEVICE, Tier.HOST, Tier.NVME)
_NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}", re.ASCII)


@dataclass(frozen=True, slots=True)
class DirectoryEntry:
    """Where a block lies, by the word of one life of its owner."""

    key: BlockKey
    tier: Tier
    owner: Owner
    segment: SegmentId
    generation: int
    """Of the segment when this was said."""
    index: int
    """The block's place in the segment, from 0."""


def check_name(name: str, what: str) -> None:
    """Refuse what could leave its place in a key.

    Raises:
        RequestError: not 1 to 64 letters, digits, dots, dashes or underscores, the first one a letter or digit.
    """
    if _NAME.fullmatch(name) is None:
        raise RequestError(f"{what} {name[:80]!r} must be 1 to 64 of A-Z, a-z, 0-9, '.', '_', '-', the first no sign")


def check_owner(owner: Owner) -> None:
    """Raise RequestError where name or boot token have characters that do not belong there."""
    check_name(owner.name, "the name of an owner")
    check_name(owner.boot, "a boot token")


def check_key(key: bytes) -> None:
    """Raise RequestError where a key of a block has the wrong size."""
    if len(key) != KEY_BYTES:
        raise RequestError(f"the key of a block has {KEY_BYTES} bytes, this one {len(key)}")


def check_entry(entry: DirectoryEntry) -> None:
    """Raise RequestError where a field cannot be kept as it is."""
    check_key(entry.key)
    check_owner(entry.owner)
    bounds = ((entry.segment, 2**64 - 1, "segment"), (entry.generation, GENERATION_MAX, "generation"))
    for number, largest, what in (*bounds, (entry.index, 2**16 - 1, "index")):
        if not 0 <= number <= largest:
            raise RequestError(f"the {what} of an entry must be from 0 to {largest}, this one is {number}")


def owner_bytes(owner: Owner) -> bytes:
    """What ends the value of every entry of this life of an owner."""
    return bytes([len(owner.boot)]) + owner.boot.encode() + owner.name.encode()


def encode(entry: DirectoryEntry) -> bytes:
    """An entry's value. Its key is kept beside it."""
    head = _HEAD.pack(FORMAT_VERSION, _TIERS.index(entry.tier), entry.index, entry.segment, entry.generation, 0)
    return head[:OWNER_OFFSET] + owner_bytes(entry.owner)


def decode(key: bytes, value: bytes) -> DirectoryEntry | None:
    """The entry of a value; None where it is none of this version, whoever wrote it."""
    if len(key) != KEY_BYTES or len(value) <= _HEAD.size:
        return None
    version, tier, index, segment, generation, boot_bytes = _HEAD.unpack_from(value)
    if version != FORMAT_VERSION or tier >= len(_TIERS) or generation > GENERATION_MAX:
        return None
    try:
        owner = value[_HEAD.size :].decode("ascii")
    except UnicodeDecodeError:
        return None
    boot, name = owner[:boot_bytes], owner[boot_bytes:]
    if _NAME.fullmatch(boot) is None or _NAME.fullmatch(name) is None:
        return None
    return DirectoryEntry(BlockKey(key), _TIERS[tier], Owner(name, boot), SegmentId(segment), generation, index)
