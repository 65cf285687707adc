"""The controller as a process: reports in, commands out, over real sockets. Its `nvme_io` is a fake of a peer."""

from __future__ import annotations

import contextlib
import re
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.integration.controller_rig import (
    BOTH,
    COLD_ROOM,
    HOST,
    NVME,
    ControllerProcess,
    RecordingNvmeIo,
    Rig,
    Scripted,
    read_page,
    room,
    running,
    segment,
    serving_nvme_io,
    until,
)

from h3kv.api.common.v1 import commands_pb2
from h3kv.api.migration_controller.v1 import migration_controller_service_pb2 as pb
from h3kv.core.errors import H3Error, RequestError
from h3kv.core.types import SegmentId, Tier
from h3kv.rpc.client import PeerChannel
from h3kv.rpc.command_messages import MoveEnd, MoveOutcome
from h3kv.rpc.reports import (
    HostAccess,
    NumberedReport,
    ProcessName,
    Report,
    SegmentTouch,
    SnapshotStep,
    report_message,
)

pytestmark = pytest.mark.slow


@contextlib.contextmanager
def reporting(rig: Rig, *, name: str = "gpu_worker", boot: bytes = b"w" * 16) -> Iterator[Scripted]:
    with PeerChannel(rig.controller.address) as channel:
        scripted = Scripted(channel, name=name, boot=boot)
        try:
            yield scripted
        finally:
            scripted.close()


def touched(tick: int, *segments: int) -> Report:
    return Report(tick=tick, touches=tuple(SegmentTouch(SegmentId(each), 0.5) for each in segments))


def test_a_touched_segment_is_promoted_while_there_is_room(tmp_path: Path) -> None:
    nvme_io = RecordingNvmeIo()
    with running(tmp_path, nvme_io) as rig, reporting(rig) as worker:
        worker.reporter.report(Report(tiers=(room(Tier.HOST, used=10), COLD_ROOM), segments=(segment(1, NVME),)))
        worker.reporter.report(touched(1, 1))
        until(lambda: nvme_io.moved("promote") == [1], "the command")
        (_, command), *_ = nvme_io.commands
        assert command.reason == "room"
        assert command.segment.generation == 1
        assert command.segment.key == (1).to_bytes(32, "big")
        assert command.segment.owner_boot_token == b"w" * 16
        assert 0 < command.timeout_ns <= 2 * 10**9


def test_a_place_in_a_full_tier_is_earned_by_three_touches_and_taken_from_an_idle_one(tmp_path: Path) -> None:
    nvme_io = RecordingNvmeIo()
    settings = {
        "H3_MIGRATION_CONTROLLER_RULES__WATERMARK_HIGH": "1.0",
        "H3_MIGRATION_CONTROLLER_RULES__WATERMARK_LOW": "1.0",
        "H3_MIGRATION_CONTROLLER_RULES__DISPLACE_MARGIN": "1.0",
    }
    with running(tmp_path, nvme_io, **settings) as rig, reporting(rig) as worker:
        full = room(Tier.HOST, used=95)
        worker.reporter.report(Report(tiers=(full, COLD_ROOM), segments=(segment(1, NVME), segment(2, BOTH))))
        for tick in (1, 2):
            worker.reporter.report(touched(tick, 1))
        until(lambda: 1 in (now := rig.segments()) and now[1].touches_in_a_row == 2, "two touches")
        assert nvme_io.commands == []
        worker.reporter.report(touched(3, 1))
        until(lambda: nvme_io.moved("demote") == [2], "the demotion")
        (command,) = (each for way, each in nvme_io.commands if way == "demote")
        nvme_io.end(command, commands_pb2.OUTCOME_DONE, tiers=[Tier.NVME])
        until(lambda: nvme_io.moved("promote") == [1], "the promotion")
        assert [each.command.reason for each in rig.decisions().decisions] == ["displaced", "earned"]


