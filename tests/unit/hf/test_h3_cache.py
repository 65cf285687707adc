"""H3Cache in plain forwards, and everything that it refuses by name."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from tests.unit.hf.models import CACHE, SIZES, greedy, ids_of, model_of
from torch import Tensor
from transformers import (
    DynamicCache,
    Gemma2Config,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    Qwen2Config,
    T5Config,
)

from h3kv.core.errors import (
    ConfigError,
    ModelUnsupportedError,
    RequestError,
    ShapeError,
    TierClosedError,
    TierFullError,
)
from h3kv.core.types import Tier
from h3kv.hf import H3Cache, register
from h3kv.hf.attention import attention_forward


@pytest.fixture
def model() -> Any:
    return model_of("llama", "h3")


@pytest.fixture
def cache(model: Any) -> Iterator[H3Cache]:
    with H3Cache(model.config, device_bytes="16MiB") as cache:
        yield cache
        cache.check_integrity()


@torch.inference_mode()
def logits_of(model: Any, cache: Any, ids: Tensor, mask: Tensor | None = None, **arguments: Any) -> Tensor:
    logits: Tensor = model(ids, attention_mask=mask, **{CACHE: cache}, **arguments).logits
    return logits


def plain_logits(*chunks: Tensor, masks: list[Tensor] | None = None, **arguments: Any) -> list[Tensor]:
    model = model_of("llama", "sdpa")
    cache = DynamicCache(config=model.config)
    return [
        logits_of(model, cache, ids, None if masks is None else masks[index], **arguments)
        for index, ids in enumerate(chunks)
    ]


def test_padding_on_the_right_and_in_the_middle(model: Any, cache: H3Cache) -> None:
    ids = ids_of(90, 90)
    real = torch.ones_like(ids)
    real[0, 50:] = 0
    real[1, 3:70] = 0
    more, more_real = ids_of(4, 4, seed=8), torch.tensor([[1, 1, 0, 1], [1, 1, 1, 1]])
    masks = [real, torch.cat([real, more_real], dim=1)]
    expected = plain_logits(ids, more, masks=masks)
    for chunk, mask, wanted in zip((ids, more), masks, expected, strict=True):
        logits = logits_of(model, cache, chunk, mask)
        seen = mask[:, -chunk.shape[1] :].bool()
        torch.testing.assert_close(logits[seen], wanted[seen], atol=1e-4, rtol=0)
    assert cache.get_seq_length() == 94


def test_a_row_of_padding_alone_waits(model: Any, cache: H3Cache) -> None:
    ids = ids_of(70, 70)
    real = torch.ones_like(ids)
    real[1, :66] = 0
    position_ids = (real.cumsum(-1) - 1).clamp(min=0)
    expected = plain_logits(ids, masks=[real], position_ids=position_ids)[0]
    logits_of(model, cache, ids[:, :64], real[:, :64], position_ids=position_ids[:, :64])
    logits = logits_of(model, cache, ids[:, 64:], real, position_ids=position_ids[:, 64:])
    seen = real[:, 64:].bool()
    torch.testing.assert_close(logits[seen], expected[:, 64:][seen], atol=1e-4, rtol=0)


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.bfloat16, 0.15), (torch.float16, 0.02)])
def test_half_precision_is_as_near_as_the_models_own(dtype: torch.dtype, tolerance: float) -> None:
    exact = plain_logits(ids_of(130))[0]
    model = model_of("llama", "h3", dtype)
    with H3Cache(model.config, dtype=dtype, device_bytes="16MiB") as cache:
        logits = logits_of(model, cache, ids_of(130))
    assert logits.dtype == dtype
    assert (logits.float() - exact).square().mean().sqrt() < tolerance * exact.square().mean().sqrt()


def test_head_dimensions_without_native_kernels() -> None:
    config = LlamaConfig(**(SIZES | {"hidden_size": 96}), attn_implementation="h3")
    model = LlamaForCausalLM(config).eval()
    with H3Cache(config, device_bytes="16MiB") as cache:
        logits = logits_of(model, cache, ids_of(70))
    model.set_attn_implementation("sdpa")
    torch.testing.assert_close(logits, logits_of(model, DynamicCache(config=config), ids_of(70)), atol=1e-4, rtol=0)


def test_the_past_never_comes_back_as_a_tensor(cache: H3Cache) -> None:
    k = torch.zeros(1, 2, 5, 16)
    states, same = cache.update(k, k, 0)
    assert states is same
    with pytest.raises(ConfigError, match="set_attn_implementation"):
        states + 1
    with pytest.raises(ConfigError):
        _ = states.shape
    assert cache.get_seq_length() == 0


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_another_attention_is_refused(cache: H3Cache, attention: str) -> None:
    with pytest.raises(ConfigError, match=r"set_attn_implementation\(\"h3\"\)"):
        greedy(model_of("llama", attention), ids_of(9), cache, tokens=2)


@pytest.mark.parametrize("use_cache", [True, False])
def test_the_attention_without_the_cache_is_refused(model: Any, use_cache: bool) -> None:
    with pytest.raises(ConfigError, match="past_key_values=H3Cache"), torch.inference_mode():
        model(ids_of(9), use_cache=use_cache)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"num_beams": 2}, "num_beams=1"),
        ({"prompt_lookup_num_tokens": 3}, "assisted"),
        ({"assistant_model": "itself"}, "assisted"),
    ],
)
def test_ways_to_generate_that_change_the_past_are_refused(
    model: Any, cache: H3Cache, arguments: dict[str, Any], message: str
) -> None:
    if "assistant_model" in arguments:
        arguments = {"assistant_model": model_of("llama", "sdpa")}
    with pytest.raises(RequestError, match=message):
        greedy(model, ids_of(20), cache, tokens=4, **arguments)


def test_changes_of_the_past_are_refused(model: Any, cache: H3Cache) -> None:
    logits_of(model, cache, ids_of(9))
    for change, message in [
        (lambda: cache.crop(-1), "take tokens back"),
        (lambda: cache.reorder_cache(torch.tensor([0])), "num_beams=1"),
        (lambda: cache.batch_repeat_interleave(2), "repeat its rows 2 times"),
        (lambda: cache.batch_select_indices(torch.tensor([0])), "keep 1 of its rows"),
        (cache.layers[0].reset, "forget one layer"),
        (lambda: cache.layers[0].update(None, None), "update of the H3Cache"),
        (cache.layers[0].offload, "caps"),
        (cache.layers[0].prefetch, "caps"),
        (lambda: copy.deepcopy(cache), "cannot be copied"),
        (cache.activate_past_recording, "assisted"),
    ]:
        with pytest.raises(RequestError, match=message):
            change()
    cache.crop(0)
    assert cache.get_seq_length() == 9
    assert not cache.is_croppable
    assert not cache.is_compileable
    assert cache.is_sliding == [False, False]
    assert cache.get_max_length() == -1


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (MistralConfig(), "sliding_window = 4096"),
        (Gemma2Config(), "sliding_attention"),
        (Qwen2Config(use_sliding_window=True, max_window_layers=1, num_hidden_layers=2), "sliding_attention"),
        (T5Config(), "encoder"),
    ],
)
def test_other_kinds_of_models_are_refused(config: Any, message: str) -> None:
    with pytest.raises(ModelUnsupportedError, match=message):
        H3Cache(config, device_bytes="16MiB")


@pytest.mark.parametrize(
    ("argument", "message"),
    [
        ({"softcap": 30.0}, "capped"),
        ({"s_aux": torch.zeros(4)}, "sinks"),
        ({"dropout": 0.1}, "eval"),
        ({"sliding_window": 8}, "sliding"),
        ({"is_causal": False}, "causal"),
    ],
)
def test_attention_of_another_kind_is_refused(
    model: Any, cache: H3Cache, argument: dict[str, Any], message: str
) -> None:
    k = torch.zeros(1, 2, 5, 16)
    states, _ = cache.update(k, k, 0)
    with pytest.raises(RequestError, match=message):
        attention_forward(model, torch.zeros(1, 4, 5, 16), states, states, None, **argument)


def test_a_scale_is_passed_through(cache: H3Cache) -> None:
    generator = torch.Generator().manual_seed(2)
    q, k, v = (torch.randn(1, heads, 70, 16, generator=generator) for heads in (4, 2, 2))
    states, _ = cache.update(k, v, 0)
    out, weights = attention_forward(torch.nn.Module(), q, states, states, scaling=0.5, is_causal=None)
    expected = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, scale=0.5, enable_gqa=True)
    assert weights is None
    torch.testing.assert_close(out, expected.transpose(1, 2), atol=1e-5, rtol=0)
    cache.discard_step()


def test_masks_that_do_not_fit_are_refused(model: Any, cache: H3Cache) -> None:
    ids, real = ids_of(12, 12), torch.ones(2, 12, dtype=torch.long)
    real[0, :3] = 0
    with pytest.raises(RequestError, match="4 dimensions"):
        logits_of(model, cache, ids, torch.zeros(2, 1, 12, 12))
    with pytest.raises(RequestError, match=r"attention_mask \(2, 11\)"):
        logits_of(model, cache, ids, real[:, :11])
    logits_of(model, cache, ids, real)
    with pytest.raises(RequestError, match="of all 13 tokens"):
        logits_of(model, cache, ids[:, :1])
    with pytest.raises(RequestError, match="differs"):
        logits_of(model, cache, ids[:, :1], torch.ones(2, 13, dtype=torch.long))
    with pytest.raises(RequestError, match="1 rows for an H3Cache of 2"):
        logits_of(model, cache, ids[:1, :1], torch.ones(1, 13, dtype=torch.long))


def test_a_mask_of_ones_is_no_padding(model: Any, cache: H3Cache) -> None:
    expected = plain_logits(ids_of(30), ids_of(3))
    ones = torch.ones(1, 36, dtype=torch.long)
    logits_of(model, cache, ids_of(30), ones[:, :30])
    torch.testing.assert_close(logits_of(model, cache, ids_of(3)), expected[1], atol=1e-4, rtol=0)
    logits_of(model, cache, ids_of(3), ones)


def test_a_batch_may_be_large_where_the_device_holds_it(model: Any, cache: H3Cache) -> None:
    ids = torch.cat([ids_of(20, seed=seed) for seed in range(12)])
    torch.testing.assert_close(logits_of(model, cache, ids), plain_logits(ids)[0], atol=1e-4, rtol=0)


def test_training_is_refused(model: Any, cache: H3Cache) -> None:
    with pytest.raises(RequestError, match="no_grad"):
        model(ids_of(9), **{CACHE: cache})
    assert cache.get_seq_length() == 0


def test_a_chunk_beyond_the_cap_says_what_to_change_and_leaves_the_past(model: Any) -> None:
    with H3Cache(model.config, device_bytes="1MiB") as cache:
        expected = plain_logits(ids_of(30), ids_of(3))
        logits_of(model, cache, ids_of(30))
        with pytest.raises(TierFullError, match=r"prefill_chunk_size.*device_bytes"):
            logits_of(model, cache, ids_of(4000))
        torch.testing.assert_close(logits_of(model, cache, ids_of(3)), expected[1], atol=1e-4, rtol=0)
        cache.check_integrity()


def test_a_forward_cut_short_is_noticed_and_can_be_discarded(model: Any, cache: H3Cache) -> None:
    def fail(*_: object) -> None:
        raise KeyboardInterrupt

    expected = plain_logits(ids_of(30), ids_of(3))
    logits_of(model, cache, ids_of(30))
    hook = model.model.layers[1].register_forward_pre_hook(fail)
    with pytest.raises(KeyboardInterrupt):
        logits_of(model, cache, ids_of(50))
    hook.remove()
    with pytest.raises(RequestError, match="discard_step"):
        logits_of(model, cache, ids_of(3))
    cache.discard_step()
    torch.testing.assert_close(logits_of(model, cache, ids_of(3)), expected[1], atol=1e-4, rtol=0)


def test_reset_begins_again_with_another_batch(model: Any, cache: H3Cache) -> None:
    logits_of(model, cache, ids_of(80, 80, 80))
    assert cache.batch_size in {-1, 3}
    cache.reset()
    assert cache.get_seq_length() == 0
    assert cache.statistics()[Tier.DEVICE].used_bytes == 0
    torch.testing.assert_close(logits_of(model, cache, ids_of(9)), plain_logits(ids_of(9))[0], atol=1e-4, rtol=0)


def test_the_model_must_be_the_caches(model: Any) -> None:
    other = H3Cache(model.config, dtype=torch.bfloat16, device_bytes="16MiB")
    with other, pytest.raises(ShapeError, match="own config, dtype and device"):
        logits_of(model, other, ids_of(9))
    with pytest.raises(ConfigError, match="dtype"):
        H3Cache(model.config, dtype=torch.float64, device_bytes="16MiB")


def test_a_closed_cache_says_so(model: Any) -> None:
    cache = H3Cache(model.config, device_bytes="16MiB")
    cache.close()
    cache.close()
    with pytest.raises(TierClosedError):
        logits_of(model, cache, ids_of(9))


def test_a_closed_cache_that_held_tokens_says_so_too(model: Any) -> None:
    cache = H3Cache(model.config, device_bytes="16MiB")
    logits_of(model, cache, ids_of(9))
    cache.close()
    with pytest.raises(TierClosedError, match="create another"):
        logits_of(model, cache, ids_of(3))


def test_registering_again_changes_nothing(model: Any, cache: H3Cache) -> None:
    register()
    torch.testing.assert_close(logits_of(model, cache, ids_of(5)), plain_logits(ids_of(5))[0], atol=1e-4, rtol=0)
