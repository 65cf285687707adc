"""What processes tell the controller, as nouns and as messages. A report is checked here before anyone sees it."""

from __future__ import annotations

import enum
import math
from collections.abc import Iterable
from dataclasses import dataclass

from h3kv.api.common.v1 import statistics_pb2, types_pb2
from h3kv.api.migration_controller.v1 import migration_controller_service_pb2 as pb
from h3kv.core.errors import RequestError
from h3kv.core.limits import SEGMENT_BLOCKS_MAX
from h3kv.core.types import BlockKey, SegmentId, Tier
from h3kv.rpc.command_messages import MoveOutcome, outcome_message, read_move_outcome
from h3kv.rpc.convert import read_boot_token, read_key, read_name, read_statistics, read_tier, tier_message


@dataclass(frozen=True, slots=True)
class ProcessName:
    """One life of a process."""

    name: str
    boot_token: bytes
    """16 bytes."""


@dataclass(frozen=True, slots=True)
class TierRoom:
    """Room of a tier that the process owns."""

    tier: Tier
    capacity_bytes: int
    used_bytes: int
    pinned_bytes: int = 0
    slabs_visible: int = 0
    moves_total: int = 0
    bytes_moved_total: int = 0


@dataclass(frozen=True, slots=True)
class TierBandwidth:
    """Bytes that a tier moved, in a second."""

    tier: Tier
    read_bytes_per_s: int
    write_bytes_per_s: int


@dataclass(frozen=True, slots=True)
class HostAccess:
    """Latency of HOST as a probe sees it."""

    mean_ns: float
    jitter_ns: float


@dataclass(frozen=True, slots=True)
class SegmentTouch:
    """Attention that a segment drew in one tick: its share, the largest over sequences."""

    segment: SegmentId
    mass: float
    owner_boot_token: bytes | None = None
    """Of the segment's owner; None: the process that reports."""


@dataclass(frozen=True, slots=True)
class ReportedSegment:
    """A segment as its owner knows it."""

    segment: SegmentId
    generation: int
    key: BlockKey
    blocks: int
    size_bytes: int
    """In each tier, over all layers."""
    tiers: frozenset[Tier]
    """At least one."""
    parent: BlockKey | None = None
    pins: int = 0
    """More than 0: it must stay where it is."""


class SnapshotStep(enum.Enum):
    """Where a report stands in a snapshot."""

    CHANGES = pb.SNAPSHOT_STEP_UNSPECIFIED
    BEGIN = pb.SNAPSHOT_STEP_BEGIN
    PART = pb.SNAPSHOT_STEP_PART
    END = pb.SNAPSHOT_STEP_END
    WHOLE = pb.SNAPSHOT_STEP_WHOLE


@dataclass(frozen=True, slots=True)
class Report:
    """What one process sees. Everything is optional."""

    tiers: tuple[TierRoom, ...] = ()
    bandwidths: tuple[TierBandwidth, ...] = ()
    host_access: HostAccess | None = None
    ring_depth: int | None = None
    tick: int | None = None
    """Of the touches; growing by one."""
    touches: tuple[SegmentTouch, ...] = ()
    segments: tuple[ReportedSegment, ...] = ()
    """That appeared, moved, or were pinned or unpinned."""
    gone: tuple[SegmentId, ...] = ()
    outcomes: tuple[MoveOutcome, ...] = ()
    """How commands ended that were started before."""
    room_needed: tuple[tuple[Tier, int], ...] = ()
    """Bytes for which someone waits; 0 when nobody does any longer."""


@dataclass(frozen=True, slots=True)
class NumberedReport:
    """A report as it was sent."""

    process: ProcessName
    number: int
    made_ns: int
    snapshot: SnapshotStep
    report: Report


def report_message(sent: NumberedReport) -> pb.ReportTelemetryRequest:
    """A report as messages write it."""
    report, boot_token = sent.report, sent.process.boot_token
    message = pb.ReportTelemetryRequest(
        process=types_pb2.ProcessIdentity(name=sent.process.name, boot_token=boot_token),
        report=sent.number,
        made_ns=sent.made_ns,
        snapshot=sent.snapshot.value,
        tiers=[room_message(each) for each in report.tiers],
        bandwidths=[
            pb.Bandwidth(
                tier=tier_message(each.tier),
                read_bytes_per_s=each.read_bytes_per_s,
                write_bytes_per_s=each.write_bytes_per_s,
            )
            for each in report.bandwidths
        ],
        ring_depth=report.ring_depth,
        tick=report.tick,
        touches=[
            pb.Touch(
                segment=types_pb2.SegmentRef(
                    segment=each.segment, owner_boot_token=each.owner_boot_token or boot_token
                ),
                attention_mass=each.mass,
            )
            for each in report.touches
        ],
        segments=[segment_message(each, boot_token) for each in report.segments],
        gone=report.gone,
        outcomes=[outcome_message(each) for each in report.outcomes],
        room_needed=[pb.RoomNeeded(tier=tier_message(tier), size_bytes=needed) for tier, needed in report.room_needed],
    )
    if report.host_access is not None:
        access = pb.HostAccess(mean_ns=report.host_access.mean_ns, jitter_ns=report.host_access.jitter_ns)
        message.host_access.CopyFrom(access)
    return message


