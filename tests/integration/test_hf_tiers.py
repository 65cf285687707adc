"""The transformers cache and the two-edit API with all three tiers at work."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from tests.unit.hf.models import greedy, ids_of, model_of
from tests.unit.hf.plain import PlainAttention, causal_mask
from tests.unit.hf.tiers import small_caps
from transformers import DynamicCache

from h3kv import h3_attention, h3_kv_cache
from h3kv.core.errors import ConfigError, SlabCorruptError, SlabUnavailableError, StoreBusyError, TierFullError
from h3kv.core.types import Tier
from h3kv.hf import H3Cache

SCALE = 0.25

TOO_MANY = 64_000
"""Tokens that no caps of these tests hold."""


def fill(cache: h3_kv_cache.KvCache, q: torch.Tensor, k: torch.Tensor) -> None:
    while max(cache.tokens_B) < TOO_MANY:
        for index in range(2):
            h3_attention.attend(q, k, k, cache.layer(index))


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.mark.parametrize("family", ["llama", "qwen2"])
@pytest.mark.parametrize("lengths", [(2500,), (2500, 1400)])
def test_generate_reads_from_all_tiers(family: str, lengths: tuple[int, ...], tmp_path: Path) -> None:
    ids = ids_of(*lengths)
    model = model_of(family, "sdpa")
    expected = greedy(model, ids, DynamicCache(config=model.config), tokens=20)
    model = model_of(family, "h3")
    with H3Cache(model.config, **small_caps(tmp_path, rows=len(lengths))) as cache:
        assert torch.equal(greedy(model, ids, cache, tokens=20, prefill_chunk_size=128), expected)
        statistics = cache.statistics()
        assert all(statistics[tier].used_bytes > 0 for tier in Tier)
        assert all(tier.used_bytes <= tier.capacity_bytes for tier in statistics.values())
        cache.check_integrity()
        cache.reset()
        assert cache.statistics()[Tier.NVME].used_bytes == cache.statistics()[Tier.DEVICE].used_bytes == 0


def test_both_ways_of_attending_read_from_all_tiers(tmp_path: Path) -> None:
    generator = torch.Generator().manual_seed(9)
    caches = []
    for name in ("fused", "products"):
        (tmp_path / name).mkdir()
        caches.append(h3_kv_cache.create(layers=2, kv_heads=2, head_dim=16, **small_caps(tmp_path / name)))
    fused, products = caches
    plain = [PlainAttention() for _ in range(2)]
    with fused, products:
        for tokens in (*(13 * [192]), 1, 70):
            for index in range(2):
                q, k, v = (torch.randn(1, heads, tokens, 16, generator=generator) for heads in (4, 2, 2))
                expected = plain[index].attend(q, k, v, scale=SCALE)
                out = h3_attention.attend(q, k, v, fused.layer(index))
                torch.testing.assert_close(out.double(), expected, atol=2e-5, rtol=0)
                scores = h3_attention.qk_matmul(q, k, products.layer(index))
                p = (scores * SCALE + causal_mask(*scores.shape[2:])).softmax(-1)
                out = h3_attention.pv_matmul(p, v, products.layer(index))
                torch.testing.assert_close(out.double(), expected, atol=2e-5, rtol=0)
        for cache in caches:
            assert all(tier.used_bytes > 0 for tier in cache.statistics().values())
            cache.check_integrity()


def test_a_chunk_larger_than_the_device_says_what_to_change(tmp_path: Path) -> None:
    model = model_of("llama", "h3")
    ids = ids_of(1500)
    with H3Cache(model.config, **small_caps(tmp_path)) as cache:
        with pytest.raises(TierFullError, match=r"device.*prefill_chunk_size"):
            greedy(model, ids, cache, tokens=4)
        answer = greedy(model, ids, cache, tokens=4, prefill_chunk_size=256)
        plain = model_of("llama", "sdpa")
        assert torch.equal(answer, greedy(plain, ids, DynamicCache(config=plain.config), tokens=4))


def test_more_rows_than_the_device_holds_are_refused_and_fewer_still_work(tmp_path: Path) -> None:
    model = model_of("llama", "h3")
    with H3Cache(model.config, **small_caps(tmp_path)) as cache:
        with pytest.raises(TierFullError, match=r"30 rows .* fewer rows"):
            greedy(model, ids_of(*(30 * [5])), cache, tokens=2)
        greedy(model, ids_of(5), cache, tokens=2)
        cache.check_integrity()


@pytest.mark.parametrize("store_bytes", [None, "8MiB"])
def test_more_tokens_than_all_tiers_hold_name_the_cap(tmp_path: Path, store_bytes: str | None) -> None:
    caps = small_caps(tmp_path)
    if store_bytes is None:
        del caps["store"], caps["store_bytes"]
    else:
        caps["store_bytes"] = store_bytes
    with h3_kv_cache.create(layers=2, kv_heads=2, head_dim=16, **caps) as cache:
        q, k = torch.zeros(1, 4, 192, 16), torch.zeros(1, 2, 192, 16)
        with pytest.raises(TierFullError, match=r"raise (host_bytes|store_bytes)"):
            fill(cache, q, k)
        assert 1024 < max(cache.tokens_B) < TOO_MANY
        cache.check_integrity()


def test_damaged_pages_are_never_attended(tmp_path: Path) -> None:
    model = model_of("llama", "h3")
    ids = ids_of(2500)
    with H3Cache(model.config, **small_caps(tmp_path)) as cache:
        greedy(model, ids, cache, tokens=2, prefill_chunk_size=128)
        store = next(tmp_path.iterdir())
        kept = store.read_bytes()
        with store.open("r+b") as file:
            file.seek(len(kept) // 8)
            file.write(bytes(byte ^ 1 for byte in kept[len(kept) // 8 :]))
        with pytest.raises((SlabCorruptError, SlabUnavailableError), match=r"reset\(\)"):
            greedy(model, torch.cat([ids, ids_of(9)], dim=1), cache, tokens=8)
        cache.reset()
        answer = greedy(model, ids_of(40), cache, tokens=4)
        plain = model_of("llama", "sdpa")
        assert torch.equal(answer, greedy(plain, ids_of(40), DynamicCache(config=plain.config), tokens=4))


def test_a_store_serves_one_cache_at_a_time(tmp_path: Path) -> None:
    config = model_of("llama", "h3").config
    with H3Cache(config, **small_caps(tmp_path)), pytest.raises(StoreBusyError):
        H3Cache(config, **small_caps(tmp_path))
    H3Cache(config, **small_caps(tmp_path)).close()


def test_a_cache_that_nobody_closed_gives_its_store_back(tmp_path: Path) -> None:
    model = model_of("llama", "h3")
    cache: H3Cache | None = H3Cache(model.config, **small_caps(tmp_path))
    greedy(model, ids_of(1500), cache, tokens=2, prefill_chunk_size=256)
    cache = None
    gc.collect()
    H3Cache(model.config, **small_caps(tmp_path)).close()
    assert cache is None


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"window_tokens": 100}, "window_tokens"),
        ({"device_bytes": 1 << 18, "window_tokens": 1024}, "device_bytes"),
        ({"host_bytes": 1 << 19}, "host_bytes"),
        ({"host_bytes": None}, "host_bytes"),
        ({"host_bytes": "much"}, "host_bytes"),
        ({"store": None}, "store"),
    ],
)
def test_caps_that_cannot_work_are_named(tmp_path: Path, change: dict[str, object], field: str) -> None:
    caps = small_caps(tmp_path) | change
    with pytest.raises(ConfigError, match=field) as caught:
        h3_kv_cache.create(layers=2, kv_heads=2, head_dim=16, **caps)
    assert caught.value.field == field
