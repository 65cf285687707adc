"""A node's HOST and NVME tiers as numbers: what a data plane does with commands and without.

It seals new segments into HOST, where it makes room by itself, by recency, as far as it has to, and writes them to NVME
within a tick. It carries commands out
one tick after they came, once each, and refuses those of another generation, of pinned segments, and for a full tier.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field

from h3kv.core.types import SegmentId, Tier
from h3kv.policy.migration_state import Command, Event, MoveEnded, Owner, RoomReported, SegmentReported

HOST, NVME = Tier.HOST, Tier.NVME


@dataclass
class ModelledSegment:
    generation: int = 1
    tiers: frozenset[Tier] = frozenset({HOST})
    is_pinned: bool = False


@dataclass
class ModelledTiers:
    owner: Owner
    host_segments: int
    segment_bytes: int
    segments: dict[SegmentId, ModelledSegment] = field(default_factory=dict)
    host: OrderedDict[SegmentId, None] = field(default_factory=OrderedDict)
    """What lies in HOST, least recently used first."""
    unwritten: list[SegmentId] = field(default_factory=list)
    waiting: list[Command] = field(default_factory=list)
    seen: set[int] = field(default_factory=set)
    forced: int = 0
    """Segments that the data plane itself had to send to NVME."""

    def touch(self, segment: SegmentId) -> bool:
        """Whether it lies in HOST."""
        if segment in self.host:
            self.host.move_to_end(segment)
        return segment in self.host

    def seal(self, segment: SegmentId) -> list[Event]:
        """A new segment, in HOST."""
        events = self.make_room()
        self.segments[segment] = ModelledSegment()
        self.host[segment] = None
        self.unwritten.append(segment)
        return [*events, self.report(segment)]

    def make_room(self) -> list[Event]:
        if len(self.host) < self.host_segments:
            return []
        victim = next(segment for segment in self.host if not self.segments[segment].is_pinned)
        self.forced += 1
        self.place(victim, frozenset({NVME}))
        return [self.report(victim)]

    def place(self, segment: SegmentId, tiers: frozenset[Tier]) -> None:
        known = self.segments[segment]
        known.tiers = tiers
        known.generation += 1
        if HOST in tiers:
            self.host.setdefault(segment)
        else:
            self.host.pop(segment, None)

    def write_behind(self) -> list[Event]:
        """Copies on NVME of what was sealed since the last call."""
        written, self.unwritten = self.unwritten, []
        for segment in written:
            if self.segments[segment].tiers == {HOST}:
                self.place(segment, frozenset({HOST, NVME}))
        return [self.report(segment) for segment in written]

    def send(self, commands: tuple[Command, ...]) -> None:
        self.waiting.extend(commands)

    def carry_out(self) -> list[Event]:
        """What became of the commands that came before."""
        commands, self.waiting = self.waiting, []
        return [self.end(command) for command in commands if command.id not in self.seen]

    def end(self, command: Command) -> MoveEnded:
        self.seen.add(command.id)
        known = self.segments[command.segment]
        error = self.refusal(command)
        if error is None:
            is_up = command.target is HOST
            self.place(command.segment, frozenset({HOST, NVME}) if is_up else frozenset({NVME}))
        return MoveEnded(command.id, error, known.generation, known.tiers)

    def refusal(self, command: Command) -> str | None:
        known = self.segments[command.segment]
        if command.generation != known.generation or command.source not in known.tiers:
            return "STALE_HANDLE"
        if known.is_pinned:
            return "SLAB_BUSY"
        if command.target is HOST and len(self.host) >= self.host_segments:
            return "TIER_FULL"
        return None

    def report(self, segment: SegmentId) -> SegmentReported:
        known = self.segments[segment]
        return SegmentReported(
            self.owner, segment, known.generation, self.segment_bytes, known.tiers, is_pinned=known.is_pinned
        )

    def rooms(self) -> list[Event]:
        capacity = self.host_segments * self.segment_bytes
        free = (self.host_segments - len(self.host)) * self.segment_bytes
        return [
            RoomReported(self.owner, HOST, capacity, free),
            RoomReported(self.owner, NVME, 10**15, 10**15 - len(self.segments) * self.segment_bytes),
        ]

    def check_integrity(self) -> None:
        assert len(self.host) <= self.host_segments
        assert set(self.host) == {segment for segment, each in self.segments.items() if HOST in each.tiers}
        assert all(each.tiers for each in self.segments.values())
