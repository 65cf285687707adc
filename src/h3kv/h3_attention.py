"""Attention over an `h3kv.h3_kv_cache`: the products of a plain attention, taken over all tiers.

Recommended, since nothing but the result is ever held:

    out = h3_attention.attend(q, k, v, cache.layer(index))

Or product by product, for code that works with the scores themselves, which take B x H x T x S numbers:

    scores = h3_attention.qk_matmul(q, k, cache.layer(index))    # before: q @ cat(past k, k).transpose(-2, -1)
    p = (scores * scale + causal mask).softmax(-1)
    out = h3_attention.pv_matmul(p, v, cache.layer(index))       # before: p @ cat(past v, v)

Keys and values are kept once per layer and step. Keys come with their positions applied (rope). For inference only.

Shapes: B rows of the batch, T new tokens, S all tokens, C tokens of a run, H query heads, K KV heads, G = H / K, D head
dim.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from h3kv.attention.native import TORCH_DTYPES
from h3kv.attention.token_rows import read_keys, read_values
from h3kv.attention.torch_pages import RUN_PAGES_MAX
from h3kv.core.errors import RequestError, ShapeError
from h3kv.h3_kv_cache import KvLayer


def attend(q_BHTD: Tensor, k_BKTD: Tensor, v_BKTD: Tensor, layer: KvLayer, *, scale: float | None = None) -> Tensor:
    """Causal softmax attention of the new tokens to all tokens, [B, H, T, D] as `q_BHTD`. Keeps keys and values.

    Args:
        q_BHTD: queries of the new tokens.
        k_BKTD, v_BKTD: their keys and values, in the cache's dtype.
        layer: of the cache.
        scale: of the scores, above 0; 1 / sqrt(D) where None.

    Raises:
        ShapeError: shapes, types or devices disagree with each other or the cache.
        RequestError: a layer out of order, a batch of another size, or gradients are asked for.
        TierFullError: the tokens do not fit the caps.

    Cost: reads each page of the past once, wherever it lies; memory for the result only.
    """
    _check_queries(q_BHTD, k_BKTD, layer)
    _check_states(k_BKTD, layer)
    _check_states(v_BKTD, layer)
    _check_same(k_BKTD, v_BKTD)
    cache = layer.cache
    cache.begin(layer.index, [k_BKTD.shape[2]] * len(k_BKTD))
    rows_THD = [
        cache.attend_row(
            q_BHTD[row].transpose(0, 1),
            k_BKTD[row].transpose(0, 1),
            v_BKTD[row].transpose(0, 1),
            row=row,
            layer=layer.index,
            scale=scale,
        )
        for row in range(cache.batch)
    ]
    cache.end(layer.index)
    return torch.stack(rows_THD).transpose(1, 2)


def qk_matmul(q_BHTD: Tensor, k_BKTD: Tensor, layer: KvLayer) -> Tensor:
    """Products of the queries with the keys of all tokens in token order, [B, H, T, S]: neither scaled nor masked.

    The new tokens are the last T of S. Their keys wait for `pv_matmul`, which keeps them with their values;
    called again before that, they are replaced.

    Args:
        q_BHTD: queries of the new tokens, in the cache's dtype.
        k_BKTD: their keys, the same.
        layer: of the cache.

    Raises:
        ShapeError, RequestError, TierFullError: as `attend`.

    Cost: reads the keys of the past run by run; memory for the scores and one run.
    """
    _check_queries(q_BHTD, k_BKTD, layer)
    _check_states(k_BKTD, layer)
    if q_BHTD.dtype != k_BKTD.dtype:
        raise ShapeError(f"queries of {q_BHTD.dtype} with keys of {k_BKTD.dtype}")
    cache = layer.cache
    cache.stage(layer.index, k_BKTD)
    batch, heads, tokens = q_BHTD.shape[:3]
    past = max(cache.tokens_B)
    scores_BHTS = q_BHTD.new_empty(batch, heads, tokens, past + tokens)
    for row in range(batch):
        start = 0
        for pages_KN in _runs(layer, row):
            keys_CKD = read_keys(pages_KN, cache.layout.slab.page)
            end = start + len(keys_CKD)
            scores_BHTS[row, ..., start:end] = _times_keys(q_BHTD[row], keys_CKD.transpose(0, 1))
            start = end
        assert start == past, "the pages do not hold all tokens of the past"
        scores_BHTS[row, ..., past:] = _times_keys(q_BHTD[row], k_BKTD[row])
    return scores_BHTS


def pv_matmul(p_BHTS: Tensor, v_BKTD: Tensor, layer: KvLayer) -> Tensor:
    """Values of all tokens, weighted: [B, H, T, D] as `p_BHTS`, summed in fp32. Ends the layer's part of the step.

    Args:
        p_BHTS: weights of all tokens in token order, as `qk_matmul` gave their scores.
        v_BKTD: values of the new tokens, in the cache's dtype. Kept, together with the keys of `qk_matmul`.
        layer: of the cache.

    Raises:
        ShapeError: as `attend`, or the weights are of another number of tokens.
        RequestError: no `qk_matmul` of this layer came before.

    Cost: reads the values of the past run by run; memory for the result and one run.
    """
    _check_states(v_BKTD, layer)
    cache = layer.cache
    k_BKTD = cache.staged_keys(layer.index)
    _check_same(k_BKTD, v_BKTD)
    batch, kv_heads, tokens, head_dim = v_BKTD.shape
    past = max(cache.tokens_B)
    if p_BHTS.ndim != 4 or p_BHTS.shape[0] != batch or p_BHTS.shape[2:] != (tokens, past + tokens):
        raise ShapeError(f"weights {tuple(p_BHTS.shape)} for {batch} rows of {tokens} new and {past} earlier tokens")
    if p_BHTS.shape[1] % kv_heads:
        raise ShapeError(f"weights of {p_BHTS.shape[1]} query heads over {kv_heads} KV heads")
    out_BHTD = p_BHTS.new_empty(*p_BHTS.shape[:3], head_dim)
    for row, p_HTS in enumerate(p_BHTS):
        sum_HTD = _times_values(p_HTS[..., past:], v_BKTD[row])
        start = 0
        for pages_KN in _runs(layer, row):
            values_CKD = read_values(pages_KN, cache.layout.slab.page)
            end = start + len(values_CKD)
            sum_HTD += _times_values(p_HTS[..., start:end], values_CKD.transpose(0, 1))
            start = end
        assert start == past, "the pages do not hold all tokens of the past"
        out_BHTD[row] = sum_HTD
        cache.append_row(k_BKTD[row].transpose(0, 1), v_BKTD[row].transpose(0, 1), row=row, layer=layer.index)
    cache.end(layer.index)
    return out_BHTD


def _runs(layer: KvLayer, row: int) -> Iterator[NDArray[np.void]]:
    """Page lists of the past in token order, none longer than a run."""
    for pages_KN in layer.cache.pages(row=row, layer=layer.index):
        for start in range(0, pages_KN.shape[1], RUN_PAGES_MAX):
            yield pages_KN[:, start : start + RUN_PAGES_MAX]


def _times_keys(q_HTD: Tensor, k_KCD: Tensor) -> Tensor:
    """Scores [H, T, C] of queries over the keys of some tokens."""
    q_KGTD = q_HTD.reshape(len(k_KCD), -1, *q_HTD.shape[1:])
    return (q_KGTD @ k_KCD[:, None].transpose(-2, -1)).flatten(0, 1)


def _times_values(p_HTC: Tensor, v_KCD: Tensor) -> Tensor:
    """Weighted sums [H, T, D] in fp32 over the values of some tokens."""
    p_KGTC = p_HTC.float().reshape(len(v_KCD), -1, *p_HTC.shape[1:])
    return (p_KGTC @ v_KCD[:, None].float()).flatten(0, 1)


def _check_queries(q_BHTD: Tensor, k_BKTD: Tensor, layer: KvLayer) -> None:
    slab = layer.cache.layout.slab
    is_equal = q_BHTD.ndim == k_BKTD.ndim == 4 and q_BHTD.shape[0::2] == k_BKTD.shape[0::2]
    if not is_equal or q_BHTD.shape[3] != slab.page.head_dim or q_BHTD.shape[1] % slab.kv_heads:
        raise ShapeError(
            f"queries {tuple(q_BHTD.shape)} and keys {tuple(k_BKTD.shape)} for {slab.kv_heads} KV heads of "
            f"{slab.page.head_dim}: expected [batch, query heads, tokens, head dim] and [batch, KV heads, tokens, head "
            "dim]"
        )
    if q_BHTD.device != k_BKTD.device:
        raise ShapeError(f"queries on {q_BHTD.device} and keys on {k_BKTD.device}")
    if torch.is_grad_enabled() and (q_BHTD.requires_grad or k_BKTD.requires_grad):
        raise RequestError("this cache is for inference: compute under torch.inference_mode() or torch.no_grad()")


def _check_states(x_BKTD: Tensor, layer: KvLayer) -> None:
    """Keys or values as the cache keeps them."""
    slab = layer.cache.layout.slab
    dtype = TORCH_DTYPES[slab.page.dtype]
    is_shaped = x_BKTD.ndim == 4 and x_BKTD.shape[1] == slab.kv_heads and x_BKTD.shape[3] == slab.page.head_dim
    if not is_shaped or x_BKTD.shape[2] == 0 or x_BKTD.dtype != dtype or x_BKTD.device != layer.cache.device:
        raise ShapeError(
            f"keys or values {tuple(x_BKTD.shape)} {x_BKTD.dtype} on {x_BKTD.device} for a cache of "
            f"[{layer.cache.batch}, {slab.kv_heads}, 1 or more, {slab.page.head_dim}] {dtype} on {layer.cache.device}: "
            "create the cache for them"
        )


def _check_same(k_BKTD: Tensor, v_BKTD: Tensor) -> None:
    if k_BKTD.shape != v_BKTD.shape:
        raise ShapeError(f"keys {tuple(k_BKTD.shape)} and values {tuple(v_BKTD.shape)}")
