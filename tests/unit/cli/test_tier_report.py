import io
from collections.abc import Iterator
from dataclasses import replace

import pytest
from rich.console import Console
from tests.unit.cli.test_report import NOTHING

from h3kv.cli.display import REDRAW_NS, TierScreen
from h3kv.cli.tier_report import TierSnapshot, Traffic, fallbacks, take_snapshot, tier_fields, tier_table
from h3kv.cli.tier_summary import Peaks, dropped_segments, summary_table, warnings
from h3kv.core.types import StoreStatistics, Tier
from h3kv.engine.config import EngineConfig
from h3kv.engine.needs import TieringConfig
from h3kv.engine.tiers import ColdPlace, TierConfig
from h3kv.models.loader import load_model
from h3kv.node import Node
from h3kv.telemetry import names
from h3kv.testing.clock import ManualClock
from h3kv.testing.tiny_models import write_tiny_model
from h3kv.tiers.cold import ColdStoreConfig
from h3kv.tiers.device import DeviceStoreConfig
from h3kv.tiers.host import HostStoreConfig

MIB = 1 << 20


def statistics(tier: Tier, *, used_bytes: int, moves: int = 0) -> StoreStatistics:
    return StoreStatistics(
        tier=tier,
        capacity_bytes=8 * MIB,
        used_bytes=used_bytes,
        slabs_visible=0,
        moves_total=moves,
        bytes_moved_total=0,
    )


def snapshot(at_s: float, traffic: Traffic) -> TierSnapshot:
    tiers = {
        Tier.DEVICE: statistics(Tier.DEVICE, used_bytes=MIB),
        Tier.HOST: statistics(Tier.HOST, used_bytes=2 * MIB, moves=30),
        Tier.NVME: statistics(Tier.NVME, used_bytes=4 * MIB, moves=1200),
    }
    return TierSnapshot(int(at_s * 1e9), tiers, traffic)


def rows(now: TierSnapshot, before: TierSnapshot) -> dict[str, list[str]]:
    out = io.StringIO()
    Console(file=out, width=120).print(tier_table(now, before))
    lines = [line.replace(" MiB", "MiB").replace(" B", "B").split() for line in out.getvalue().splitlines()[1:]]
    return {line[0]: line[1:] for line in lines}


@pytest.fixture(scope="module")
def node(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Node]:
    folder = tmp_path_factory.mktemp("node")
    write_tiny_model(folder / "tiny")
    tiers = TierConfig(
        HostStoreConfig(16 * MIB),
        TieringConfig(window_tokens=64, chunk_tokens=64),
        ColdPlace(folder / "kv.h3", ColdStoreConfig(capacity_bytes=128 * MIB), backend="threads"),
    )
    model = load_model(folder / "tiny")
    with Node.open(
        model, store=DeviceStoreConfig(2 * MIB), tiers=tiers, engine=EngineConfig(chunk_tokens=64)
    ) as opened:
        yield opened


def test_speeds_are_those_between_two_snapshots() -> None:
    before = snapshot(1.0, Traffic(to_nvme_bytes=10**9, to_host_bytes=0, streamed_bytes=0))
    now = snapshot(3.0, Traffic(to_nvme_bytes=2 * 10**9, to_host_bytes=10**9, streamed_bytes=10**9))
    found = rows(now, before)
    assert found["device"] == ["1.00MiB", "8.00MiB", "-", "-", "-", "-"]
    assert found["host"][:2] == ["2.00MiB", "8.00MiB"]
    assert found["host"][-2:] == ["0.50", "0.50"]
    assert found["nvme"][-2:] == ["0.50", "1.00"]


def test_no_time_and_no_bytes_are_no_speed() -> None:
    still = snapshot(1.0, Traffic(to_nvme_bytes=10**9, to_host_bytes=0, streamed_bytes=0))
    assert rows(still, still)["nvme"][-2:] == ["-", "-"]
    crawling = snapshot(2.0, Traffic(to_nvme_bytes=10**9 + 1, to_host_bytes=0, streamed_bytes=0))
    assert rows(crawling, still)["nvme"][-2:] == ["<0.01", "-"]


def test_fields_say_what_each_tier_runs_on(node: Node) -> None:
    fields = tier_fields(node)
    assert isinstance(fields["tiers"], dict)
    assert list(fields["tiers"]) == ["device", "host", "nvme"]
    assert fields["moved_bytes"] == {"host_to_nvme": 0, "nvme_to_host": 0, "nvme_streamed": 0}
    assert isinstance(fields["store"], dict)
    assert fields["store"]["backend"] == "threads"
    (line,) = fallbacks(node)
    assert "kv.h3 uses threads instead of io_uring" in line


def test_screen_is_redrawn_when_the_time_has_come_and_gone_at_the_end(
    node: Node, capsys: pytest.CaptureFixture[str]
) -> None:
    out, clock = io.StringIO(), ManualClock()
    screen = TierScreen(Console(file=out, force_terminal=True, width=100), node, clock, streams=True)
    screen.read(64, 128)
    assert "reading: 64 of 128" not in out.getvalue()
    clock.advance(REDRAW_NS)
    screen.read(128, 128)
    assert "reading: 128 of 128 tokens" in out.getvalue()
    screen.write("The answer")
    assert capsys.readouterr().out == "The answer"
    screen.close()
    drawn = out.getvalue()
    screen.close()
    assert out.getvalue() == drawn
    assert drawn.rstrip().endswith("\x1b[2K")


def test_snapshot_has_the_time_and_all_tiers(node: Node) -> None:
    taken = take_snapshot(node, 7)
    assert taken.at_ns == 7
    assert taken.tiers == node.statistics()
    node.check_integrity()


def test_summary_has_peaks_and_says_what_was_found_where(node: Node) -> None:
    peaks = Peaks(node)
    out = io.StringIO()
    answer = replace(NOTHING, statistics=replace(NOTHING.statistics, cached_tokens={Tier.NVME: 1024}))
    table = summary_table(node, peaks, [answer, answer], before=take_snapshot(node, 0).traffic)
    Console(file=out, width=120).print(table)
    lines = [line.split() for line in out.getvalue().splitlines()]
    assert lines[0] == ["tier", "peak", "cap", "found", "in", "out", "dropped"]
    assert [line[0] for line in lines[1:]] == ["device", "host", "nvme"]
    assert lines[3][-5:] == ["2,048", "tokens", "-", "-", "-"]
    assert warnings(node) == []


def test_segments_that_a_full_store_dropped_are_said(node: Node) -> None:
    node.telemetry.count(names.EVICTED_SEGMENTS, tier=Tier.NVME)
    (line,) = warnings(node)
    assert "1 segments of up to 1,024 tokens" in line
    assert dropped_segments(node)[Tier.NVME] == 1
