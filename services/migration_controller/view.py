"""What the processes of the node said, and the events that follow from it for the rules.

Owners are the truth: a snapshot replaces what was known of its process, another boot token all of it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Final

from h3kv.core.types import SegmentId, Tier
from h3kv.policy.migration_state import (
    Event,
    JitterReported,
    Owner,
    OwnerJoined,
    OwnerLeft,
    RoomReported,
    SegmentGone,
    SegmentReported,
    Touch,
    TouchesReported,
)
from h3kv.rpc.reports import (
    HostAccess,
    NumberedReport,
    ProcessName,
    Report,
    ReportedSegment,
    SegmentTouch,
    SnapshotStep,
    TierRoom,
)

OPENING: Final = {SnapshotStep.BEGIN, SnapshotStep.WHOLE}
CLOSING: Final = {SnapshotStep.END, SnapshotStep.WHOLE}


@dataclass(slots=True)
class ProcessRecord:
    """One life of a process that reports."""

    process: ProcessName
    owner: Owner
    report: int = 0
    """Number of its last report."""
    received_ns: int = 0
    streams: int = 0
    """That are open: two for a moment where a new one ends the older."""
    silent_ns: int = 0
    """Since when none is."""
    segments: dict[SegmentId, ReportedSegment] = field(default_factory=dict)
    rooms: dict[Tier, TierRoom] = field(default_factory=dict)
    needed_bytes: dict[Tier, int] = field(default_factory=dict)
    host_access: HostAccess | None = None
    named: set[SegmentId] | None = None
    """Segments that the parts of a snapshot named so far."""


@dataclass(frozen=True, slots=True)
class Change:
    """What a report changed among an owner's segments: for the directory."""

    owner: Owner
    said: tuple[ReportedSegment, ...]
    gone: tuple[ReportedSegment, ...]


