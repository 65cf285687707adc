"""The benchmarks of the tiers on a tiny model, in small; what is exact is asserted, speed never."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator
from pathlib import Path

import pytest

from h3kv.bench import exact, long_decode, memory, no_reuse, reuse
from h3kv.bench.results import Results
from h3kv.bench.texts import read_text
from h3kv.bench.tiered import TieredSetting, TokenCaps, load_reaching, open_tiered, random_tokens, store_folder
from h3kv.core.errors import ConfigError
from h3kv.core.types import DType, Tier
from h3kv.telemetry import names
from h3kv.testing.engines import one_thread
from h3kv.testing.tiny_models import write_tiny_model

TEXT = Path(__file__).parents[2] / "examples/demo/document.txt"
CAPS = TokenCaps(device_tokens=512, window_tokens=64, host_tokens=1536, chunk_tokens=320)
"""HOST holds two staging slots, an open segment, and little else."""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("model")
    write_tiny_model(folder, "llama", max_position_embeddings=2048, num_hidden_layers=8)
    return str(folder)


@pytest.fixture
def setting(model: str, tmp_path: Path) -> Iterator[TieredSetting]:
    with one_thread():
        yield TieredSetting(model, tmp_path, repetitions=1, progress=lambda _: None)
    assert list(tmp_path.iterdir()) == [], "stores are removed"


def test_three_tiers_give_the_tokens_and_the_perplexity_of_one(setting: TieredSetting) -> None:
    results = Results()
    exact.run(results, setting, exact.Sizes(2048, 8, 2048, 1, CAPS), named=read_text(TEXT))
    assert results.metrics["exact.2k.tokens_equal"] == 8
    assert results.metrics["exact.document_2k.scored_tokens"] == 2048
    assert results.metrics["exact.document_2k.perplexity_change"] == 0
    assert math.isfinite(results.metrics["exact.document_2k.perplexity"])


def test_caps_that_hold_everything_are_refused(setting: TieredSetting) -> None:
    with pytest.raises(ConfigError, match="nothing was read from the cold store"):
        exact.run(Results(), setting, exact.Sizes(192, 2, 192, 1, CAPS), named=read_text(TEXT))


def test_decode_over_host_and_cold_store_is_measured(setting: TieredSetting) -> None:
    results = Results()
    long_decode.run(results, setting, long_decode.Sizes(4096, 2, CAPS))
    figures = {"resident_ms", "host_ms", "host_over_resident"}
    figures |= {"cold_ms", "cold_disk_gb_per_s", "cold_bytes_read_over_needed", "cold_over_limit"}
    assert set(results.metrics) == {f"decode.4k.{figure}" for figure in figures}
    assert all(value > 0 for value in results.metrics.values())
    # A step reads every cold slab once.
    assert results.metrics["decode.4k.cold_bytes_read_over_needed"] == pytest.approx(1, abs=0.05)


@pytest.mark.slow
def test_memory_stays_under_its_caps(setting: TieredSetting) -> None:
    results = Results()
    memory.run(results, setting, memory.Sizes(2048, 4096, CAPS))
    # Huge pages and the tables in front of the slots weigh more in so small tiers than in real ones.
    assert 0.5 < results.metrics["memory.4k.kv_over_cap"] <= 1.5
    assert results.metrics["memory.rss_4k_over_2k"] > 0


@pytest.mark.slow
def test_a_second_process_finds_the_prefix_of_the_first(setting: TieredSetting) -> None:
    results = Results()
    reuse.run(results, setting, reuse.Sizes(4096, TokenCaps(512, 64, 6144, 320)))
    figures = {"prefill_s", "ttft_s", "limit_s", "disk_gb_per_s", "ttft_over_limit", "ttft_speedup"}
    assert set(results.metrics) == {f"reuse.4k.{figure}" for figure in figures}
    assert all(value > 0 for value in results.metrics.values())


def test_tiering_without_reuse_is_compared_with_none_and_neither_is_always_first(setting: TieredSetting) -> None:
    results, told = Results(), list[str]()
    setting = dataclasses.replace(setting, repetitions=2, progress=told.append)
    no_reuse.run(results, setting, no_reuse.Sizes(2, 1024, 4, CAPS))
    assert [line.split()[3] for line in told if "prompt tokens/s" in line] == ["on:", "off:", "off:", "on:"]
    assert set(results.metrics) == {"noreuse.on_tokens_per_s", "noreuse.off_tokens_per_s", "noreuse.fraction"}
    assert all(value > 0 for value in results.metrics.values())


def test_what_tiering_writes_is_written_before_its_time_is_taken(setting: TieredSetting) -> None:
    sizes = no_reuse.Sizes(1, 1024, 4, CAPS)
    model = load_reaching(setting.model, dtype=DType.BF16, context_tokens=1028)
    with store_folder(setting) as store, open_tiered(model, CAPS, store=store, store_tokens=2048) as node:
        assert no_reuse.tokens_per_second(node, [random_tokens(model, 1024, seed=0)], sizes) > 0
        assert node.telemetry.value(names.MOVED_BYTES, source=Tier.HOST, target=Tier.NVME) > 0
        assert not node.pool.placer.is_moving


def test_memory_beyond_the_caps_is_seen(setting: TieredSetting) -> None:
    model = load_reaching(setting.model, dtype=DType.BF16, context_tokens=1028)
    with open_tiered(model, CAPS, store=None) as node:
        empty = memory.held_over_caps(node, CAPS)
        assert node.stores.host is not None
        node.stores.device.arena.fill_(1)
        node.stores.host.arena.fill_(1)
        assert empty < 0.7
        assert 1 <= memory.held_over_caps(node, CAPS) < 2
        less = dataclasses.replace(CAPS, device_tokens=CAPS.device_tokens // 2, host_tokens=CAPS.host_tokens // 2)
        assert memory.held_over_caps(node, less) >= 2
