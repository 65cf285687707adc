"""The model that quality is measured on: bf16 weights under fp32 arithmetic.

In bf16 arithmetic the residual stream keeps 8 bits: runs drift apart by a mean KL of 1e-3 wherever attention rounds
otherwise, however exact it is. In fp32 the same weights show what attention itself costs.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from h3kv.core.types import DType
from h3kv.models.kernels import Linear
from h3kv.models.loader import LoadedModel, load_model
from h3kv.models.weights import Weights


@torch.no_grad()
def load_rounded(source: str) -> LoadedModel:
    """A model in fp32 whose weights are those of bf16.

    Raises:
        ModelError: as `load_model`.
    """
    model = load_model(source, dtype=DType.FP32)
    for tensor in _tensors(model.weights):
        tensor.copy_(tensor.bfloat16())
    return model


def _tensors(weights: Weights) -> Iterator[Tensor]:
    """All of them; what two share comes twice."""
    yield weights.embedding_VI
    yield weights.final_norm_I
    yield from _linear(weights.lm_head)
    for layer in weights.layers:
        yield layer.attention_norm_I
        yield layer.mlp_norm_I
        if layer.qk_norms is not None:
            yield layer.qk_norms.q_D
            yield layer.qk_norms.k_D
        for linear in (layer.qkv, layer.output, layer.gate_up, layer.down):
            yield from _linear(linear)


def _linear(linear: Linear) -> Iterator[Tensor]:
    yield linear.weight
    if linear.bias is not None:
        yield linear.bias
