"""The simplest KV cache: everything in one tensor per layer, attention written out. The oracle for all others.

Shapes: T query tokens, S cached tokens, H query heads, K KV heads, D head dim.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor


class ContiguousCache:
    """Implements `h3kv.models.decoder.KvCache` in eager fp32. Time and memory grow with T x S."""

    def __init__(self, layers: int) -> None:
        self._keys_SKD: list[Tensor | None] = [None] * layers
        self._values_SKD: list[Tensor | None] = [None] * layers
        self._tokens = 0

    @property
    def tokens(self) -> int:
        """Tokens in the cache."""
        return self._tokens

    def attend(self, layer: int, q_THD: Tensor, k_TKD: Tensor, v_TKD: Tensor) -> Tensor:
        """Append the chunk's keys and values, then attend causally to everything, [T, H, D] as `q_THD`."""
        keys_SKD = self._keys_SKD[layer] = _append(self._keys_SKD[layer], k_TKD)
        values_SKD = self._values_SKD[layer] = _append(self._values_SKD[layer], v_TKD)
        return causal_attention(q_THD, keys_SKD, values_SKD)

    def advance(self, tokens: int) -> None:
        """End a chunk of so many tokens."""
        self._tokens += tokens
        self.check_integrity()

    def check_integrity(self) -> None:
        """Assert that every layer holds the same tokens."""
        for held_SKD in (*self._keys_SKD, *self._values_SKD):
            assert (0 if held_SKD is None else len(held_SKD)) == self._tokens


def causal_attention(q_THD: Tensor, keys_SKD: Tensor, values_SKD: Tensor) -> Tensor:
    """Softmax attention in fp32, [T, H, D] in the dtype of `q_THD`, whose rows are the last T of the S tokens."""
    tokens, cached, group = len(q_THD), len(keys_SKD), q_THD.shape[1] // keys_SKD.shape[1]
    keys_SHD = keys_SKD.float().repeat_interleave(group, dim=1)
    values_SHD = values_SKD.float().repeat_interleave(group, dim=1)
    scores_HTS = torch.einsum("thd,shd->hts", q_THD.float(), keys_SHD) / math.sqrt(q_THD.shape[-1])
    visible_TS = torch.ones(tokens, cached, dtype=torch.bool, device=q_THD.device).tril(cached - tokens)
    weights_HTS = scores_HTS.masked_fill(~visible_TS, -math.inf).softmax(dim=-1)
    return torch.einsum("hts,shd->thd", weights_HTS, values_SHD).to(q_THD.dtype)


def _append(held_SKD: Tensor | None, new_TKD: Tensor) -> Tensor:
    return new_TKD.clone() if held_SKD is None else torch.cat((held_SKD, new_TKD))