def room_message(room: TierRoom) -> statistics_pb2.TierStatistics:
    """Room of a tier as messages write it."""
    return statistics_pb2.TierStatistics(
        tier=tier_message(room.tier),
        capacity_bytes=room.capacity_bytes,
        used_bytes=room.used_bytes,
        pinned_bytes=room.pinned_bytes,
        slabs_visible=room.slabs_visible,
        moves_total=room.moves_total,
        bytes_moved_total=room.bytes_moved_total,
    )


def segment_message(segment: ReportedSegment, boot_token: bytes) -> pb.SegmentState:
    """A segment as messages write it."""
    return pb.SegmentState(
        segment=types_pb2.SegmentRef(
            key=segment.key,
            segment=segment.segment,
            owner_boot_token=boot_token,
            generation=segment.generation,
        ),
        parent=segment.parent or b"",
        blocks=segment.blocks,
        size_bytes=segment.size_bytes,
        tiers=[tier_message(tier) for tier in sorted(segment.tiers)],
        pins=segment.pins,
    )


def read_process(message: types_pb2.ProcessIdentity, *, field: str) -> ProcessName:
    """The process in a message. Raises RequestError."""
    token = read_boot_token(message.boot_token, field=f"{field}.boot_token")
    return ProcessName(read_name(message.name, field=f"{field}.name"), token)


def read_report(message: pb.ReportTelemetryRequest) -> NumberedReport:
    """The report in a message.

    Raises:
        RequestError: a field cannot be true; it is named.
    """
    process = read_process(message.process, field="process")
    if message.snapshot not in {step.value for step in SnapshotStep}:
        raise RequestError(f"snapshot = {message.snapshot}: is no step of a snapshot that this version knows")
    has_tick = message.HasField("tick")
    if message.touches and not has_tick:
        raise RequestError("touches came without a tick: number the ticks")
    report = Report(
        tiers=tuple(_read_room(each, field=f"tiers[{n}]") for n, each in enumerate(message.tiers)),
        bandwidths=tuple(
            TierBandwidth(read_tier(each.tier, field="bandwidths.tier"), each.read_bytes_per_s, each.write_bytes_per_s)
            for each in message.bandwidths
        ),
        host_access=_read_access(message),
        ring_depth=message.ring_depth if message.HasField("ring_depth") else None,
        tick=message.tick if has_tick else None,
        touches=_read_touches(message.touches),
        segments=tuple(_read_segment(each, process, field=f"segments[{n}]") for n, each in enumerate(message.segments)),
        gone=tuple(SegmentId(each) for each in message.gone),
        outcomes=tuple(read_move_outcome(each, field=f"outcomes[{n}]") for n, each in enumerate(message.outcomes)),
        room_needed=tuple(
            (read_tier(each.tier, field="room_needed.tier"), each.size_bytes) for each in message.room_needed
        ),
    )
    return NumberedReport(process, message.report, message.made_ns, SnapshotStep(message.snapshot), report)


def _read_room(message: statistics_pb2.TierStatistics, *, field: str) -> TierRoom:
    statistics = read_statistics(message, field=field)
    return TierRoom(
        tier=statistics.tier,
        capacity_bytes=statistics.capacity_bytes,
        used_bytes=statistics.used_bytes,
        pinned_bytes=message.pinned_bytes,
        slabs_visible=statistics.slabs_visible,
        moves_total=statistics.moves_total,
        bytes_moved_total=statistics.bytes_moved_total,
    )


def _read_access(message: pb.ReportTelemetryRequest) -> HostAccess | None:
    if not message.HasField("host_access"):
        return None
    access = message.host_access
    if not (0.0 <= access.mean_ns < math.inf and 0.0 <= access.jitter_ns < math.inf):
        raise RequestError("host_access: a time is from 0 and finite")
    return HostAccess(access.mean_ns, access.jitter_ns)


def _read_touches(messages: Iterable[pb.Touch]) -> tuple[SegmentTouch, ...]:
    touches = []
    for message in messages:
        if not 0.0 <= message.attention_mass <= 1.0:
            raise RequestError(f"touches.attention_mass = {message.attention_mass}: must be a share from 0 to 1")
        token = read_boot_token(message.segment.owner_boot_token, field="touches.segment.owner_boot_token")
        touches.append(SegmentTouch(SegmentId(message.segment.segment), message.attention_mass, token))
    return tuple(touches)


def _read_segment(message: pb.SegmentState, process: ProcessName, *, field: str) -> ReportedSegment:
    ref = message.segment
    if ref.owner_boot_token != process.boot_token:
        raise RequestError(f"{field}: a process reports its own segments, by its own boot token")
    tiers = frozenset(read_tier(each, field=f"{field}.tiers") for each in message.tiers)
    if not tiers or len(tiers) != len(message.tiers):
        raise RequestError(f"{field}.tiers: a segment lies in one tier at least, and in none twice")
    if not 1 <= message.blocks <= SEGMENT_BLOCKS_MAX:
        raise RequestError(f"{field}.blocks = {message.blocks}: must be 1 to {SEGMENT_BLOCKS_MAX}")
    if message.size_bytes == 0:
        raise RequestError(f"{field}.size_bytes = 0: a segment takes room")
    return ReportedSegment(
        segment=SegmentId(ref.segment),
        generation=ref.generation,
        key=read_key(ref.key, field=f"{field}.segment.key"),
        blocks=message.blocks,
        size_bytes=message.size_bytes,
        tiers=tiers,
        parent=read_key(message.parent, field=f"{field}.parent") if message.parent else None,
        pins=message.pins,
    )
