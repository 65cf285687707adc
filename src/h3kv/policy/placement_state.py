"""What the placement policy sees, remembers and commands: small frozen values."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TypeAlias

from h3kv.core.types import SegmentId, Tier
from h3kv.core.units import NS_PER_S


@dataclass(frozen=True, slots=True)
class SegmentAppeared:
    """A segment was sealed, or found in a store that outlived a process. It counts as used now."""

    segment: SegmentId
    parent: SegmentId | None
    """The segment that it continues."""
    blocks: int
    """Room that it takes in each tier, over all layers."""
    tiers: frozenset[Tier]
    """Where it lies."""


@dataclass(frozen=True, slots=True)
class SegmentTouched:
    """A sequence used it. What held it back from other tiers is forgotten."""

    segment: SegmentId


@dataclass(frozen=True, slots=True)
class SegmentPinned:
    """A sequence began to use it."""

    segment: SegmentId


@dataclass(frozen=True, slots=True)
class SegmentUnpinned:
    """A sequence ended its use."""

    segment: SegmentId


@dataclass(frozen=True, slots=True)
class SegmentHeld:
    """It shall not be given up, though it may move: a document wants it to stay."""

    segment: SegmentId


@dataclass(frozen=True, slots=True)
class SegmentLetGo:
    """No document wants it to stay any more."""

    segment: SegmentId


@dataclass(frozen=True, slots=True)
class SegmentPlaced:
    """A copy of it is complete in this tier."""

    segment: SegmentId
    tier: Tier


@dataclass(frozen=True, slots=True)
class SegmentLeft:
    """It lies in this tier no longer."""

    segment: SegmentId
    tier: Tier


@dataclass(frozen=True, slots=True)
class SegmentGone:
    """It exists no longer."""

    segment: SegmentId


@dataclass(frozen=True, slots=True)
class MoveFailed:
    """A copy of it to this tier ended without one, or could not start."""

    segment: SegmentId
    target: Tier


@dataclass(frozen=True, slots=True)
class RoomNeeded:
    """Someone waits until so many blocks are free; 0 when nobody does any longer. The newest number counts.

    Where enough blocks are free but lie apart, the number asked for must exceed those that are free.
    """

    tier: Tier
    blocks: int


@dataclass(frozen=True, slots=True)
class RoomReported:
    """Room of a tier as it is now, to be said after every change. Started copies have their room already."""

    tier: Tier
    capacity_blocks: int
    free_blocks: int


@dataclass(frozen=True, slots=True)
class MoveAsked:
    """Someone else decided that it shall lie in this tier, and in no faster one. It ends, or comes to nothing, as
    `PlacementState.asked` tells.
    """

    segment: SegmentId
    target: Tier
    reason: str


@dataclass(frozen=True, slots=True)
class MoveNotAsked:
    """What was asked for it has no more meaning. A copy that began goes on."""

    segment: SegmentId


KnownEvent: TypeAlias = (
    SegmentTouched
    | SegmentPinned
    | SegmentUnpinned
    | SegmentHeld
    | SegmentLetGo
    | SegmentPlaced
    | SegmentLeft
    | MoveFailed
    | MoveAsked
)
"""About a segment that is there."""

Event: TypeAlias = KnownEvent | SegmentAppeared | SegmentGone | MoveNotAsked | RoomNeeded | RoomReported


@dataclass(frozen=True, slots=True)
class Copy:
    """Copy a segment from one tier to another; `SegmentPlaced` or `MoveFailed` answers."""

    segment: SegmentId
    source: Tier
    target: Tier
    reason: str


@dataclass(frozen=True, slots=True)
class Drop:
    """Give up a segment's copy in one tier; with its last one the segment itself."""

    segment: SegmentId
    tier: Tier
    reason: str


Plan: TypeAlias = tuple[Copy | Drop, ...]
"""Commands, to be carried out in this order."""


@dataclass(frozen=True, slots=True)
class PlacementConfig:
    """Bounds of the policy."""

    has_nvme: bool
    """Whether there is a cold store that takes segments."""
    write_behind: bool = True
    """Whether sealed segments are written to the cold store before their room is needed."""
    copies_in_flight_max: int = 2
    """Copies to NVME under way at a time. What comes back is bounded by the room for it alone: a sequence waits."""
    host_free_blocks_min: int = 0
    """Headroom: blocks that are kept free in HOST as far as dropping what nobody uses allows."""
    hysteresis_ns: int = 10 * NS_PER_S
    """For how long a move that was asked for is not undone, unless a sequence begins to use the segment or the room is
    needed."""


@dataclass(frozen=True, slots=True)
class PlacedSegment:
    """One segment as the policy knows it."""

    segment: SegmentId
    parent: SegmentId | None
    blocks: int
    tiers: frozenset[Tier]
    """Where it lies once the plans so far are carried out; empty when it was given up."""
    pins: int
    last_used: int
    """Tick of its last use; larger is newer."""
    held_back: frozenset[Tier] = frozenset()
    """Tiers that it is not copied to until it is touched, or pinned again in the case of HOST: a copy failed, found no
    room, or was given up for room."""
    is_held: bool = False
    """Whether its last copy stays."""
    rests_until_ns: int = 0
    """Until then a move that was asked for is not undone without need."""

    @property
    def stays(self) -> int:
        """How many want it not to be given up."""
        return self.pins + self.is_held


def behind(segment: PlacedSegment, children: dict[SegmentId, list[PlacedSegment]]) -> list[PlacedSegment]:
    """All that continue a segment, each after what continues it; taken out of `children`."""
    direct = children.pop(segment.segment, [])
    return [each for child in direct for each in (*behind(child, children), child)]


@dataclass(frozen=True, slots=True)
class Room:
    """Room of one tier, in blocks over all layers."""

    capacity_blocks: int
    free_blocks: int
    """As reported, changed by the commands since."""


@dataclass(frozen=True, slots=True)
class PlacementState:
    """All that the policy remembers. Mappings keep the order in which things came; nobody changes them."""

    config: PlacementConfig
    segments: Mapping[SegmentId, PlacedSegment] = field(default_factory=dict)
    unwritten: Mapping[SegmentId, None] = field(default_factory=dict)
    """Segments without a copy on NVME, oldest first."""
    missed: Mapping[SegmentId, None] = field(default_factory=dict)
    """Pinned segments that lie on NVME alone, first pinned first."""
    copies: Mapping[SegmentId, Copy] = field(default_factory=dict)
    """In flight, at most one for each segment."""
    asked: Mapping[SegmentId, MoveAsked] = field(default_factory=dict)
    """Moves that others decided and that have not ended. What cannot be done is taken off."""
    rooms: Mapping[Tier, Room] = field(default_factory=dict)
    """As far as they were reported."""
    needs: Mapping[Tier, int] = field(default_factory=dict)
    """Free blocks that are waited for."""
    tick: int = 0
    now_ns: int = 0
