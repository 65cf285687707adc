"""The nouns of the system as small frozen values. See `docs/glossary.md` for their meaning."""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import NewType

BlockKey = NewType("BlockKey", bytes)
"""Content hash of a block, chained over its prefix and salted with fingerprint and tenant. 32 bytes."""

SegmentId = NewType("SegmentId", int)
"""Number of a segment, unique within one process and never used twice."""


class Tier(enum.StrEnum):
    """Where bytes lie."""

    DEVICE = "device"
    HOST = "host"
    NVME = "nvme"


class DType(enum.StrEnum):
    """Element type of weights and of `raw` pages."""

    FP32 = "fp32"
    BF16 = "bf16"
    FP16 = "fp16"

    @property
    def size_bytes(self) -> int:
        """Bytes of one element."""
        return 4 if self is DType.FP32 else 2


class Encoding(enum.StrEnum):
    """How keys and values are coded inside a page. One per fingerprint, the same in every tier."""

    RAW = "raw"
    """Numbers of the element type that runs."""
    INT8 = "int8"
    """Keys and values in 8 bits."""
    K8V4 = "k8v4"
    """Keys in 8 bits, split into a plane of high nibbles and one of low nibbles; values in 4."""
    INT4 = "int4"
    """Keys and values in 4 bits."""

    @property
    def is_clustered(self) -> bool:
        """Whether a full segment's tokens are clustered and indexed when it is sealed."""
        return self in {Encoding.K8V4, Encoding.INT4}


@dataclass(frozen=True, slots=True)
class SlabKey:
    """Names one slab: one layer of a segment."""

    segment: SegmentId
    layer: int


@dataclass(frozen=True, slots=True)
class SlotHandle:
    """Room for one slab in a store.

    A handle goes stale when its slot is released: the generation moves on, and using it raises `StaleHandleError`.
    """

    tier: Tier
    slot: int
    """Offset in the store, in blocks of one layer."""
    blocks: int
    """Size of the room: one of `limits.EXTENT_CLASSES_BLOCKS`."""
    generation: int


@dataclass(frozen=True, slots=True)
class SegmentLabel:
    """What a segment holds, in words that outlive the process."""

    keys: tuple[BlockKey, ...]
    """Of its whole blocks, first block first; at least one."""
    parent: BlockKey
    """The key before the first block: the block before, or the root key."""


@dataclass(frozen=True, slots=True)
class Move:
    """One slab to be written into a reserved slot and then made visible."""

    key: SlabKey
    target: SlotHandle
    source: memoryview | None
    """Bytes to copy, at most the slot's size; the caller keeps them unchanged until the completion.
    None: the bytes were written in place through `AddressableStore.address`, only visibility is asked for."""
    label: SegmentLabel | None = None
    """Of the whole segment, the same for all its slabs. A store that outlives the process keeps it; without it the
    segment is forgotten at the end of the process."""


@dataclass(frozen=True, slots=True)
class Fetch:
    """One visible slab, or a part of it, to be copied out of its store, verified where the store can."""

    key: SlabKey
    source: SlotHandle
    target: memoryview
    """Writable room for bytes of the slab: whole checked units (`SlabLayout.check_bytes`), at most the slot. The caller
    leaves it alone until the completion; after an error it holds anything."""
    offset_bytes: int = 0
    """Where in the slab they begin: at a checked unit."""


@dataclass(frozen=True, slots=True)
class Completion:
    """The end of one move or fetch. A moved slab is visible as soon as this was polled, unless `error` is set."""

    move: Move | Fetch
    error: Exception | None


@dataclass(frozen=True, slots=True)
class StoredSegment:
    """A segment that a store kept from an earlier process."""

    segment: SegmentId
    """The number that it has in this process."""
    label: SegmentLabel
    handles_L: tuple[SlotHandle, ...]
    """One visible slot for each layer."""


@dataclass(frozen=True, slots=True)
class StoreStatistics:
    """A store's occupancy at one moment. `used + free = capacity`."""

    tier: Tier
    capacity_bytes: int
    used_bytes: int
    slabs_visible: int
    moves_total: int
    bytes_moved_total: int

    @property
    def free_bytes(self) -> int:
        """Bytes that are not reserved. A reservation can still fail when they lie apart."""
        return self.capacity_bytes - self.used_bytes


@dataclass(frozen=True, slots=True)
class BlockLocation:
    """Where the directory says a block's KV is: a hint until the segment is pinned."""

    segment: SegmentId
    index: int
    """The block's place in the segment, from 0."""
