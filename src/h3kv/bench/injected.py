"""Keys and values for contexts that would take too long to read.

Shapes: T tokens, L layers, H query heads, K KV heads, D head dim, R = D / 2 rotated pairs.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from h3kv.bench.scoring import decoder_of
from h3kv.bench.tiered import open_resident
from h3kv.core.limits import SEGMENT_TOKENS_MAX
from h3kv.engine.sequence_kv import SequenceKv
from h3kv.models.config import ModelConfig
from h3kv.models.loader import LoadedModel
from h3kv.models.rope import Rotary

CHUNK_TOKENS = 1024


class KvSource(Protocol):
    """Gives the keys and values of any run of tokens."""

    def chunk(self, layer: int, start: int, tokens: int) -> tuple[Tensor, Tensor]:
        """Keys, rotated to their positions, and values, [T, K, D] each."""
        ...


class RandomKv:
    """Random numbers of the scale that norms leave: for the speed of steps that read everything whatever it is."""

    def __init__(self, model: LoadedModel) -> None:
        self._config = model.config
        self._dtype = model.weights.embedding_VI.dtype
        self._generator = torch.Generator().manual_seed(0)

    def chunk(self, layer: int, start: int, tokens: int) -> tuple[Tensor, Tensor]:  # noqa: ARG002  (all are alike)
        """See `KvSource`."""
        shape = (tokens, self._config.kv_heads, self._config.head_dim)
        k_TKD, v_TKD = (torch.randn(shape, generator=self._generator).to(self._dtype) for _ in range(2))
        return k_TKD, v_TKD


class TiledKv:
    """The keys and values of a text that was really read, over and over, each time with the right positions.

    A key at position p + s is the key at p, turned on by s positions.

    Args:
        model: reads the text.
        tokens: of the text; a multiple of every chunk that will be asked for.
    """

    def __init__(self, model: LoadedModel, tokens: Sequence[int]) -> None:
        config = model.config
        self._tokens = len(tokens)
        self._rotary = Rotary(
            head_dim=config.head_dim, theta=config.rope_theta, scaling=config.rope, device=torch.device("cpu")
        )
        with open_resident(model, context_tokens=len(tokens) + SEGMENT_TOKENS_MAX, chunk_tokens=CHUNK_TOKENS) as node:
            kv = node.pool.open_private()
            listener = _Listener(kv, config)
            decoder = decoder_of(model)
            for start in range(0, len(tokens), CHUNK_TOKENS):
                ids_T = torch.tensor(list(tokens[start : start + CHUNK_TOKENS]))
                kv.prepare(len(ids_T))
                decoder.forward(ids_T, listener, logits="none")
                kv.settle(())
            node.pool.close_sequence(kv, ())
        self._k_LTKD = [torch.cat(chunks) for chunks in listener.keys_L]
        self._v_LTKD = [torch.cat(chunks) for chunks in listener.values_L]

    def chunk(self, layer: int, start: int, tokens: int) -> tuple[Tensor, Tensor]:
        """See `KvSource`. A chunk lies within one copy of the text."""
        first = start % self._tokens
        assert first + tokens <= self._tokens, "a chunk lies within one copy of the text"
        rows = slice(first, first + tokens)
        return self._turned(self._k_LTKD[layer][rows], start - first), self._v_LTKD[layer][rows]

    def _turned(self, k_TKD: Tensor, positions: int) -> Tensor:
        if positions == 0:
            return k_TKD
        turn = self._rotary.rows(positions, 1)
        a_TKR, b_TKR = k_TKD.float().chunk(2, dim=-1)
        turned_TKD = torch.cat(
            [a_TKR * turn.cos_TR - b_TKR * turn.sin_TR, b_TKR * turn.cos_TR + a_TKR * turn.sin_TR], dim=-1
        )
        return turned_TKD.to(k_TKD.dtype)


class _Listener:
    """Satisfies `models.decoder.KvCache`: another one, and what went into it."""

    def __init__(self, kv: SequenceKv, config: ModelConfig) -> None:
        self._kv = kv
        self.keys_L: list[list[Tensor]] = [[] for _ in range(config.layers)]
        self.values_L: list[list[Tensor]] = [[] for _ in range(config.layers)]

    @property
    def tokens(self) -> int:
        """See `KvCache.tokens`."""
        return self._kv.tokens

    def attend(self, layer: int, q_QHD: Tensor, k_TKD: Tensor, v_TKD: Tensor, *, scale: float | None = None) -> Tensor:
        """See `KvCache.attend`."""
        self.keys_L[layer].append(k_TKD.clone())
        self.values_L[layer].append(v_TKD.clone())
        return self._kv.attend(layer, q_QHD, k_TKD, v_TKD, scale=scale)

    def advance(self, tokens: int) -> None:
        """See `KvCache.advance`."""
        self._kv.advance(tokens)
