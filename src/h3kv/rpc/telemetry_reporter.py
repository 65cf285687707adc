"""The stream of reports that a process keeps open to the controller, as long as it lives.

    data plane --report()--> mirror of segments     what a snapshot is made of
                    |
                    +------> queue, bounded --> stream --> controller

`report` never waits. A queue that overflows loses its oldest reports, which are counted; the stream then says the whole
again, from the mirror. So does every new stream: the controller needs nothing from before.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Final

import grpc

from h3kv.api.migration_controller.v1 import migration_controller_service_pb2 as pb
from h3kv.api.migration_controller.v1 import migration_controller_service_pb2_grpc as pb_grpc
from h3kv.core.errors import H3Error
from h3kv.core.ports import Telemetry
from h3kv.core.types import SegmentId
from h3kv.core.units import NS_PER_MS, NS_PER_S
from h3kv.rpc.addresses import Address
from h3kv.rpc.client import PeerChannel
from h3kv.rpc.credentials import Credentials
from h3kv.rpc.reports import (
    NumberedReport,
    ProcessName,
    Report,
    ReportedSegment,
    SnapshotStep,
    report_message,
)
from h3kv.telemetry import names

PART_SEGMENTS: Final = 5_000
"""Segments in one part of a snapshot: 150 bytes each stay far below the largest message."""

END_NS: Final = NS_PER_S
"""For the stream to end with its process."""

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class ReporterConfig:
    """How a process reports."""

    reports_waiting_max: int = 256
    """Reports that wait to be sent: 25 s of one in each tick."""
    stream_ns: int = 600 * NS_PER_S
    """Deadline of a stream: then the next one is opened, with a snapshot."""
    backoff_ns_min: int = 100 * NS_PER_MS
    backoff_ns_max: int = 2 * NS_PER_S
    """Between two attempts to reach the controller: from the one, doubling, to the other."""


@dataclass(frozen=True, slots=True)
class ReporterStatistics:
    """State and totals of a reporter."""

    is_connected: bool
    waiting: int
    sent_total: int
    dropped_total: int
    """Reports that a full queue lost."""
    snapshots_total: int


class TelemetryReporter:
    """Reports from `start` to `stop`, on a thread of its own. `report` may be called by any thread.

    Args:
        channel: to the controller. Stays the caller's.
        process: who reports.
        telemetry: receives whether the controller is connected.
        config: bounds.
    """

    def __init__(
        self,
        channel: PeerChannel,
        process: ProcessName,
        *,
        telemetry: Telemetry,
        config: ReporterConfig | None = None,
    ) -> None:
        self._channel = channel
        self._process = process
        self._telemetry = telemetry
        self._config = config or ReporterConfig()
        self._changed = threading.Condition()
        self._queue: deque[Report] = deque()
        self._mirror: dict[SegmentId, ReportedSegment] = {}
        self._newest = Report()
        """What a snapshot says besides segments: the newest of each."""
        self._rescued: deque[Report] = deque(maxlen=self._config.reports_waiting_max)
        """Outcomes of reports that were dropped: nobody says them again."""
        self._is_snapshot_due = True
        self._is_stopped = False
        self._is_connected = False
        self._number = 0
        self._sent = self._dropped = self._snapshots = 0
        self._cancel: Callable[[], object] | None = None
        """Gives the open stream up."""
        self._stream = 0
        """Number of the stream that may send; an older one's iterator ends."""
        self._thread = threading.Thread(target=self._run, name="telemetry-reporter", daemon=True)

    def start(self) -> None:
        """Begin to report."""
        self._telemetry.gauge(names.CONTROLLER_CONNECTED, 0)
        self._thread.start()

    def report(self, report: Report) -> None:
        """Send a report, soon and in order. Never waits. Cost: O(what it names)."""
        with self._changed:
            for segment in report.segments:
                self._mirror[segment.segment] = segment
            for gone in report.gone:
                self._mirror.pop(gone, None)
            self._newest = _joined(self._newest, report)
            if len(self._queue) >= self._config.reports_waiting_max:
                lost = self._queue.popleft()
                self._dropped += 1
                self._is_snapshot_due = True
                if lost.outcomes:
                    self._rescued.append(Report(outcomes=lost.outcomes))
            self._queue.append(report)
            self._changed.notify_all()

    def statistics(self) -> ReporterStatistics:
        """State and totals now."""
        with self._changed:
            return ReporterStatistics(self._is_connected, len(self._queue), self._sent, self._dropped, self._snapshots)

    def stop(self, *, timeout_ns: int = 2 * NS_PER_S) -> None:
        """End the stream after what waits was sent, if that takes no longer than this. Calling it again only waits."""
        end_ns = time.monotonic_ns() + timeout_ns
        with self._changed:
            self._is_stopped = True
            self._changed.notify_all()
        self._thread.join(timeout_ns / NS_PER_S)
        with self._changed:
            self._stream += 1
            self._changed.notify_all()
            cancel = self._cancel
        if cancel is not None:
            cancel()
        self._thread.join(max(0.0, (end_ns + NS_PER_S - time.monotonic_ns()) / NS_PER_S))

    def check_integrity(self) -> None:
        """Assert that bounds hold."""
        with self._changed:
            assert len(self._queue) <= self._config.reports_waiting_max
            assert len(self._rescued) <= self._config.reports_waiting_max

    def _run(self) -> None:
        backoff_ns = self._config.backoff_ns_min
        while not self._is_over():
            try:
                self._channel.wait_until_serving(timeout_ns=backoff_ns)
                self._set_connected(is_connected=True)
                self._open_stream()
                backoff_ns = self._config.backoff_ns_min
            except H3Error as error:
                _log.debug("the controller is not there: %s", error)
                backoff_ns = min(2 * backoff_ns, self._config.backoff_ns_max)
            finally:
                self._set_connected(is_connected=False)
            with self._changed:
                self._changed.wait_for(lambda: self._is_stopped, backoff_ns / NS_PER_S)

    def _is_over(self) -> bool:
        with self._changed:
            return self._is_stopped

    def _open_stream(self) -> None:
        """Send until the stream ends: at its deadline, with the peer, or because we stop."""
        with self._changed:
            self._stream += 1
            self._is_snapshot_due = True
            messages = self._messages(self._stream)
        stub = pb_grpc.MigrationControllerServiceStub(self._channel.grpc)
        call = stub.ReportTelemetry.future(messages, timeout=self._config.stream_ns / NS_PER_S)
        with self._changed:
            self._cancel = call.cancel
        try:
            call.result()
        except grpc.FutureCancelledError:
            _log.debug("the stream of reports was given up")
        finally:
            with self._changed:
                self._cancel = None
                self._stream += 1
                self._changed.notify_all()

    def _messages(self, stream: int) -> Iterator[pb.ReportTelemetryRequest]:
        """What gRPC sends: it asks for the next as soon as there is room for it."""
        while True:
            with self._changed:
                self._changed.wait_for(lambda: stream != self._stream or self._has_work() or self._is_stopped)
                if stream != self._stream or not self._has_work():
                    return
                sent = self._due()
            for each in sent:
                yield report_message(each)

    def _has_work(self) -> bool:
        return self._is_snapshot_due or bool(self._queue)

    def _due(self) -> list[NumberedReport]:
        """The next reports of the stream: a snapshot, or one report. The lock is held."""
        if not self._is_snapshot_due:
            return [self._numbered(SnapshotStep.CHANGES, self._queue.popleft())]
        self._is_snapshot_due = False
        self._snapshots += 1
        # What waits is in the mirror; outcomes and touches are said once and follow.
        waiting = [replace(each, segments=(), gone=()) for each in (*self._rescued, *self._queue)]
        self._rescued.clear()
        self._queue.clear()
        segments = tuple(self._mirror.values())
        parts = [segments[at : at + PART_SEGMENTS] for at in range(0, len(segments), PART_SEGMENTS)] or [()]
        reports = [Report(segments=part) for part in parts]
        reports[0] = replace(self._newest, segments=parts[0])
        steps = _steps(len(parts))
        snapshot = [self._numbered(step, report) for step, report in zip(steps, reports, strict=True)]
        return snapshot + [self._numbered(SnapshotStep.CHANGES, each) for each in waiting]

    def _numbered(self, step: SnapshotStep, report: Report) -> NumberedReport:
        self._number += 1
        self._sent += 1
        return NumberedReport(self._process, self._number, time.monotonic_ns(), step, report)

    def _set_connected(self, *, is_connected: bool) -> None:
        with self._changed:
            self._is_connected = is_connected
        self._telemetry.gauge(names.CONTROLLER_CONNECTED, float(is_connected))


