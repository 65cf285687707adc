"""The two-edit API against plain attention."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from tests.unit.hf.plain import PlainAttention, causal_mask
from torch import Tensor

from h3kv import h3_attention, h3_kv_cache
from h3kv.core.errors import ConfigError, RequestError, ShapeError, TierClosedError, TierFullError

LAYERS, HEADS, KV_HEADS = 2, 4, 2
TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 3e-2, torch.float16: 4e-3}


@pytest.fixture
def generator() -> torch.Generator:
    return torch.Generator().manual_seed(5)


@pytest.fixture
def cache() -> Iterator[h3_kv_cache.KvCache]:
    with make_cache() as cache:
        yield cache
        cache.check_integrity()


def make_cache(
    *, head_dim: int = 16, dtype: torch.dtype = torch.float32, batch: int = 2, device_bytes: int | str = "8MiB"
) -> h3_kv_cache.KvCache:
    return h3_kv_cache.create(
        layers=LAYERS, kv_heads=KV_HEADS, head_dim=head_dim, dtype=dtype, batch=batch, device_bytes=device_bytes
    )


def states(
    tokens: int, generator: torch.Generator, *, head_dim: int = 16, dtype: torch.dtype = torch.float32, batch: int = 2
) -> tuple[Tensor, Tensor, Tensor]:
    def draw(heads: int) -> Tensor:
        return torch.randn(batch, heads, tokens, head_dim, generator=generator).to(dtype)

    return draw(HEADS), draw(KV_HEADS), draw(KV_HEADS)


@pytest.mark.parametrize("dtype", list(TOLERANCE))
@pytest.mark.parametrize("head_dim", [16, 80, 24])
def test_both_ways_equal_plain_attention(generator: torch.Generator, dtype: torch.dtype, head_dim: int) -> None:
    fused, products = (make_cache(head_dim=head_dim, dtype=dtype) for _ in range(2))
    plain = [PlainAttention() for _ in range(LAYERS)]
    scale = head_dim**-0.5
    with fused, products:
        for tokens in (70, 1, 63, 130, 1):
            for index in range(LAYERS):
                q, k, v = states(tokens, generator, head_dim=head_dim, dtype=dtype)
                expected = plain[index].attend(q, k, v, scale=scale)
                out = h3_attention.attend(q, k, v, fused.layer(index))
                torch.testing.assert_close(out.double(), expected, atol=TOLERANCE[dtype], rtol=0)
                scores = h3_attention.qk_matmul(q, k, products.layer(index))
                p = (scores.float() * scale + causal_mask(*scores.shape[2:])).softmax(-1)
                out = h3_attention.pv_matmul(p, v, products.layer(index))
                torch.testing.assert_close(out.double(), expected, atol=TOLERANCE[dtype], rtol=0)
        assert fused.tokens_B == products.tokens_B == (265, 265)


def test_scores_come_in_token_order(cache: h3_kv_cache.KvCache, generator: torch.Generator) -> None:
    plain = [PlainAttention() for _ in range(LAYERS)]
    for tokens in (200, 3):
        for index in range(LAYERS):
            q, k, v = states(tokens, generator)
            scores = h3_attention.qk_matmul(q, k, cache.layer(index))
            torch.testing.assert_close(scores.double(), plain[index].scores(q, k), atol=1e-5, rtol=0)
            h3_attention.pv_matmul(scores.softmax(-1), v, cache.layer(index))


def test_a_scale_of_ones_own_is_applied(cache: h3_kv_cache.KvCache, generator: torch.Generator) -> None:
    plain = [PlainAttention() for _ in range(LAYERS)]
    for tokens in (90, 1):
        for index in range(LAYERS):
            q, k, v = states(tokens, generator)
            out = h3_attention.attend(q, k, v, cache.layer(index), scale=0.7)
            torch.testing.assert_close(out.double(), plain[index].attend(q, k, v, scale=0.7), atol=2e-5, rtol=0)


def test_keys_are_kept_once_however_often_scores_are_asked(
    cache: h3_kv_cache.KvCache, generator: torch.Generator
) -> None:
    for index in range(LAYERS):
        q, k, v = states(5, generator)
        h3_attention.qk_matmul(q, k, cache.layer(index))
        scores = h3_attention.qk_matmul(q, k, cache.layer(index))
        h3_attention.pv_matmul(scores.softmax(-1), v, cache.layer(index))
    assert cache.tokens_B == (5, 5)


def test_layers_come_in_order(cache: h3_kv_cache.KvCache, generator: torch.Generator) -> None:
    q, k, v = states(3, generator)
    with pytest.raises(RequestError, match="layer 1 came where layer 0 of 2 was due"):
        h3_attention.attend(q, k, v, cache.layer(1))
    h3_attention.attend(q, k, v, cache.layer(0))
    with pytest.raises(RequestError, match="discard_step"):
        h3_attention.attend(q, k, v, cache.layer(0))
    with pytest.raises(RequestError, match="layer 1 brings"):
        h3_attention.attend(*states(4, generator), cache.layer(1))
    with pytest.raises(RequestError, match="layer 2 of a cache for 2 layers"):
        cache.layer(2)


def test_a_discarded_step_never_was(cache: h3_kv_cache.KvCache, generator: torch.Generator) -> None:
    plain = [PlainAttention() for _ in range(LAYERS)]
    q, k, v = states(66, generator)
    h3_attention.attend(q, k, v, cache.layer(0))
    cache.discard_step()
    assert cache.tokens_B == (0, 0)
    for tokens in (2, 70):
        for index in range(LAYERS):
            q, k, v = states(tokens, generator)
            out = h3_attention.attend(q, k, v, cache.layer(index))
            torch.testing.assert_close(out.double(), plain[index].attend(q, k, v, scale=0.25), atol=2e-5, rtol=0)


def test_values_before_keys_are_refused(cache: h3_kv_cache.KvCache, generator: torch.Generator) -> None:
    q, k, v = states(3, generator)
    with pytest.raises(RequestError, match="qk_matmul"):
        h3_attention.pv_matmul(torch.zeros(2, HEADS, 3, 3), v, cache.layer(0))
    h3_attention.qk_matmul(q, k, cache.layer(0))
    with pytest.raises(ShapeError, match="0 earlier tokens"):
        h3_attention.pv_matmul(torch.zeros(2, HEADS, 3, 4), v, cache.layer(0))
    with pytest.raises(ShapeError, match="query heads"):
        h3_attention.pv_matmul(torch.zeros(2, 3, 3, 3), v, cache.layer(0))


def test_a_full_cache_says_what_to_change_and_keeps_its_past(generator: torch.Generator) -> None:
    with make_cache(device_bytes=1 << 20, batch=1) as cache:
        for index in range(LAYERS):
            h3_attention.attend(*states(100, generator, batch=1), cache.layer(index))
        with pytest.raises(TierFullError, match=r"prefill_chunk_size.*device_bytes"):
            h3_attention.attend(*states(4000, generator, batch=1), cache.layer(0))
        for index in range(LAYERS):
            h3_attention.attend(*states(1, generator, batch=1), cache.layer(index))
        assert cache.tokens_B == (101,)
        cache.check_integrity()


def test_what_does_not_fit_is_named(cache: h3_kv_cache.KvCache, generator: torch.Generator) -> None:
    q, k, v = states(3, generator)
    layer = cache.layer(0)
    with pytest.raises(ShapeError, match="query heads"):
        h3_attention.attend(q[:, :3], k, v, layer)
    with pytest.raises(ShapeError, match=r"bfloat16.*create the cache"):
        h3_attention.attend(q, k.bfloat16(), v, layer)
    with pytest.raises(ShapeError, match=r"keys .* and values"):
        h3_attention.attend(q, k, v[:, :, :2], layer)
    with pytest.raises(ShapeError, match="queries of"):
        h3_attention.qk_matmul(q.bfloat16(), k, layer)
    with pytest.raises(RequestError, match="batch=1"):
        h3_attention.attend(q[:1], k[:1], v[:1], layer)
    with pytest.raises(RequestError, match="no_grad"):
        h3_attention.attend(q.requires_grad_(), k, v, layer)


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"layers": 0}, "layers"),
        ({"kv_heads": 0}, "kv_heads"),
        ({"head_dim": 15}, "head_dim"),
        ({"head_dim": 512}, "head_dim"),
        ({"dtype": torch.float64}, "dtype"),
        ({"batch": 0}, "batch"),
        ({"device_bytes": "many"}, "device_bytes"),
        ({"device_bytes": 1}, "device_bytes"),
    ],
)
def test_bad_settings_are_named(change: dict[str, object], field: str) -> None:
    settings: dict[str, object] = {"layers": 1, "kv_heads": 1, "head_dim": 16, "device_bytes": "1MiB"} | change
    with pytest.raises(ConfigError, match=field):
        h3_kv_cache.create(**settings)  # type: ignore[arg-type]  # wrong on purpose


def test_a_closed_cache_says_so(generator: torch.Generator) -> None:
    cache = make_cache()
    layer = cache.layer(0)
    cache.close()
    cache.close()
    with pytest.raises(TierClosedError, match="create another"):
        h3_attention.attend(*states(3, generator), layer)
