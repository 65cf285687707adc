"""How likely a model finds a text, chunk by chunk through a KV cache.

Shapes: T tokens of a chunk, V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Final

import torch
from torch import Tensor

from h3kv.engine.pool import KvPool
from h3kv.models.choice import choose_kernels
from h3kv.models.decoder import Decoder
from h3kv.models.loader import LoadedModel

ROWS: Final = 128
"""Rows of logits that are widened to fp64 at a time."""


def decoder_of(model: LoadedModel) -> Decoder:
    """A decoder of a model's weights, on the operators that a node takes."""
    kernels = choose_kernels(model.weights.embedding_VI.device, model.config.head_dim)
    return Decoder(model.config, model.weights, kernels)


def window_loss(decoder: Decoder, pool: KvPool, tokens: Sequence[int], *, chunk_tokens: int) -> float:
    """Sum of -log p of every token of a window but its first, in nats.

    Args:
        decoder: its KV has the pool's layout.
        pool: holds the window's KV as that of a sequence of its own, read as the engine reads a prompt.
        tokens: of the window. The last one is only scored, not read.
        chunk_tokens: read at a time.
    """
    kv = pool.open_private()
    losses = []
    try:
        for start in range(0, len(tokens) - 1, chunk_tokens):
            end = min(start + chunk_tokens, len(tokens) - 1)
            pool.tick()
            kv.prepare(end - start)
            logits_TV = decoder.forward(torch.tensor(tokens[start:end]), kv, logits="all")
            kv.settle(())
            next_T = torch.tensor(tokens[start + 1 : end + 1])
            rows = (slice(row, row + ROWS) for row in range(0, end - start, ROWS))
            losses += [_loss(logits_TV[part], next_T[part]) for part in rows]
    finally:
        pool.close_sequence(kv, ())
    return math.fsum(losses)


def _loss(logits_TV: Tensor, next_T: Tensor) -> float:
    wide_TV = logits_TV.double()
    found_T = wide_TV.gather(1, next_T[:, None])[:, 0]
    return float((wide_TV.logsumexp(1) - found_T).sum())
