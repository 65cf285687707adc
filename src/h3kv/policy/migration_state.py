"""What the migration rules see, remember and command: small frozen values."""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple, NewType, TypeAlias

from h3kv.core.types import SegmentId, Tier
from h3kv.policy.migration_config import MigrationConfig, TierPair
from h3kv.policy.migration_tables import SegmentRef, SegmentTable

CommandId = NewType("CommandId", int)
"""Number of a command, unique within one life of the controller. With the controller's boot token it names it."""


class Direction(enum.StrEnum):
    """Of a move within a pair of tiers."""

    PROMOTE = "promote"
    DEMOTE = "demote"


class MoveReason(enum.StrEnum):
    """Why a segment is moved."""

    ROOM = "room"
    """Promoted: it was touched while the fast tier had room."""
    EARNED = "earned"
    """Promoted: it was touched in ticks in a row, and colder ones went for it."""
    DISPLACED = "displaced"
    """Demoted: a hotter one earned its place."""
    JITTER = "jitter"
    """Demoted: it was idle while the fast tier's access time was unsteady."""
    WATERMARK = "watermark"
    """Demoted: it was idle while the fast tier was too full."""


class HoldReason(enum.StrEnum):
    """Why a segment is not moved, or an event changes nothing."""

    BELOW_THRESHOLD = "below_threshold"
    """Read, but with too little attention mass to count as touched."""
    FEW_TOUCHES = "few_touches"
    """Touched, but in too few ticks in a row to earn a place."""
    NOT_HOTTER = "not_hotter"
    """Earned a place, but nothing is colder by the margin."""
    NOT_IDLE = "not_idle"
    """The fast tier should shrink, but it was touched lately."""
    HYSTERESIS = "hysteresis"
    """It was moved the other way, or its move failed, a short time ago."""
    PINNED = "pinned"
    IN_FLIGHT = "in_flight"
    """A command for it is under way."""
    BUDGET = "budget"
    """The bytes of this tick are spent."""
    COMMANDS_MAX = "commands_max"
    """Too many commands are under way."""
    TARGET_FULL = "target_full"
    ROOM_UNKNOWN = "room_unknown"
    """The room of a tier was not reported."""
    ROOM_LOST = "room_lost"
    """What should have made room for it did not go."""
    EXPIRED = "expired"
    """A command was forgotten at its deadline."""
    FAILED = "failed"
    """A command was carried out without success."""
    UNKNOWN_OWNER = "unknown_owner"
    """An event of a process that is not there, or of one that lives no longer."""
    UNKNOWN_SEGMENT = "unknown_segment"
    UNKNOWN_COMMAND = "unknown_command"
    """The end of a command that had ended before, or was forgotten."""
    TABLE_FULL = "table_full"
    """More segments or processes than are kept in mind."""


class Owner(NamedTuple):
    """One life of a process that owns segments or the room of a tier."""

    name: str
    boot: str
    """Boot token: another one at each start."""


class Touch(NamedTuple):
    """How much of a tick's attention a segment had."""

    segment: SegmentId
    mass: float
    """Share of all attention of that sequence, 0 to 1; the largest over sequences. Reads of everything, by dense layers
    or exact attention, are left out: they say nothing about a segment. Found by a prefix lookup: 1."""


@dataclass(frozen=True, slots=True)
class OwnerJoined:
    """A process is there. With another boot token than before it is a new one: what the old one had is gone."""

    owner: Owner


@dataclass(frozen=True, slots=True)
class OwnerLeft:
    """A process is gone, and all that it had."""

    owner: Owner


@dataclass(frozen=True, slots=True)
class RoomReported:
    """Room of a tier as it is now."""

    owner: Owner
    tier: Tier
    capacity_bytes: int
    free_bytes: int


@dataclass(frozen=True, slots=True)
class JitterReported:
    """Standard deviation of a tier's access time, from a probe in the background."""

    owner: Owner
    tier: Tier
    jitter_ns: float


@dataclass(frozen=True, slots=True)
class SegmentReported:
    """A segment as it is now. A new one counts as touched."""

    owner: Owner
    segment: SegmentId
    generation: int
    """Changes with every move of it: a command for another generation does nothing."""
    size_bytes: int
    """Over all layers."""
    tiers: frozenset[Tier]
    """Where it lies; in several, when copies are kept."""
    is_pinned: bool = False
    """Whether it must stay where it is: by its owner's word, whatever the rules say."""


@dataclass(frozen=True, slots=True)
class SegmentGone:
    """It exists no longer."""

    owner: Owner
    segment: SegmentId


