"""`h3_kv_cache.force_evict_cold`: main memory becomes free, results stay."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from h3kv import h3_attention, h3_kv_cache
from h3kv.core.errors import TierClosedError
from h3kv.core.types import Tier

pytestmark = pytest.mark.slow

TOKENS = 3 * 1024


def attend(cache: h3_kv_cache.KvCache, tokens: int, generator: torch.Generator) -> torch.Tensor:
    """One step through both layers; what the last one gives."""
    for index in range(2):
        q = torch.randn(1, 4, tokens, 16, generator=generator)
        k, v = (torch.randn(1, 2, tokens, 16, generator=generator) for _ in range(2))
        out = h3_attention.attend(q, k, v, cache.layer(index))
    return out


def test_main_memory_becomes_free_and_results_stay(tmp_path: Path) -> None:
    outs = []
    for place, evicts in (("kept", False), ("evicted", True)):
        generator = torch.Generator().manual_seed(7)
        with h3_kv_cache.create(
            layers=2,
            kv_heads=2,
            head_dim=16,
            device_bytes="2MiB",
            host_bytes="8MiB",
            store=tmp_path / place,
            store_bytes="32MiB",
            window_tokens=64,
        ) as cache:
            for _ in range(TOKENS // 256):
                attend(cache, 256, generator)
            before = cache.statistics()[Tier.HOST].used_bytes
            if evicts:
                freed = h3_kv_cache.force_evict_cold()
                assert freed > 0
                assert cache.statistics()[Tier.HOST].used_bytes == before - freed
                assert cache.force_evict_cold() == 0, "nothing is left to go"
            outs.append(attend(cache, 1, generator))
            cache.check_integrity()
    torch.testing.assert_close(outs[0], outs[1], atol=0, rtol=0)


def test_a_cache_without_tiers_has_nothing_to_give_up() -> None:
    with h3_kv_cache.create(layers=2, kv_heads=2, head_dim=16, device_bytes="2MiB") as cache:
        attend(cache, 100, torch.Generator().manual_seed(7))
        assert cache.force_evict_cold() == 0
        cache.check_integrity()
    with pytest.raises(TierClosedError):
        cache.force_evict_cold()
    assert h3_kv_cache.force_evict_cold() == 0
