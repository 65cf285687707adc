"""What processes said, and the events that follow from it."""

from __future__ import annotations

from h3kv.core.types import BlockKey, SegmentId, Tier
from h3kv.policy.migration_state import (
    JitterReported,
    Owner,
    OwnerJoined,
    RoomReported,
    SegmentGone,
    SegmentReported,
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
from services.migration_controller.metrics import service_of
from services.migration_controller.view import NodeView

FIRST, LATER = ProcessName("gpu_worker", b"1" * 16), ProcessName("gpu_worker", b"2" * 16)
OWNER = Owner("gpu_worker", FIRST.boot_token.hex())
HOST = frozenset({Tier.HOST})


def segment(number: int, *, pins: int = 0) -> ReportedSegment:
    return ReportedSegment(SegmentId(number), 1, BlockKey(bytes(32)), 16, 10, HOST, pins=pins)


class Told:
    """A view, and reports that are numbered."""

    def __init__(self, *, segments_max: int = 100) -> None:
        self.view = NodeView(segments_max=segments_max, processes_max=2, silence_ns=50)
        self.number = 0

    def tell(self, report: Report, *, step: SnapshotStep = SnapshotStep.CHANGES, process: ProcessName = FIRST) -> list:
        self.number += 1
        applied = self.view.apply(NumberedReport(process, self.number, 0, step, report), 7)
        self.view.check_integrity()
        return [] if applied is None else applied[0]


def begun(**bounds: int) -> Told:
    told = Told(**bounds)
    assert told.view.opened(FIRST) == (False, [OwnerJoined(OWNER)])
    return told


def test_only_what_changed_is_an_event() -> None:
    told = begun()
    reported = SegmentReported(OWNER, SegmentId(1), 1, 10, HOST, is_pinned=True)
    assert told.tell(Report(segments=(segment(1, pins=2),))) == [reported]
    assert told.tell(Report(segments=(segment(1, pins=2),))) == []
    assert told.tell(Report(gone=(SegmentId(1), SegmentId(9)))) == [SegmentGone(OWNER, SegmentId(1))]


def test_a_snapshot_makes_what_it_does_not_name_vanish() -> None:
    told = begun()
    told.tell(Report(segments=(segment(1), segment(2), segment(3))))
    assert told.tell(Report(segments=(segment(1),)), step=SnapshotStep.BEGIN) == []
    gone = told.tell(Report(segments=(segment(3),)), step=SnapshotStep.END)
    assert gone == [SegmentGone(OWNER, SegmentId(2))]
    assert told.view.segments_total == 2


def test_a_snapshot_that_another_stream_cuts_short_makes_nothing_vanish() -> None:
    told = begun()
    told.tell(Report(segments=(segment(1), segment(2))))
    told.tell(Report(segments=(segment(1),)), step=SnapshotStep.BEGIN)
    told.view.opened(FIRST)
    assert told.tell(Report(), step=SnapshotStep.END) == []
    assert told.view.segments_total == 2


def test_what_someone_waits_for_counts_as_taken() -> None:
    told = begun()
    room = TierRoom(Tier.HOST, 100, 60)
    assert told.tell(Report(room_needed=((Tier.HOST, 30),))) == [], "no room is known"
    assert told.tell(Report(tiers=(room,))) == [RoomReported(OWNER, Tier.HOST, 100, 10)]
    assert told.tell(Report(room_needed=((Tier.HOST, 90),))) == [RoomReported(OWNER, Tier.HOST, 100, 0)]
    assert told.tell(Report(room_needed=((Tier.HOST, 0),))) == [RoomReported(OWNER, Tier.HOST, 100, 40)]


def test_jitter_and_touches_become_events_of_who_they_name() -> None:
    told = begun()
    touches = (SegmentTouch(SegmentId(1), 0.5), SegmentTouch(SegmentId(2), 0.25, LATER.boot_token))
    jitter, own, other = told.tell(Report(host_access=HostAccess(90.0, 3.0), tick=4, touches=touches))
    assert jitter == JitterReported(OWNER, Tier.HOST, 3.0)
    assert (own, other) == (
        TouchesReported(OWNER, 4, ((SegmentId(1), 0.5),)),
        TouchesReported(Owner("gpu_worker", LATER.boot_token.hex()), 4, ((SegmentId(2), 0.25),)),
    )


def test_another_life_begins_with_nothing_and_the_earlier_one_is_not_heard() -> None:
    told = begun()
    told.tell(Report(segments=(segment(1),)))
    has_restarted, _ = told.view.opened(LATER)
    assert has_restarted
    assert told.view.segments_total == 0
    assert told.tell(Report(segments=(segment(1),))) == []
    told.view.closed(FIRST, 10)
    assert told.view.reporting == ["gpu_worker"]


def test_a_process_is_gone_once_it_was_silent_for_long_enough() -> None:
    told = begun()
    told.tell(Report(segments=(segment(1),)))
    assert told.view.expire(1_000) == []
    told.view.closed(FIRST, 1_000)
    assert told.view.expire(1_049) == []
    assert told.view.expire(1_050) == [OWNER]
    assert told.view.segments_total == 0
    told.view.check_integrity()


def test_segments_beyond_the_bound_are_left_out() -> None:
    told = begun(segments_max=2)
    assert len(told.tell(Report(segments=(segment(1), segment(2), segment(3))))) == 2
    told.tell(Report(gone=(SegmentId(1),)))
    assert len(told.tell(Report(segments=(segment(3),)))) == 1


def test_names_from_outside_make_no_series() -> None:
    assert service_of("ann_offload-2") == "ann_offload"
    assert service_of("ann_offload-3f2a91c0") == "ann_offload"
    assert service_of("gpu_worker") == "gpu_worker"
    assert service_of("something") == "other"