class NodeView:
    """For one thread. Bounded: segments beyond `segments_max` are not kept.

    Args:
        segments_max: on the whole node.
        processes_max: that are kept at a time.
        silence_ns: after which a process without a stream is gone.
    """

    def __init__(self, *, segments_max: int, processes_max: int, silence_ns: int) -> None:
        self._segments_max = segments_max
        self._processes_max = processes_max
        self._silence_ns = silence_ns
        self._segments = 0
        self.processes: dict[str, ProcessRecord] = {}

    @property
    def segments_total(self) -> int:
        """Segments that are known."""
        return self._segments

    @property
    def reporting(self) -> list[str]:
        """Names of processes whose stream is open."""
        return [name for name, each in self.processes.items() if each.streams > 0]

    def segment(self, owner: Owner, segment: SegmentId) -> ReportedSegment | None:
        """As its owner told, if this life of it is there."""
        record = self.processes.get(owner.name)
        return None if record is None or record.owner != owner else record.segments.get(segment)

    def opened(self, process: ProcessName) -> tuple[bool, list[Event]]:
        """A stream of a process begins. Returns whether it came back as another one, and what changed."""
        record = self.processes.get(process.name)
        has_restarted = record is not None and record.process != process
        if record is None or has_restarted:
            self._forget(process.name)
            if len(self.processes) >= self._processes_max:
                return has_restarted, []
            record = ProcessRecord(process, Owner(process.name, process.boot_token.hex()))
            self.processes[process.name] = record
        record.streams += 1
        record.named = None
        return has_restarted, [OwnerJoined(record.owner)]

    def closed(self, process: ProcessName, now_ns: int) -> None:
        """A stream ended."""
        record = self.processes.get(process.name)
        if record is not None and record.process == process:
            record.streams -= 1
            record.silent_ns = now_ns

    def expire(self, now_ns: int) -> list[Owner]:
        """Forget processes that have been silent for too long. Returns them: each has left."""
        gone = [
            each.owner
            for each in self.processes.values()
            if each.streams == 0 and now_ns - each.silent_ns >= self._silence_ns
        ]
        for owner in gone:
            self._forget(owner.name)
        return gone

    def apply(self, sent: NumberedReport, received_ns: int) -> tuple[list[Event], Change] | None:
        """The events of a report, in the order that the rules ask for; None where it must be ignored."""
        record = self.processes.get(sent.process.name)
        if record is None or record.process != sent.process or sent.number <= record.report:
            return None
        record.report, record.received_ns = sent.number, received_ns
        said, gone = self._take_segments(record, sent)
        events: list[Event] = [_reported(record.owner, each) for each in said]
        events += [SegmentGone(record.owner, each.segment) for each in gone]
        events += _rooms(record, sent.report)
        events += self._measured(record, sent.report)
        return events, Change(record.owner, tuple(said), tuple(gone))

    def check_integrity(self) -> None:
        """Assert that counts and bounds hold."""
        assert self._segments == sum(len(each.segments) for each in self.processes.values())
        assert self._segments <= self._segments_max
        assert len(self.processes) <= self._processes_max

    def _take_segments(
        self, record: ProcessRecord, sent: NumberedReport
    ) -> tuple[list[ReportedSegment], list[ReportedSegment]]:
        if sent.snapshot in OPENING:
            record.named = set()
        if record.named is not None:
            record.named.update(each.segment for each in sent.report.segments)
        leaving = list(sent.report.gone)
        if sent.snapshot in CLOSING and record.named is not None:
            leaving += [segment for segment in record.segments if segment not in record.named]
            record.named = None
        said = [each for each in sent.report.segments if self._put(record, each)]
        gone = [known for each in leaving if (known := record.segments.pop(each, None)) is not None]
        self._segments -= len(gone)
        return said, gone

    def _put(self, record: ProcessRecord, segment: ReportedSegment) -> bool:
        """Keep a segment. Returns whether that changes anything."""
        known = record.segments.get(segment.segment)
        if known is None:
            if self._segments >= self._segments_max:
                return False
            self._segments += 1
        record.segments[segment.segment] = segment
        return known != segment

    def _measured(self, record: ProcessRecord, report: Report) -> Iterator[Event]:
        if report.host_access is not None:
            record.host_access = report.host_access
            yield JitterReported(record.owner, Tier.HOST, report.host_access.jitter_ns)
        if report.tick is not None:
            yield from _touched(record, report.tick, report.touches)

    def _forget(self, name: str) -> None:
        record = self.processes.pop(name, None)
        if record is not None:
            self._segments -= len(record.segments)


def left(owners: Iterable[Owner]) -> list[Event]:
    """For the rules: these processes are gone."""
    return [OwnerLeft(owner) for owner in owners]


def _reported(owner: Owner, segment: ReportedSegment) -> SegmentReported:
    return SegmentReported(
        owner,
        segment.segment,
        segment.generation,
        segment.size_bytes,
        segment.tiers,
        is_pinned=segment.pins > 0,
    )


def _rooms(record: ProcessRecord, report: Report) -> Iterator[Event]:
    """Rooms of tiers. What someone waits for counts as taken, so that idle segments leave for it."""
    record.rooms.update({each.tier: each for each in report.tiers})
    record.needed_bytes.update(report.room_needed)
    changed = dict.fromkeys((*(each.tier for each in report.tiers), *(tier for tier, _ in report.room_needed)))
    for tier in changed:
        room = record.rooms.get(tier)
        if room is not None:
            free_bytes = room.capacity_bytes - room.used_bytes - record.needed_bytes.get(tier, 0)
            yield RoomReported(record.owner, tier, room.capacity_bytes, max(0, free_bytes))


def _touched(record: ProcessRecord, tick: int, touches: Iterable[SegmentTouch]) -> Iterator[Event]:
    """Touches by the life of the owner that they name. Those of an earlier life come to nothing in the rules."""
    own = record.process.boot_token
    by_token: dict[bytes, list[Touch]] = {own: []}
    for touch in touches:
        by_token.setdefault(touch.owner_boot_token or own, []).append(Touch(touch.segment, touch.mass))
    for token, named in by_token.items():
        yield TouchesReported(Owner(record.owner.name, token.hex()), tick, tuple(named))
