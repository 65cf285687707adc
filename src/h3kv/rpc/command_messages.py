"""Commands to move segments and how they end, as nouns and as messages."""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import Final

from h3kv.api.common.v1 import commands_pb2, types_pb2
from h3kv.api.nvme_io.v1 import nvme_io_service_pb2 as nvme
from h3kv.core.errors import RequestError
from h3kv.core.types import BlockKey, SegmentId, Tier
from h3kv.rpc.convert import read_boot_token, read_key, read_label, read_tier, tier_message

REASON_CHARACTERS_MAX: Final = 63


class MoveEnd(enum.Enum):
    """How a command stands: as `Outcome` in the protocol."""

    DONE = commands_pb2.OUTCOME_DONE
    RELAYED = commands_pb2.OUTCOME_RELAYED
    STARTED = commands_pb2.OUTCOME_STARTED
    STALE = commands_pb2.OUTCOME_STALE
    UNKNOWN_SEGMENT = commands_pb2.OUTCOME_UNKNOWN_SEGMENT
    BUSY = commands_pb2.OUTCOME_BUSY
    NO_ROOM = commands_pb2.OUTCOME_NO_ROOM
    EXPIRED = commands_pb2.OUTCOME_EXPIRED
    FAILED = commands_pb2.OUTCOME_FAILED

    @property
    def label(self) -> str:
        """Of a metric."""
        return self.name.lower()

    @property
    def is_under_way(self) -> bool:
        """Whether the end is still to come."""
        return self in {MoveEnd.RELAYED, MoveEnd.STARTED}


@dataclass(frozen=True, slots=True)
class MoveOutcome:
    """How one command ended or stands."""

    sender_boot_token: bytes
    """Of the process that gave it: 16 bytes."""
    number: int
    """Of the command in that process's life."""
    end: MoveEnd
    error_reason: str = ""
    """From the tree of errors, where it failed."""
    generation: int | None = None
    """Of the segment now, where it is known."""
    tiers: frozenset[Tier] = frozenset()
    """Where it lies now; empty where that is not known."""


@dataclass(frozen=True, slots=True)
class MoveCommand:
    """A command that was passed on to the holder of a segment."""

    sender_boot_token: bytes
    number: int
    segment: SegmentId
    key: BlockKey
    """Of its first block."""
    owner_boot_token: bytes
    generation: int
    timeout_ns: int
    """Left when it was passed on."""
    reason: str
    source: Tier
    target: Tier

    @property
    def id(self) -> tuple[bytes, int]:
        """Names it."""
        return self.sender_boot_token, self.number


@dataclass(frozen=True, slots=True)
class EndedCommand:
    """How a command ended, and what it took."""

    command: MoveCommand
    outcome: MoveOutcome
    size_bytes: int = 0
    """Copied: 0 where the target had them, or nothing was done."""
    duration_ns: int = 0


def outcome_message(outcome: MoveOutcome) -> commands_pb2.CommandOutcome:
    """An outcome as messages write it."""
    return commands_pb2.CommandOutcome(
        id=commands_pb2.CommandId(sender_boot_token=outcome.sender_boot_token, number=outcome.number),
        outcome=outcome.end.value,
        error_reason=outcome.error_reason,
        generation=outcome.generation or 0,
        tiers=[tier_message(tier) for tier in sorted(outcome.tiers)],
    )


def read_move_outcome(message: commands_pb2.CommandOutcome, *, field: str) -> MoveOutcome:
    """The outcome in a message: one that this version does not know counts as failed. Raises RequestError."""
    if message.id.number == 0:
        raise RequestError(f"{field}.id.number = 0: commands are numbered from 1")
    known = {each.value: each for each in MoveEnd}
    return MoveOutcome(
        sender_boot_token=read_boot_token(message.id.sender_boot_token, field=f"{field}.id.sender_boot_token"),
        number=message.id.number,
        end=known.get(message.outcome, MoveEnd.FAILED),
        error_reason=message.error_reason[:REASON_CHARACTERS_MAX],
        generation=message.generation or None,
        tiers=frozenset(read_tier(each, field=f"{field}.tiers") for each in message.tiers),
    )


def read_relayed(message: nvme.RelayedCommand) -> MoveCommand:
    """The command in a message. Raises RequestError."""
    command, ref = message.command, message.command.segment
    if command.id.number == 0:
        raise RequestError("command.id.number = 0: commands are numbered from 1")
    return MoveCommand(
        sender_boot_token=read_boot_token(command.id.sender_boot_token, field="command.id.sender_boot_token"),
        number=command.id.number,
        segment=SegmentId(ref.segment),
        key=read_key(ref.key, field="command.segment.key"),
        owner_boot_token=read_boot_token(ref.owner_boot_token, field="command.segment.owner_boot_token"),
        generation=ref.generation,
        timeout_ns=command.timeout_ns,
        reason=read_label(command.reason, field="command.reason"),
        source=read_tier(message.source, field="source"),
        target=read_tier(message.target, field="target"),
    )


def ended_message(ended: EndedCommand) -> nvme.MoveEnded:
    """How a command ended as messages write it."""
    command, outcome = ended.command, ended.outcome
    return nvme.MoveEnded(
        segment=types_pb2.SegmentRef(
            key=command.key,
            segment=command.segment,
            owner_boot_token=command.owner_boot_token,
            generation=outcome.generation or 0,
        ),
        source=tier_message(command.source),
        target=tier_message(command.target),
        size_bytes=ended.size_bytes,
        outcome=outcome_message(outcome),
        reason=command.reason,
        duration_ns=ended.duration_ns,
    )