@dataclass(frozen=True, slots=True)
class TouchesReported:
    """What was touched in one tick of a process."""

    owner: Owner
    tick: int
    """Number of the tick, growing by one each `tick_ns`. An older one than before is ignored."""
    touches: tuple[Touch, ...]


@dataclass(frozen=True, slots=True)
class MoveEnded:
    """A command was carried out, or refused."""

    command: CommandId
    error: str | None
    """Reason of the error; None: the segment lies in the target tier."""
    generation: int
    """Of the segment now."""
    tiers: frozenset[Tier]
    """Where it lies now."""


Event: TypeAlias = (
    OwnerJoined
    | OwnerLeft
    | RoomReported
    | JitterReported
    | SegmentReported
    | SegmentGone
    | TouchesReported
    | MoveEnded
)


@dataclass(frozen=True, slots=True)
class Command:
    """Move a segment. Whoever got it before, or has it under another generation, does nothing and says so."""

    id: CommandId
    owner: Owner
    segment: SegmentId
    generation: int
    source: Tier
    target: Tier
    size_bytes: int
    moved_bytes: int
    """What must be copied: 0 where the target holds a copy already."""
    deadline_ns: int
    """On the controller's clock: what is sent is the time that is left."""
    reason: MoveReason

    @property
    def ref(self) -> SegmentRef:
        """The segment that it moves."""
        return SegmentRef(self.owner.name, self.segment)

    @property
    def direction(self) -> Direction:
        """Within its pair."""
        is_up = self.reason in {MoveReason.ROOM, MoveReason.EARNED}
        return Direction.PROMOTE if is_up else Direction.DEMOTE


@dataclass(frozen=True, slots=True)
class Plan:
    """What one step decided."""

    commands: tuple[Command, ...] = ()
    """To be sent in this order."""
    held: Mapping[HoldReason, int] = field(default_factory=dict)
    """How many segments or events came to nothing in this step, by reason."""


@dataclass(frozen=True, slots=True)
class OwnerState:
    """A process that is there."""

    boot: str
    tick: int | None = None
    """Newest tick of its touches."""


class TrackedSegment(NamedTuple):
    """One segment as the rules know it: a tuple, as reports replace scores of them while an answer is waited for."""

    generation: int
    size_bytes: int
    tiers: frozenset[Tier]
    is_pinned: bool
    heat: float
    """Logarithm of its decayed number of uses, comparable among segments at any time: see `migration_heat`."""
    touched_ns: int
    """When it was touched last, or appeared."""
    touched_tick: int | None = None
    """Its owner's tick then."""
    touches_in_row: int = 0
    command: CommandId | None = None
    """Under way."""
    moved: Direction | None = None
    """The newest move of it, and"""
    moved_ns: int = 0
    """when that ended."""
    rests_until_ns: int = 0
    """After a move that failed."""


@dataclass(frozen=True, slots=True)
class Room:
    """Room of one tier, in bytes."""

    owner: str
    capacity_bytes: int
    free_bytes: int
    """As reported, changed by the moves that ended since."""


@dataclass(frozen=True, slots=True)
class Claim:
    """Room that is being made for a segment that earned it."""

    pair: TierPair
    commands: frozenset[CommandId]
    """Demotions that still have to end; without any the segment is promoted as soon as the budget allows."""
    deadline_ns: int
    """After which it is forgotten."""


@dataclass(frozen=True, slots=True)
class MigrationState:
    """All that the rules remember. Nobody changes its mappings."""

    config: MigrationConfig
    owners: Mapping[str, OwnerState] = field(default_factory=dict)
    segments: SegmentTable[TrackedSegment] = field(default_factory=SegmentTable)
    lying: Mapping[Tier, SegmentTable[TrackedSegment]] = field(default_factory=dict)
    """The same by the fast tiers in which they lie."""
    rooms: Mapping[Tier, Room] = field(default_factory=dict)
    jitter_ns: Mapping[Tier, tuple[str, float]] = field(default_factory=dict)
    """With the process that reported it."""
    commands: Mapping[CommandId, Command] = field(default_factory=dict)
    """Under way, at most one for each segment."""
    claims: Mapping[SegmentRef, Claim] = field(default_factory=dict)
    shrinking: frozenset[Tier] = frozenset()
    """Fast tiers that crossed the high watermark and have not come down to the low one."""
    balances: Mapping[Direction, int] = field(default_factory=dict)
    """Bytes that commands of this tick may still move; negative after a segment larger than a tick's budget."""
    tick: int = 0
    next_command: CommandId = CommandId(1)
    now_ns: int = 0