def test_idle_segments_leave_a_tier_above_the_watermark_but_not_pinned_ones(tmp_path: Path) -> None:
    nvme_io = RecordingNvmeIo()
    with running(tmp_path, nvme_io) as rig, reporting(rig) as worker:
        worker.reporter.report(
            Report(
                tiers=(room(Tier.HOST, used=96), COLD_ROOM),
                segments=(segment(1, HOST), segment(2, HOST, pins=1), segment(3, HOST)),
            )
        )
        until(lambda: sorted(nvme_io.moved("demote")) == [1, 3], "the demotions")
        assert {each.reason for _, each in nvme_io.commands} == {"watermark"}
        assert rig.decisions().held_totals["pinned"] > 0


def test_idle_segments_leave_an_unsteady_tier(tmp_path: Path) -> None:
    nvme_io = RecordingNvmeIo()
    settings = {"H3_MIGRATION_CONTROLLER_RULES__JITTER_USED_FRACTION_MIN": "0"}
    with running(tmp_path, nvme_io, **settings) as rig, reporting(rig) as worker, reporting(rig, name="nvme_io") as io:
        worker.reporter.report(Report(segments=(segment(1, HOST),)))
        io.reporter.report(Report(tiers=(room(Tier.HOST, used=50), COLD_ROOM), host_access=HostAccess(100.0, 24.0)))
        until(lambda: len(rig.view().tiers) == 2 and rig.segments(), "both reports")
        assert nvme_io.commands == []
        io.reporter.report(Report(host_access=HostAccess(100.0, 26.0)))
        until(lambda: nvme_io.moved("demote") == [1], "the demotion")
        assert nvme_io.commands[0][1].reason == "jitter"
        assert rig.view(page_size=0).host_access.jitter_ns == 26.0


def test_someone_who_waits_for_room_makes_idle_segments_leave(tmp_path: Path) -> None:
    nvme_io = RecordingNvmeIo()
    with running(tmp_path, nvme_io) as rig, reporting(rig) as worker:
        tiers = (room(Tier.HOST, used=90), COLD_ROOM)
        worker.reporter.report(Report(tiers=tiers, segments=(segment(1, HOST),)))
        until(rig.segments, "the segment")
        worker.reporter.report(Report(room_needed=((Tier.HOST, 10 << 20),)))
        until(lambda: nvme_io.moved("demote") == [1], "the demotion")


def test_the_byte_budget_of_a_tick_bounds_what_is_sent_at_a_time(tmp_path: Path) -> None:
    nvme_io = RecordingNvmeIo()
    settings = {
        "H3_MIGRATION_CONTROLLER_RULES__TICK": "1h",
        "H3_MIGRATION_CONTROLLER_RULES__PROMOTE_BYTES_PER_TICK": "2MiB",
    }
    with running(tmp_path, nvme_io, **settings) as rig, reporting(rig) as worker:
        segments = tuple(segment(each, NVME) for each in range(1, 6))
        worker.reporter.report(Report(tiers=(room(Tier.HOST, used=10), COLD_ROOM), segments=segments))
        worker.reporter.report(touched(1, 1, 2, 3, 4, 5))
        until(lambda: rig.decisions().held_totals.get("budget") == 3, "three that the budget holds")
        assert len(nvme_io.moved("promote")) == 2


