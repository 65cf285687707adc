import torch
from torch.nn import functional

from h3kv.testing.contiguous_cache import ContiguousCache, causal_attention


def qkv(tokens: int, *, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return tuple(torch.randn(tokens, heads, 8, generator=generator) for heads in (4, 2, 2))


def test_attention_equals_that_of_torch() -> None:
    q_THD, k_TKD, v_TKD = qkv(17)
    expected_HTD = functional.scaled_dot_product_attention(
        q_THD.transpose(0, 1), k_TKD.transpose(0, 1), v_TKD.transpose(0, 1), is_causal=True, enable_gqa=True
    )
    torch.testing.assert_close(causal_attention(q_THD, k_TKD, v_TKD), expected_HTD.transpose(0, 1))


def test_chunks_attend_as_the_whole_does() -> None:
    q_THD, k_TKD, v_TKD = qkv(17)
    cache, outs = ContiguousCache(1), []
    for first, last in ((0, 1), (1, 9), (9, 17)):
        outs.append(cache.attend(0, q_THD[first:last], k_TKD[first:last], v_TKD[first:last]))
        cache.advance(last - first)
    torch.testing.assert_close(torch.cat(outs), causal_attention(q_THD, k_TKD, v_TKD))
    assert cache.tokens == 17


def test_fewer_queries_are_those_of_the_last_tokens() -> None:
    q_THD, k_TKD, v_TKD = qkv(17)
    out_2HD = ContiguousCache(1).attend(0, q_THD[-2:], k_TKD, v_TKD)
    torch.testing.assert_close(out_2HD, causal_attention(q_THD, k_TKD, v_TKD)[-2:])


def test_cache_keeps_copies_of_what_it_was_given() -> None:
    q_THD, k_TKD, v_TKD = qkv(3)
    cache = ContiguousCache(1)
    expected_THD = cache.attend(0, q_THD, k_TKD, v_TKD)
    cache.advance(3)
    k_TKD.zero_()
    again_1HD = cache.attend(0, q_THD[-1:], k_TKD[:0], v_TKD[:0])
    torch.testing.assert_close(again_1HD, expected_THD[-1:])
