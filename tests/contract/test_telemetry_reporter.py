"""The reporter against a server of ours that records what comes."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import grpc

from h3kv.api.migration_controller.v1 import migration_controller_service_pb2 as pb
from h3kv.api.migration_controller.v1 import migration_controller_service_pb2_grpc as pb_grpc
from h3kv.core.types import BlockKey, SegmentId, Tier
from h3kv.core.units import NS_PER_MS, NS_PER_S
from h3kv.rpc.addresses import UnixAddress
from h3kv.rpc.client import PeerChannel
from h3kv.rpc.command_messages import MoveEnd, MoveOutcome
from h3kv.rpc.reports import ProcessName, Report, ReportedSegment, SegmentTouch, SnapshotStep, TierRoom, read_report
from h3kv.rpc.server import RpcServer, ServerConfig
from h3kv.rpc.telemetry_reporter import PART_SEGMENTS, ReporterConfig, TelemetryReporter
from h3kv.telemetry import names
from h3kv.telemetry.metric import Service
from h3kv.telemetry.metrics_page import MetricsPage

PROCESS = ProcessName("gpu_worker", b"w" * 16)
PATIENCE_NS = 20 * NS_PER_S


class Recorder(pb_grpc.MigrationControllerServiceServicer):
    """Keeps what came, stream by stream. A gate holds the reading back."""

    def __init__(self) -> None:
        self.streams: list[list[pb.ReportTelemetryRequest]] = []
        self.gate = threading.Event()
        self.gate.set()

    def ReportTelemetry(
        self, request_iterator: Iterator[pb.ReportTelemetryRequest], context: grpc.ServicerContext
    ) -> pb.ReportTelemetryResponse:
        stream: list[pb.ReportTelemetryRequest] = []
        self.streams.append(stream)
        while not self.gate.wait(0.01):
            if not context.is_active():
                return pb.ReportTelemetryResponse()
        stream.extend(request_iterator)
        return pb.ReportTelemetryResponse(reports=len(stream))

    @property
    def reports(self) -> list[pb.ReportTelemetryRequest]:
        return [report for stream in list(self.streams) for report in list(stream)]


@contextlib.contextmanager
def recording(folder: Path) -> Iterator[Recorder]:
    recorder = Recorder()
    server = RpcServer(ServerConfig(UnixAddress(folder / "c.sock")))
    server.add(pb_grpc.add_MigrationControllerServiceServicer_to_server, recorder, pb.DESCRIPTOR)
    server.start()
    server.announce(is_serving=True)
    try:
        yield recorder
    finally:
        recorder.gate.set()
        assert server.stop(grace_ns=0), "a handler hangs"


@contextlib.contextmanager
def reporting(folder: Path, page: MetricsPage | None = None, **bounds: int) -> Iterator[TelemetryReporter]:
    config = ReporterConfig(backoff_ns_min=10 * NS_PER_MS, backoff_ns_max=50 * NS_PER_MS, **bounds)
    with PeerChannel(UnixAddress(folder / "c.sock")) as channel:
        page = page or MetricsPage(Service.GPU_WORKER)
        reporter = TelemetryReporter(channel, PROCESS, telemetry=page, config=config)
        reporter.start()
        try:
            yield reporter
        finally:
            reporter.stop(timeout_ns=5 * NS_PER_S)
            reporter.check_integrity()


def until(holds: Callable[[], object]) -> None:
    end_ns = time.monotonic_ns() + PATIENCE_NS
    pause = threading.Event()
    while not holds():
        assert time.monotonic_ns() < end_ns
        pause.wait(0.005)


def segment(number: int, *tiers: Tier, generation: int = 1) -> ReportedSegment:
    key = BlockKey(number.to_bytes(32, "big"))
    return ReportedSegment(SegmentId(number), generation, key, 16, 1 << 20, frozenset(tiers or {Tier.HOST}))


def test_what_is_reported_comes_in_order_after_a_snapshot(tmp_path: Path) -> None:
    with recording(tmp_path) as recorder, reporting(tmp_path) as reporter:
        until(lambda: recorder.reports)
        for number in range(50):
            reporter.report(Report(segments=(segment(number),)))
        until(lambda: len(recorder.reports) == 51)
        first, *rest = (read_report(each) for each in recorder.reports)
        assert (first.snapshot, first.report.segments) == (SnapshotStep.WHOLE, ())
        assert [each.report.segments[0].segment for each in rest] == list(range(50))
        assert [each.number for each in (first, *rest)] == list(range(1, 52))


def test_a_report_survives_the_way_there(tmp_path: Path) -> None:
    sent = Report(
        tiers=(TierRoom(Tier.HOST, 100, 40, pinned_bytes=8),),
        ring_depth=0,
        tick=7,
        touches=(SegmentTouch(SegmentId(3), 0.25, b"w" * 16),),
        segments=(segment(3, Tier.HOST, Tier.NVME, generation=9),),
        gone=(SegmentId(4),),
        outcomes=(MoveOutcome(b"c" * 16, 5, MoveEnd.NO_ROOM, generation=9, tiers=frozenset({Tier.NVME})),),
        room_needed=((Tier.HOST, 64),),
    )
    with recording(tmp_path) as recorder, reporting(tmp_path) as reporter:
        until(lambda: recorder.reports)
        reporter.report(sent)
        until(lambda: len(recorder.reports) == 2)
        assert read_report(recorder.reports[1]).report == sent


def test_nobody_waits_for_a_controller_that_is_not_there_and_the_newest_reaches_one_that_comes(tmp_path: Path) -> None:
    page = MetricsPage(Service.GPU_WORKER)
    with reporting(tmp_path, page, reports_waiting_max=4) as reporter:
        for number in range(100):
            reporter.report(Report(segments=(segment(number),), tiers=(TierRoom(Tier.HOST, 100, number),)))
        reporter.report(Report(gone=(SegmentId(0),)))
        statistics = reporter.statistics()
        assert (statistics.waiting, statistics.dropped_total, statistics.is_connected) == (4, 97, False)
        assert page.value(names.CONTROLLER_CONNECTED) == 0
        with recording(tmp_path) as recorder:
            until(lambda: recorder.reports)
            snapshot = read_report(recorder.reports[0])
            assert snapshot.snapshot is SnapshotStep.WHOLE
            assert [each.segment for each in snapshot.report.segments] == list(range(1, 100))
            assert snapshot.report.tiers == (TierRoom(Tier.HOST, 100, 99),)
            assert page.value(names.CONTROLLER_CONNECTED) == 1


def test_a_controller_that_comes_back_hears_the_whole_again(tmp_path: Path) -> None:
    with reporting(tmp_path) as reporter:
        with recording(tmp_path) as recorder:
            reporter.report(Report(segments=(segment(1), segment(2))))
            until(lambda: recorder.reports)
        reporter.report(Report(gone=(SegmentId(1),)))
        with recording(tmp_path) as recorder:
            until(lambda: recorder.reports)
            snapshot = read_report(recorder.reports[0])
            assert [each.segment for each in snapshot.report.segments] == [2]
            assert snapshot.number > 1


def test_a_stream_that_reaches_its_deadline_is_followed_by_another(tmp_path: Path) -> None:
    with recording(tmp_path) as recorder, reporting(tmp_path, stream_ns=100 * NS_PER_MS) as reporter:
        until(lambda: len(recorder.streams) >= 3)
        reporter.report(Report(segments=(segment(1),)))
        until(lambda: any(report.segments for report in recorder.reports))


def test_outcomes_of_reports_that_were_dropped_are_said_all_the_same(tmp_path: Path) -> None:
    with reporting(tmp_path, reports_waiting_max=2) as reporter:
        for number in range(1, 4):
            reporter.report(Report(outcomes=(MoveOutcome(b"c" * 16, number, MoveEnd.DONE),)))
        reporter.report(Report())
        assert reporter.statistics().dropped_total == 2
        with recording(tmp_path) as recorder:
            until(lambda: len([each for report in recorder.reports for each in report.outcomes]) == 3)
            said = [each.id.number for report in recorder.reports for each in report.outcomes]
            assert said == [1, 2, 3]


def test_many_segments_come_in_parts(tmp_path: Path) -> None:
    count = 2 * PART_SEGMENTS + 1
    with reporting(tmp_path) as reporter:
        reporter.report(Report(segments=tuple(segment(number) for number in range(count))))
        with recording(tmp_path) as recorder:
            until(lambda: sum(len(report.segments) for report in recorder.reports) == count)
            steps = [read_report(each).snapshot for each in recorder.reports if each.segments]
            assert steps == [SnapshotStep.BEGIN, SnapshotStep.PART, SnapshotStep.END]


def test_a_controller_that_reads_nothing_does_not_keep_a_process_from_ending(tmp_path: Path) -> None:
    with recording(tmp_path) as recorder:
        recorder.gate.clear()
        with PeerChannel(UnixAddress(tmp_path / "c.sock")) as channel:
            reporter = TelemetryReporter(channel, PROCESS, telemetry=MetricsPage(Service.GPU_WORKER))
            reporter.start()
            until(lambda: recorder.streams)
            reporter.stop(timeout_ns=50 * NS_PER_MS)
            assert not reporter._thread.is_alive()
            reporter.check_integrity()
