"""Between messages and the nouns of `core.types`. What comes in is checked here: nothing behind it sees a message."""

from __future__ import annotations

import re
from typing import Final

from h3kv.api.common.v1 import statistics_pb2, types_pb2
from h3kv.core.errors import RequestError
from h3kv.core.hashing import KEY_BYTES
from h3kv.core.limits import EXTENT_CLASSES_BLOCKS
from h3kv.core.types import BlockKey, SlotHandle, StoreStatistics, Tier

BOOT_TOKEN_BYTES: Final = 16
COMMANDS_MAX: Final = 1_000
"""In one call."""
PAGE_MAX: Final = 1_000
"""Entries in one page of a list."""

_LABEL: Final = re.compile(r"[a-z][a-z_]{0,62}")
_NAME: Final = re.compile(r"[a-z0-9][a-z0-9_.-]{0,62}")

_TIERS: Final = {
    Tier.DEVICE: types_pb2.TIER_DEVICE,
    Tier.HOST: types_pb2.TIER_HOST,
    Tier.NVME: types_pb2.TIER_NVME,
}
_TIERS_BACK: Final = {number: tier for tier, number in _TIERS.items()}


def tier_message(tier: Tier) -> types_pb2.Tier:
    """A tier as messages write it."""
    return _TIERS[tier]


def read_tier(number: types_pb2.Tier, *, field: str) -> Tier:
    """The tier that a message means. Raises RequestError for none, or one of another version."""
    tier = _TIERS_BACK.get(number)
    if tier is None:
        raise RequestError(f"{field} = {number}: must be one of {', '.join(tier.name for tier in _TIERS)}")
    return tier


def read_key(key: bytes, *, field: str) -> BlockKey:
    """The key in a message. Raises RequestError for another length."""
    return BlockKey(_sized(key, KEY_BYTES, field))


def read_boot_token(token: bytes, *, field: str) -> bytes:
    """The boot token in a message. Raises RequestError for another length."""
    return _sized(token, BOOT_TOKEN_BYTES, field)


def read_label(text: str, *, field: str) -> str:
    """A reason that can be a label of a metric. Raises RequestError for other characters, or too many."""
    if not _LABEL.fullmatch(text):
        raise RequestError(f"{field} = {text[:100]!r}: must be 1 to 63 of a-z and '_'")
    return text


def read_name(text: str, *, field: str) -> str:
    """The name of a process. Raises RequestError for characters that could leave a folder or a line of a log."""
    if not _NAME.fullmatch(text):
        raise RequestError(f"{field} = {text[:100]!r}: must be 1 to 63 of a-z, 0-9, '_', '-' and '.'")
    return text


def slot_message(handle: SlotHandle) -> types_pb2.Slot:
    """A slot as messages write it; its tier goes without saying."""
    return types_pb2.Slot(offset_blocks=handle.slot, blocks=handle.blocks, generation=handle.generation)


def read_slot(slot: types_pb2.Slot, tier: Tier, *, field: str) -> SlotHandle:
    """The handle in a message: perhaps stale, which the store says. Raises RequestError for a size that no slot has."""
    if slot.blocks not in EXTENT_CLASSES_BLOCKS or slot.offset_blocks % slot.blocks:
        raise RequestError(f"{field}: no slot of {slot.blocks} blocks begins at block {slot.offset_blocks}")
    return SlotHandle(tier, slot.offset_blocks, slot.blocks, slot.generation)


def statistics_message(statistics: StoreStatistics, *, pinned_bytes: int) -> statistics_pb2.TierStatistics:
    """A tier's occupancy as messages write it."""
    return statistics_pb2.TierStatistics(
        tier=tier_message(statistics.tier),
        capacity_bytes=statistics.capacity_bytes,
        used_bytes=statistics.used_bytes,
        pinned_bytes=pinned_bytes,
        slabs_visible=statistics.slabs_visible,
        moves_total=statistics.moves_total,
        bytes_moved_total=statistics.bytes_moved_total,
    )


def read_statistics(message: statistics_pb2.TierStatistics, *, field: str) -> StoreStatistics:
    """The occupancy in a message. Raises RequestError where a tier uses more than it has."""
    if message.used_bytes > message.capacity_bytes:
        raise RequestError(f"{field}: {message.used_bytes} bytes are used of {message.capacity_bytes}")
    return StoreStatistics(
        tier=read_tier(message.tier, field=f"{field}.tier"),
        capacity_bytes=message.capacity_bytes,
        used_bytes=message.used_bytes,
        slabs_visible=message.slabs_visible,
        moves_total=message.moves_total,
        bytes_moved_total=message.bytes_moved_total,
    )


def _sized(data: bytes, size_bytes: int, field: str) -> bytes:
    if len(data) != size_bytes:
        raise RequestError(f"{field} has {len(data)} bytes: must have {size_bytes}")
    return data
