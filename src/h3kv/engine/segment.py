"""One segment: consecutive blocks of a sequence, and where they lie."""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

from h3kv.core.layout import CacheLayout
from h3kv.core.ports import BlockStore
from h3kv.core.types import BlockKey, SegmentId, SegmentLabel, SlotHandle, Tier
from h3kv.tiers.index_store import IndexSlot


class Phase(enum.Enum):
    """Where a segment is in its life."""

    OPEN = enum.auto()
    SEALING = enum.auto()
    SEALED = enum.auto()
    PRIVATE = enum.auto()
    LOST = enum.auto()


@dataclass(slots=True, eq=False)
class Arrival:
    """A segment on its way from the cold store into its home."""

    handles_L: tuple[SlotHandle, ...]
    addresses_L: tuple[int, ...]
    arrived: set[int] = field(default_factory=set)
    """Layers that are there, verified."""
    ended: int = 0
    """Fetches that ended, well or not."""
    error: Exception | None = None
    """Why it will not be complete."""


@dataclass(slots=True, eq=False)
class Segment:
    """Consecutive blocks of one sequence, with one slot in each layer of each tier where it lies. The table and the
    placer alone change it.
    """

    id: SegmentId
    room_blocks: int
    """Blocks that fit: the size of each slot, and what tells where a KV head's pages begin in it."""
    home_L: tuple[SlotHandle, ...] | None
    """Slots in the home tier."""
    addresses_L: tuple[int, ...] | None
    """First byte of each of them."""
    cold_L: tuple[SlotHandle, ...] | None = None
    """Slots in the cold store."""
    phase: Phase = Phase.OPEN
    pins: int = 1
    parent: SegmentId | None = None
    """The segment that this one continues."""
    label: SegmentLabel | None = None
    """What its blocks are, once it is sealed; None for a segment that no other sequence can share."""
    clustered_blocks: int = 0
    """Blocks among which its tokens are permuted, with an index over them; 0: they lie in order, without one."""
    holds: int = 0
    """Documents that want it to stay, in whatever tier."""
    is_erased: bool = False
    """Whether it holds KV of a document: zeros lie over its bytes wherever it leaves."""
    is_withdrawn: bool = False
    """Whether that document was deleted: nobody finds it or what continues it."""
    retrieving: int = 0
    """Pins of sequences that read it by retrieval: its index stays in memory for these."""
    index: IndexSlot | None = None
    """Room for its index besides its slabs."""
    has_index: bool = False
    """Whether the index lies there."""
    moves_in_flight: int = 0
    move_failed: bool = False
    arrival: Arrival | None = None
    """Its way back into its home."""
    is_copied: bool = False
    """Whether a copy to the cold store is being written from its home slots: they stay until it has ended."""
    places: int = 0
    """Counts how often its place changed."""
    version: int = 0
    """Counts that, and how often an index came or went: what a table of pages is made from."""
    used_ns: int = 0
    """When a sequence used it last, by the table's clock: for one without pins."""

    @property
    def keys(self) -> tuple[BlockKey, ...]:
        """Of the blocks that are filled, once it is sealed."""
        return () if self.label is None else self.label.keys

    @property
    def generation(self) -> int:
        """Of its place, from 1: whoever names another one means a place where it is no longer."""
        return self.places + 1

    def change_place(self) -> None:
        """Count that it lies elsewhere now."""
        self.places += 1
        self.version += 1

    def continue_from(self, parent: Segment | None, label: SegmentLabel | None, *, marked: set[BlockKey]) -> None:
        """Say what it holds, now that it is filled, and what that makes of it.

        Args:
            parent: that it continues, if there is one. What continues a withdrawn one is shared with nobody.
            label: of its blocks, where they may be shared.
            marked: blocks of documents.
        """
        if parent is not None:
            self.parent = parent.id
            self.is_erased |= parent.is_erased
            self.is_withdrawn |= parent.is_withdrawn
        if label is not None:
            self.is_erased |= label.parent in marked or not marked.isdisjoint(label.keys)
        self.label = None if self.is_withdrawn else label

    @property
    def tiers(self) -> frozenset[Tier]:
        """Where it lies; its home counts as HOST."""
        places = {Tier.HOST: self.home_L, Tier.NVME: self.cold_L}
        return frozenset(tier for tier, handles_L in places.items() if handles_L is not None)

    @property
    def is_read_whole(self) -> bool:
        """Whether a sequence reads all of it in every step, so that it should stay in memory.

        Retrieval reads what it chooses, once there is an index.
        """
        return self.pins > self.retrieving or (self.pins > 0 and self.clustered_blocks == 0)


@dataclass(frozen=True, slots=True)
class SegmentStatistics:
    """What the table holds at one moment."""

    segments: int
    sealed: int
    pins: int
    home_pins: int
    """Pins of segments that lie in the home tier, and"""
    pinned_bytes: int
    """the bytes that these take there."""
    used_blocks: int
    """Of segments that running sequences use, wherever they lie."""
    cold_blocks: int
    """Of these, those that lie in the cold store alone."""


def count_segments(segments: Sequence[Segment], layout: CacheLayout) -> SegmentStatistics:
    """What segments amount to."""
    return SegmentStatistics(
        segments=len(segments),
        sealed=sum(segment.phase is Phase.SEALED for segment in segments),
        pins=sum(segment.pins for segment in segments),
        home_pins=sum(segment.pins for segment in segments if segment.home_L),
        pinned_bytes=layout.block_bytes * sum(s.room_blocks for s in segments if s.pins and s.home_L),
        used_blocks=sum(s.room_blocks for s in segments if s.pins),
        cold_blocks=sum(s.room_blocks for s in segments if s.pins and not s.home_L),
    )


def held_home_blocks(segments: Sequence[Segment]) -> int:
    """Blocks of the home that documents hold."""
    return sum(segment.room_blocks for segment in segments if segment.holds and segment.home_L is not None)


def return_slots(store: BlockStore, segment: Segment, handles_L: Sequence[SlotHandle]) -> None:
    """Give a segment's slots in a store back, erased where that is to be."""
    (store.erase if segment.is_erased else store.release)(handles_L)


class RoomMaker(Protocol):
    """Frees room of the home by dropping or moving sealed segments."""

    def make_room(self, blocks: int, *, waits: bool) -> bool:
        """Try to have so many blocks free. Returns whether anything was freed.

        Args:
            blocks: of the home, over all layers.
            waits: for copies that free something when they end.
        """
        ...

    def freeable_blocks(self) -> int:
        """Blocks that sealed segments hold and could give up."""
        ...

    @property
    def refused_blocks(self) -> int:
        """Blocks that failed arrivals still hold."""
        ...
