"""The benchmarks of a node of processes measure what they say, in small; speed itself is never asserted."""

from __future__ import annotations

import math
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from typer.testing import CliRunner

from h3kv.bench import decisions, migration_load, node_growth, seal_share
from h3kv.bench.remote_node import RemotePlace
from h3kv.bench.results import Results
from h3kv.bench.seal_share import Step, added_ns
from h3kv.bench.texts import NamedText
from h3kv.bench.tiered import TieredSetting, TokenCaps
from h3kv.cli.app import app
from h3kv.core.errors import ConfigError
from h3kv.testing.engines import one_thread
from h3kv.testing.tiny_models import write_tiny_model

NAMED = NamedText("words", "All work and no play makes Jack a dull boy. " * 40)
CAPS = TokenCaps(device_tokens=1024, window_tokens=128, host_tokens=16_384, chunk_tokens=128)
STORE_BYTES = 64 << 20


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("model")
    write_tiny_model(folder, max_position_embeddings=4096)
    return str(folder)


@pytest.fixture
def setting(model: str, tmp_path: Path) -> Iterator[TieredSetting]:
    with one_thread():
        yield TieredSetting(model, tmp_path, repetitions=1, progress=lambda _: None)


@pytest.fixture
def sockets() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="h3-") as folder:
        yield Path(folder)


def finite(results: Results) -> set[str]:
    assert all(math.isfinite(value) for value in results.metrics.values())
    return set(results.metrics)


@pytest.mark.slow
def test_every_rule_of_the_controller_leads_to_a_command_that_is_timed(sockets: Path) -> None:
    results = Results()
    decisions.measure(results, sockets, sizes=decisions.Sizes((100, 1000), 1, 2), progress=lambda _: None)
    figures = ("decision_ms", "decision_1k_ms", "call_ms")
    assert finite(results) == {f"controller.{name}_p{percentile}" for name in figures for percentile in (50, 99)}
    assert all(value > 0 for value in results.metrics.values())


@pytest.mark.slow
def test_a_segment_is_sealed_while_tokens_are_made(setting: TieredSetting, sockets: Path) -> None:
    results = Results()
    place = RemotePlace(sockets, setting.folder / "store", STORE_BYTES)
    place.store.mkdir()
    seal_share.measure(results, place, setting, sizes=seal_share.Sizes(192, 1, CAPS), named=NAMED)
    assert finite(results) == {"services.seal_ms", "services.seal_overhead", "services.seal_waits"}


@pytest.mark.slow
def test_segments_move_both_ways_while_tokens_are_made(setting: TieredSetting, sockets: Path) -> None:
    results = Results()
    place = RemotePlace(sockets, setting.folder / "store", STORE_BYTES)
    place.store.mkdir()
    sizes = migration_load.Sizes(256, 1, 60, 100_000_000, 3, CAPS, STORE_BYTES)
    migration_load.measure(results, place, setting, sizes=sizes, named=NAMED)
    rates = {f"services.migration_mb_s.{way}" for way in ("host_to_nvme", "nvme_to_host")}
    assert rates <= finite(results)
    assert all(results.metrics[name] > 0 for name in rates)
    assert results.metrics["services.itl_ratio_under_migration"] > 0


@pytest.mark.slow
def test_growth_is_measured_over_a_whole_node(setting: TieredSetting, sockets: Path) -> None:
    results = Results()
    caps = (
        "--device-kv",
        "8MiB",
        "--host-kv",
        "16MiB",
        "--window",
        "64",
        "--store-capacity",
        "32MiB",
        "--threads",
        "1",
    )
    place = node_growth.NodePlace(sockets, setting.folder / "store")
    node_growth.measure(results, place, setting, sizes=node_growth.Sizes(12, 6, 60, 2, caps))
    names = {"services.rss_mib", "services.rss_growth", "services.fd_growth", "services.region_growth"}
    assert finite(results) == names
    assert results.metrics["services.region_growth"] == 0


def test_what_a_seal_adds_is_what_its_step_takes_beyond_those_around_it() -> None:
    steps = [Step(20, 0)] * 40 + [Step(95, 1)] + [Step(22, 0)] * 40
    assert added_ns(steps) == [74]
    with pytest.raises(ConfigError, match="no segment was sealed"):
        added_ns([Step(20, 0)] * 3)


def test_a_part_that_does_not_exist_is_named(tmp_path: Path) -> None:
    text = tmp_path / "text"
    text.write_text("Jack", encoding="utf-8")
    result = CliRunner().invoke(app, ["bench", "services", "--text", str(text), "--part", "all"])
    assert result.exit_code != 0
    assert "must be one of mailbox, decode, decisions, sealing, migration, growth" in result.stderr
