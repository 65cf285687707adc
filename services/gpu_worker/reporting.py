"""What the controller is told of this process: its segments, what draws attention, the room of its own tier."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from h3kv.core.types import SegmentId, Tier
from h3kv.core.units import NS_PER_MS
from h3kv.engine.pool import KvPool
from h3kv.engine.segment import Phase, Segment
from h3kv.rpc.command_messages import MoveOutcome
from h3kv.rpc.reports import Report, ReportedSegment, SegmentTouch, TierRoom
from h3kv.rpc.telemetry_reporter import TelemetryReporter
from services.gpu_worker.metrics import Snapshot

TICK_NS: Final = 100 * NS_PER_MS
"""Between two reports that no command asks for. A tick lasts at least as long, and until every sequence took a step."""
TICK_NS_MAX: Final = 10 * TICK_NS
"""A sequence that has ended, or waits, is not waited for any longer."""
MASS_MIN: Final = 0.001
"""Smaller shares of attention are not told: a tenth of the least that counts as a touch."""


class WorkerReports:
    """For the thread that runs the pool.

    Args:
        pool: whose segments are reported.
        reporter: sends.
    """

    def __init__(self, pool: KvPool, reporter: TelemetryReporter) -> None:
        self._pool = pool
        self._reporter = reporter
        self._known: set[SegmentId] = set()
        """Segments that were reported and are not gone."""
        self._room: TierRoom | None = None
        self._tick = 0
        self._tick_ns = 0
        """When it began."""
        self._next_ns = 0

    def look(self, snapshot: Snapshot, outcomes: Sequence[MoveOutcome], *, now_ns: int) -> None:
        """After a step: report what changed, once a tick, and how commands ended at once.

        Cost: O(segments that changed); nothing between two ticks.
        """
        is_due = now_ns >= self._next_ns
        if not is_due and not outcomes:
            return
        segments, gone = self._changed()
        room = self._device_room(snapshot)
        touches: tuple[SegmentTouch, ...] = ()
        if is_due:
            self._next_ns = now_ns + TICK_NS
            if self._pool.touch_sample.is_whole or now_ns >= self._tick_ns + TICK_NS_MAX:
                touches = self._end_tick(now_ns)
        if segments or gone or touches or outcomes or room != self._room:
            report = Report(
                tiers=() if room is None or room == self._room else (room,),
                tick=self._tick,
                touches=touches,
                segments=segments,
                gone=gone,
                outcomes=tuple(outcomes),
            )
            self._reporter.report(report)
        self._room = room

    def _end_tick(self, now_ns: int) -> tuple[SegmentTouch, ...]:
        """What drew attention in the tick that ends; the next one begins."""
        self._tick += 1
        self._tick_ns = now_ns
        shares = self._pool.touch_sample.take()
        self._pool.touch_sample.ask()
        return tuple(
            SegmentTouch(segment, share)
            for segment, share in shares.items()
            if share >= MASS_MIN and segment in self._known
        )

    def _changed(self) -> tuple[tuple[ReportedSegment, ...], tuple[SegmentId, ...]]:
        """Segments as they are now, and those that are there no longer."""
        said: list[ReportedSegment] = []
        gone: list[SegmentId] = []
        for number in self._pool.segments.take_changed():
            segment = self._pool.segments.find(number)
            # What nobody else can find, and what is being made, has no place that could be commanded.
            if segment is not None and segment.phase is Phase.SEALED and segment.keys:
                said.append(self._state(segment))
                self._known.add(number)
            elif number in self._known:
                self._known.discard(number)
                gone.append(number)
        return tuple(said), tuple(gone)

    def _state(self, segment: Segment) -> ReportedSegment:
        parent = None if segment.parent is None else self._pool.segments.find(segment.parent)
        return ReportedSegment(
            segment=segment.id,
            generation=segment.generation,
            key=segment.keys[0],
            blocks=len(segment.keys),
            size_bytes=segment.room_blocks * self._pool.layout.block_bytes,
            tiers=segment.tiers,
            parent=parent.keys[0] if parent is not None and parent.keys else None,
            pins=segment.pins if segment.is_read_whole else 0,
        )

    def _device_room(self, snapshot: Snapshot) -> TierRoom | None:
        device = snapshot.tiers.get(Tier.DEVICE)
        if device is None:
            return None
        return TierRoom(
            Tier.DEVICE,
            device.capacity_bytes,
            device.used_bytes,
            # Windows of running sequences: nothing there may be taken.
            pinned_bytes=device.used_bytes,
            slabs_visible=device.slabs_visible,
            moves_total=device.moves_total,
            bytes_moved_total=device.bytes_moved_total,
        )
