"""How likely a model finds a text, chunk by chunk through a KV cache.

Shapes: T tokens of a chunk, V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Final

import torch
from torch import Tensor

from h3kv.engine.sequence_kv import SequenceKv
from h3kv.models.decoder import Decoder
from h3kv.models.kernels import Kernels
from h3kv.models.loader import LoadedModel
from h3kv.models.native_kernels import NativeKernels
from h3kv.models.torch_kernels import TorchKernels
from h3kv.node import Node

ROWS: Final = 128
"""Rows of logits that are widened to fp64 at a time."""


def decoder_of(model: LoadedModel) -> Decoder:
    """A decoder of a model's weights, on the operators that a node takes."""
    is_cpu = model.weights.embedding_VI.device.type == "cpu"
    kernels: Kernels = NativeKernels() if is_cpu else TorchKernels()
    return Decoder(model.config, model.weights, kernels)


def window_loss(decoder: Decoder, node: Node, tokens: Sequence[int], *, chunk_tokens: int) -> float:
    """Sum of -log p of every token of a window but its first, in nats.

    The window is a sequence of its own in the node's pool, read as the engine reads a prompt.

    Args:
        decoder: of the node's model.
        node: whose pool holds the KV; no request runs in it.
        tokens: of the window. The last one is only scored, not read.
        chunk_tokens: read at a time.
    """
    kv = node.pool.open_private()
    try:
        return math.fsum(
            chunk_loss(decoder, node, kv, tokens, range(start, min(start + chunk_tokens, len(tokens) - 1)))
            for start in range(0, len(tokens) - 1, chunk_tokens)
        )
    finally:
        node.pool.close_sequence(kv, None, ())


def chunk_loss(decoder: Decoder, node: Node, kv: SequenceKv, tokens: Sequence[int], chunk: range) -> float:
    """Read a chunk, and score the token after each of its tokens."""
    node.pool.placer.tick()
    kv.prepare(len(chunk))
    ids_T = torch.tensor(tokens[chunk.start : chunk.stop], dtype=torch.int64)
    logits_TV = decoder.forward(ids_T, kv, logits="all")
    kv.settle(())
    next_T = torch.tensor(tokens[chunk.start + 1 : chunk.stop + 1], dtype=torch.int64)
    parts = (slice(row, row + ROWS) for row in range(0, len(chunk), ROWS))
    return math.fsum(_loss(logits_TV[part], next_T[part]) for part in parts)


def _loss(logits_TV: Tensor, next_T: Tensor) -> float:
    wide_TV = logits_TV.double()
    found_T = wide_TV.gather(1, next_T[:, None])[:, 0]
    return float((wide_TV.logsumexp(1) - found_T).sum())
