"""A migration state while one step changes it: bookkeeping without rules."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from h3kv.core.types import Tier
from h3kv.policy.migration_config import TierPair
from h3kv.policy.migration_state import (
    Claim,
    Command,
    CommandId,
    Direction,
    HoldReason,
    MigrationState,
    MoveReason,
    Owner,
    OwnerState,
    Plan,
    Room,
    TrackedSegment,
)
from h3kv.policy.migration_tables import SegmentRef, SegmentTable, TableDraft


class Draft:
    """Tables of a state, to be changed, and the plan so far.

    A segment's entry, its places in `lying`, its command and its claim change together: through the methods here alone.
    """

    def __init__(self, state: MigrationState, now_ns: int) -> None:
        self.config = state.config
        self.now_ns = now_ns
        self.tick = now_ns // self.config.tick_ns
        self.owners: dict[str, OwnerState] = dict(state.owners)
        self.segments = TableDraft(state.segments)
        self.lying: dict[Tier, TableDraft[TrackedSegment]] = {
            pair.fast: TableDraft(state.lying.get(pair.fast, SegmentTable())) for pair in self.config.pairs
        }
        self.rooms: dict[Tier, Room] = dict(state.rooms)
        self.jitter_ns: dict[Tier, tuple[str, float]] = dict(state.jitter_ns)
        self.commands: dict[CommandId, Command] = dict(state.commands)
        self._coming: dict[Tier, int] = dict.fromkeys(Tier, 0)
        """Bytes that commands bring to each tier."""
        for command in state.commands.values():
            self._coming[command.target] += command.moved_bytes
        self.claims: dict[SegmentRef, Claim] = dict(state.claims)
        self.shrinking = set(state.shrinking)
        self.balances = self._refilled(state)
        self.next_command: int = state.next_command
        self.touched: dict[SegmentRef, None] = {}
        """In this step."""
        self.plan: list[Command] = []
        self.held: dict[HoldReason, int] = {}

    def freeze(self) -> tuple[MigrationState, Plan]:
        """The changed state, and the plan."""
        state = MigrationState(
            config=self.config,
            owners=self.owners,
            segments=self.segments.freeze(),
            lying={tier: members.freeze() for tier, members in self.lying.items()},
            rooms=self.rooms,
            jitter_ns=self.jitter_ns,
            commands=self.commands,
            claims=self.claims,
            shrinking=frozenset(self.shrinking),
            balances=self.balances,
            tick=self.tick,
            next_command=CommandId(self.next_command),
            now_ns=self.now_ns,
        )
        return state, Plan(tuple(self.plan), self.held)

    def hold(self, reason: HoldReason, count: int = 1) -> None:
        """Count what came to nothing."""
        self.held[reason] = self.held.get(reason, 0) + count

    # Segments and processes

    def knows(self, owner: Owner) -> bool:
        """Whether this life of a process is the one that is there; counted where it is not."""
        known = self.owners.get(owner.name)
        if known is not None and known.boot == owner.boot:
            return True
        self.hold(HoldReason.UNKNOWN_OWNER)
        return False

    def put(self, ref: SegmentRef, segment: TrackedSegment) -> None:
        """Keep a segment as it is now."""
        self.segments[ref] = segment
        for tier, members in self.lying.items():
            if tier in segment.tiers:
                members[ref] = segment
            else:
                members.pop(ref, None)

    def forget(self, ref: SegmentRef) -> None:
        """Drop a segment, what is under way for it, and what it makes room for."""
        known = self.segments.pop(ref, None)
        if known is None:
            return
        for members in self.lying.values():
            members.pop(ref, None)
        self.touched.pop(ref, None)
        self.claims.pop(ref, None)
        if known.command is not None:
            self.take_off(known.command)
            self.lose_claims(known.command)

    def forget_owner(self, name: str) -> None:
        """Drop a process and all that it had. Cost: O(segments)."""
        if self.owners.pop(name, None) is None:
            return
        for ref in [ref for ref in self.segments if ref.owner == name]:
            self.forget(ref)
        self.rooms = {tier: room for tier, room in self.rooms.items() if room.owner != name}
        self.jitter_ns = {tier: entry for tier, entry in self.jitter_ns.items() if entry[0] != name}
        self.shrinking &= set(self.rooms)

    def lose_claims(self, command: CommandId) -> None:
        """Give up the claims that waited for the room that this command should have made."""
        for ref in [ref for ref, claim in self.claims.items() if command in claim.commands]:
            del self.claims[ref]
            self.hold(HoldReason.ROOM_LOST)

    # Commands

    def command(self, ref: SegmentRef, pair: TierPair, reason: MoveReason) -> Command:
        """Plan a move. Whether it is allowed was asked before."""
        segment = self.segments[ref]
        is_up = reason in {MoveReason.ROOM, MoveReason.EARNED}
        source, target = (pair.slow, pair.fast) if is_up else (pair.fast, pair.slow)
        planned = Command(
            id=CommandId(self.next_command),
            owner=Owner(ref.owner, self.owners[ref.owner].boot),
            segment=ref.segment,
            generation=segment.generation,
            source=source,
            target=target,
            size_bytes=segment.size_bytes,
            moved_bytes=0 if target in segment.tiers else segment.size_bytes,
            deadline_ns=self.now_ns + self.config.command_timeout_ns,
            reason=reason,
        )
        self.next_command += 1
        self.balances[planned.direction] -= planned.moved_bytes
        self.commands[planned.id] = planned
        self._coming[planned.target] += planned.moved_bytes
        self.put(ref, segment._replace(command=planned.id))
        self.plan.append(planned)
        return planned

    def take_off(self, number: CommandId) -> None:
        """A command is under way no longer."""
        command = self.commands.pop(number)
        self._coming[command.target] -= command.moved_bytes

    def affords(self, direction: Direction, moved_bytes: int) -> bool:
        """Whether this tick's budget allows it. More than a whole budget only where none of it is spent."""
        balance = self.balances[direction]
        return moved_bytes == 0 or moved_bytes <= balance or balance == self._budget(direction)

    # Room

    def free_bytes(self, tier: Tier) -> int:
        """Free in a tier once all that is on its way there has come; what is leaving still counts."""
        return self.rooms[tier].free_bytes - self._coming[tier]

    def used_bytes(self, tier: Tier) -> int:
        """Used in a tier once all that is under way has ended."""
        leaving = sum(
            command.size_bytes
            for command in self.commands.values()
            if command.source is tier and command.direction is Direction.DEMOTE
        )
        return self.rooms[tier].capacity_bytes - self.free_bytes(tier) - leaving

    def change_free(self, tier: Tier, size_bytes: int) -> None:
        """Account for a move that ended, until the room is reported again."""
        room = self.rooms.get(tier)
        if room is not None:
            free = min(max(room.free_bytes + size_bytes, 0), room.capacity_bytes)
            self.rooms[tier] = replace(room, free_bytes=free)

    def _budget(self, direction: Direction) -> int:
        is_up = direction is Direction.PROMOTE
        return self.config.promote_bytes_per_tick if is_up else self.config.demote_bytes_per_tick

    def _refilled(self, state: MigrationState) -> dict[Direction, int]:
        balances: Mapping[Direction, int] = state.balances
        passed = self.tick - state.tick
        full = {direction: self._budget(direction) for direction in Direction}
        return {
            direction: min(budget, balances.get(direction, budget) + passed * budget)
            for direction, budget in full.items()
        }