@contextlib.contextmanager
def open_reporter(
    address: Address | None, process: ProcessName, *, credentials: Credentials, telemetry: Telemetry
) -> Iterator[TelemetryReporter | None]:
    """A reporter that has begun and ends with the block; None where nobody is to be told.

    Args:
        address: where the controller serves.
        process: who reports.
        credentials: for the controller's port.
        telemetry: receives whether the controller is connected.

    Raises:
        ConfigError: the address is a port, and there are no credentials.
    """
    if address is None:
        telemetry.gauge(names.CONTROLLER_CONNECTED, 0)
        yield None
        return
    with PeerChannel(address, credentials=credentials) as channel:
        reporter = TelemetryReporter(channel, process, telemetry=telemetry)
        reporter.start()
        try:
            yield reporter
        finally:
            reporter.stop(timeout_ns=END_NS)


def _joined(newest: Report, report: Report) -> Report:
    """Rooms and measurements as they are after a report."""
    return Report(
        tiers=tuple({each.tier: each for each in (*newest.tiers, *report.tiers)}.values()),
        host_access=report.host_access or newest.host_access,
        ring_depth=newest.ring_depth if report.ring_depth is None else report.ring_depth,
        room_needed=tuple(dict((*newest.room_needed, *report.room_needed)).items()),
    )


def _steps(parts: int) -> list[SnapshotStep]:
    if parts == 1:
        return [SnapshotStep.WHOLE]
    return [SnapshotStep.BEGIN, *[SnapshotStep.PART] * (parts - 2), SnapshotStep.END]
