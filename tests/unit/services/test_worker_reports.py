"""What gpu_worker tells the controller of its segments, over an engine with three tiers."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path

import pytest

from h3kv.core.retrieval import RetrievalSetting
from h3kv.core.types import Encoding, SegmentId, StoreStatistics, Tier
from h3kv.core.units import NS_PER_S
from h3kv.engine.request import Request, SamplingParameters
from h3kv.rpc.addresses import UnixAddress
from h3kv.rpc.client import PeerChannel
from h3kv.rpc.command_messages import MoveEnd, MoveOutcome
from h3kv.rpc.reports import ProcessName, Report, ReportedSegment
from h3kv.rpc.telemetry_reporter import TelemetryReporter
from h3kv.telemetry.recorder import Recorder
from h3kv.testing.engines import Rig, layout_of, prompt_tokens
from h3kv.testing.tiered_rig import tiered_rig
from services.gpu_worker.metrics import Snapshot
from services.gpu_worker.reporting import TICK_NS, WorkerReports

LAYOUT = layout_of(Encoding.K8V4)
SAMPLING = SamplingParameters(max_new_tokens=12, ignore_eos=True)


class KeptReports(TelemetryReporter):
    """Never started: what is handed in stays here."""

    def __init__(self, channel: PeerChannel) -> None:
        super().__init__(channel, ProcessName("gpu_worker", b"w" * 16), telemetry=Recorder())
        self.kept: list[Report] = []

    def report(self, report: Report) -> None:
        self.kept.append(report)


class World:
    def __init__(self, rig: Rig, reporter: KeptReports) -> None:
        self.rig = rig
        self.reporter = reporter
        self.reports = WorkerReports(rig.pool, reporter)
        self._now = itertools.count(0, TICK_NS)
        self.known: dict[SegmentId, ReportedSegment] = {}
        self.touches: dict[SegmentId, float] = {}

    def look(self, *outcomes: MoveOutcome) -> Report | None:
        """What one tick says; what the controller then knows is in `known`."""
        before = len(self.reporter.kept)
        self.reports.look(snapshot(self.rig), outcomes, now_ns=next(self._now))
        for report in self.reporter.kept[before:]:
            self.known.update((each.segment, each) for each in report.segments)
            for gone in report.gone:
                del self.known[gone]
            self.touches = {each.segment: each.mass for each in report.touches}
            return report
        return None

    def answer(self, prompt: list[int]) -> list[dict[SegmentId, float]]:
        """Answer a prompt with a tick after each step: the touches of each."""
        events = self.rig.engine.generate(Request(prompt=tuple(prompt), sampling=SAMPLING))
        return [self.touches if self.look() is not None else {} for _ in events]


def snapshot(rig: Rig) -> Snapshot:
    return Snapshot(
        tiers=rig.pool.statistics(),
        pinned_bytes={},
        home_pins=0,
        requests_running=0,
        requests_waiting=0,
        requests_total=0,
        prefill_tokens_total=0,
        cached_tokens_total={},
        decode_tokens_total=0,
        segments_cached=0,
        cold_kv_ratio=0.0,
        recall=None,
        units_taken_back_total=0,
    )


@pytest.fixture
def reporter(tmp_path: Path) -> Iterator[KeptReports]:
    with PeerChannel(UnixAddress(tmp_path / "nobody.sock")) as channel:
        yield KeptReports(channel)


@pytest.fixture
def world(tmp_path: Path, reporter: KeptReports) -> Iterator[World]:
    retrieval = RetrievalSetting(budget_tokens=256)
    options = {"layout": LAYOUT, "retrieval": retrieval, "host_blocks": 160, "page_cache_bytes": 1 << 20}
    with tiered_rig(tmp_path / "store", **options) as rig:
        yield World(rig, reporter)


def as_they_are(rig: Rig) -> dict[SegmentId, tuple[int, frozenset[Tier]]]:
    return {each.id: (each.generation, each.tiers) for each in rig.segments.sealed() if each.keys}


def test_controller_knows_each_segment_as_it_is_and_hears_of_changes_alone(world: World) -> None:
    prompt = prompt_tokens(1, 2200)
    world.answer(prompt)
    world.rig.pool.placer.settle(60 * NS_PER_S)
    report = world.look()
    assert report is not None
    assert {key: (each.generation, each.tiers) for key, each in world.known.items()} == as_they_are(world.rig)
    room = next(each for each in world.reporter.kept if each.tiers).tiers[0]
    device: StoreStatistics = world.rig.pool.statistics()[Tier.DEVICE]
    assert (room.tier, room.capacity_bytes) == (Tier.DEVICE, device.capacity_bytes)
    assert world.look() is None, "nothing changed"
    parents = {each.parent for each in world.known.values()} - {None}
    assert parents <= {each.key for each in world.known.values()}
    first = min(world.known)
    world.rig.pool.placer.ask([first], Tier.NVME, reason="watermark")
    report = world.look(MoveOutcome(b"c" * 16, 1, MoveEnd.DONE))
    assert report is not None
    assert [(each.segment, each.tiers) for each in report.segments] == [(first, {Tier.NVME})]
    assert [each.number for each in report.outcomes] == [1]
    world.rig.engine.evict_cached()
    world.look()
    assert world.known == {}
    world.rig.engine.check_integrity()


def test_touches_are_what_retrieval_read_and_what_a_lookup_found(world: World) -> None:
    prompt = prompt_tokens(2, 2200)
    world.look()
    first = world.answer(prompt)
    shares = [share for touches in first for share in touches.values()]
    assert any(touches for touches in first)
    assert all(0 < share < 1 for share in shares), "nothing was found by a lookup"
    again = world.answer(prompt)
    assert max(again[0].values()) == 1.0
    assert set(again[0]) <= world.known.keys()
    assert all(share < 1 for touches in again[2:] for share in touches.values())
    world.rig.engine.check_integrity()


def test_segments_that_are_read_whole_must_stay(world: World) -> None:
    prompt = prompt_tokens(3, 2200)
    world.answer(prompt)
    stream = world.rig.engine.generate(Request(prompt=tuple(prompt), sampling=SAMPLING))
    next(stream)
    world.look()
    held = [each for each in world.rig.segments.sealed() if each.pins and each.keys]
    assert held
    for each in held:
        assert (world.known[each.id].pins > 0) == (each.clustered_blocks == 0)
    stream.close()
    world.look()
    assert all(each.pins == 0 for each in world.known.values())