def test_a_command_ends_by_the_answer_by_a_watched_move_or_by_a_report(tmp_path: Path) -> None:
    nvme_io = RecordingNvmeIo()
    with running(tmp_path, nvme_io) as rig, reporting(rig) as worker:
        segments = tuple(segment(each, NVME) for each in (1, 2, 3))
        worker.reporter.report(Report(tiers=(room(Tier.HOST, used=10), COLD_ROOM), segments=segments))
        worker.reporter.report(touched(1, 1))
        until(lambda: nvme_io.moved("promote") == [1], "the first")
        nvme_io.end(nvme_io.commands[0][1], commands_pb2.OUTCOME_DONE, tiers=[Tier.HOST, Tier.NVME])
        until(lambda: outcomes(rig)[0] == commands_pb2.OUTCOME_DONE, "its end")
        nvme_io.outcome = commands_pb2.OUTCOME_BUSY
        worker.reporter.report(touched(2, 2))
        until(lambda: len(outcomes(rig)) == 2 and outcomes(rig)[1] == commands_pb2.OUTCOME_BUSY, "the second's end")
        nvme_io.outcome = commands_pb2.OUTCOME_STARTED
        worker.reporter.report(touched(3, 3))
        until(lambda: nvme_io.moved("promote") == [1, 2, 3], "the third")
        command = nvme_io.commands[-1][1]
        ended = MoveOutcome(command.id.sender_boot_token, command.id.number, MoveEnd.DONE, generation=2, tiers=BOTH)
        worker.reporter.report(Report(outcomes=(ended,)))
        until(lambda: outcomes(rig)[2] == commands_pb2.OUTCOME_DONE, "the third's end")
        assert rig.decisions().held_totals["failed"] == 1


def outcomes(rig: Rig) -> list[int]:
    return [each.outcome.outcome for each in rig.decisions().decisions]


def test_commands_for_a_peer_that_is_gone_are_sent_when_it_is_back_under_the_same_id(tmp_path: Path) -> None:
    nvme_io = RecordingNvmeIo()
    settings = {"H3_MIGRATION_CONTROLLER_RULES__COMMAND_TIMEOUT": "1h"}
    controller = ControllerProcess(tmp_path, **settings)
    rig = Rig(tmp_path, nvme_io, controller)
    try:
        with reporting(rig) as worker:
            worker.reporter.report(Report(tiers=(room(Tier.HOST, used=10), COLD_ROOM), segments=(segment(1, NVME),)))
            worker.reporter.report(touched(1, 1))
            until(lambda: len(rig.decisions().decisions) == 1, "the decision")
            with serving_nvme_io(tmp_path, nvme_io):
                until(lambda: nvme_io.moved("promote") == [1], "the command")
            assert len(rig.decisions().decisions) == 1
            assert len(nvme_io.acted) == 1
        rig.channel.close()
        assert controller.stop() == 0
    finally:
        rig.channel.close()
        controller.kill()


def sent(number: int, report: Report, *, step: SnapshotStep, boot: bytes = b"w" * 16) -> pb.ReportTelemetryRequest:
    return report_message(NumberedReport(ProcessName("gpu_worker", boot), number, 1, step, report))


def test_a_report_that_comes_twice_is_applied_once(tmp_path: Path) -> None:
    with running(tmp_path, RecordingNvmeIo()) as rig:
        first = sent(1, Report(segments=(segment(1, NVME),)), step=SnapshotStep.WHOLE)
        again = sent(1, Report(segments=(segment(2, NVME),)), step=SnapshotStep.WHOLE)
        answer = rig.stub.ReportTelemetry(iter([first, again, first]))
        assert answer.reports == 1
        until(lambda: list(rig.segments()) == [1], "the first report alone")


def test_a_snapshot_in_parts_forgets_what_no_part_names(tmp_path: Path) -> None:
    with running(tmp_path, RecordingNvmeIo()) as rig:
        begin, part, end = SnapshotStep.BEGIN, SnapshotStep.PART, SnapshotStep.END
        whole = Report(segments=tuple(segment(each, NVME) for each in range(5)))
        rig.stub.ReportTelemetry(iter([sent(1, whole, step=SnapshotStep.WHOLE)]))
        parts = [
            sent(2 + at, Report(segments=(segment(number, NVME),)), step=step)
            for at, (number, step) in enumerate([(1, begin), (3, part), (7, end)])
        ]
        rig.stub.ReportTelemetry(iter(parts))
        until(lambda: list(rig.segments()) == [1, 3, 7], "what the parts named")


def test_another_boot_token_makes_all_of_its_process_vanish_and_an_earlier_one_is_refused(tmp_path: Path) -> None:
    with running(tmp_path, RecordingNvmeIo()) as rig:
        old, new = b"o" * 16, b"n" * 16
        whole = SnapshotStep.WHOLE
        rig.stub.ReportTelemetry(iter([sent(1, Report(segments=(segment(1, NVME),)), step=whole, boot=old)]))
        until(rig.segments, "the old one's segment")
        rig.stub.ReportTelemetry(iter([sent(1, Report(segments=(segment(2, NVME),)), step=whole, boot=new)]))
        until(lambda: list(rig.segments()) == [2], "the new one's segment alone")
        with pytest.raises(RequestError, match="a later gpu_worker reports"):
            rig.stub.ReportTelemetry(iter([sent(9, Report(segments=(segment(3, NVME),)), step=whole, boot=old)]))
        assert list(rig.segments()) == [2]
        stale = Report(tick=1, touches=(SegmentTouch(SegmentId(2), 1.0, owner_boot_token=old),))
        rig.stub.ReportTelemetry(iter([sent(2, stale, step=SnapshotStep.CHANGES, boot=new)]))
        until(lambda: rig.decisions().held_totals.get("unknown_owner") == 1, "the touch that names an earlier life")


def test_a_malformed_report_ends_its_stream_and_earlier_ones_stay(tmp_path: Path) -> None:
    with running(tmp_path, RecordingNvmeIo()) as rig:
        good = sent(1, Report(segments=(segment(1, NVME),)), step=SnapshotStep.WHOLE)
        bad = sent(2, Report(), step=SnapshotStep.CHANGES)
        bad.touches.add(attention_mass=0.5)
        with pytest.raises(H3Error, match="touches came without a tick"):
            rig.stub.ReportTelemetry(iter([good, bad]))
        until(lambda: list(rig.segments()) == [1], "the good one")


def test_a_controller_that_was_killed_learns_everything_again_from_the_owners(tmp_path: Path) -> None:
    nvme_io = RecordingNvmeIo()
    with (
        running(tmp_path, nvme_io) as rig,
        reporting(rig) as worker,
        reporting(rig, name="nvme_io", boot=b"i" * 16) as io,
    ):
        segments = tuple(segment(each, NVME) for each in range(1, 4))
        worker.reporter.report(Report(segments=segments))
        io.reporter.report(Report(tiers=(room(Tier.HOST, used=10), COLD_ROOM)))
        until(lambda: len(rig.segments()) == 3 and len(rig.view().tiers) == 2, "the view")
        rig.controller.kill()
        worker.reporter.report(Report(gone=(SegmentId(3),)))
        rig.controller.start()
        until(lambda: list(rig.segments()) == [1, 2] and len(rig.view().tiers) == 2, "the view again")
        worker.reporter.report(touched(1, 2))
        until(lambda: nvme_io.moved("promote") == [2], "a decision of the new one")


def test_decisions_are_counted_by_reason_and_their_time_is_recorded(tmp_path: Path) -> None:
    nvme_io = RecordingNvmeIo(commands_pb2.OUTCOME_NO_ROOM)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    settings = {"H3_MIGRATION_CONTROLLER_METRICS__PORT": str(port)}
    with running(tmp_path, nvme_io, **settings) as rig, reporting(rig) as worker:
        worker.reporter.report(Report(tiers=(room(Tier.HOST, used=10), COLD_ROOM), segments=(segment(1, NVME),)))
        worker.reporter.report(touched(1, 1))
        until(lambda: outcomes(rig) == [commands_pb2.OUTCOME_NO_ROOM], "the outcome")
        page = read_page(f"http://127.0.0.1:{port}/metrics")
        assert 'h3_decisions_total{direction="promote",reason="room"} 1.0' in page
        assert 'h3_commands_total{outcome="no_room"} 1.0' in page
        assert 'h3_reporting_processes{service="gpu_worker"} 1.0' in page
        assert re.search(r"h3_decision_duration_seconds_count [1-9]", page)
        assert rig.decisions().totals == {"room": 1}
        assert "decided" in rig.controller.log.read_text()
