"""A decoder of the Llama family: five operators and one attention per layer.

Shapes: T tokens of the chunk, H query heads, K KV heads, D head dim, I hidden features, V vocabulary.
"""

from __future__ import annotations

from typing import Literal, Protocol

import torch
from torch import Tensor
from torch.nn import functional

from h3kv.core.errors import ShapeError
from h3kv.models.config import ModelConfig
from h3kv.models.kernels import Kernels
from h3kv.models.rope import Rotary
from h3kv.models.weights import Weights


class KvCache(Protocol):
    """Keys and values of one sequence."""

    @property
    def tokens(self) -> int:
        """Tokens in the cache: the position of the next chunk's first token."""
        ...

    def attend(self, layer: int, q_THD: Tensor, k_TKD: Tensor, v_TKD: Tensor) -> Tensor:
        """Append the chunk's keys and values, then attend causally to everything, the chunk included.

        `q_THD` may hold fewer rows than `k_TKD`: those of the chunk's last tokens. The softmax is scaled by
        1/sqrt(D). Inputs have a contiguous last dimension, any other strides; they may be overwritten afterwards.

        Returns:
            [T, H, D] as `q_THD`, in its dtype, contiguous.
        """
        ...

    def advance(self, tokens: int) -> None:
        """End a chunk of so many tokens, after all layers saw it."""
        ...


class Decoder:
    """Runs chunks of one sequence at a time through the model. Holds no state of any sequence."""

    def __init__(self, config: ModelConfig, weights: Weights, kernels: Kernels) -> None:
        self.config = config
        self.weights = weights
        self._kernels = kernels
        self._rotary = Rotary(
            head_dim=config.head_dim,
            theta=config.rope_theta,
            scaling=config.rope,
            device=weights.embedding_VI.device,
        )

    @torch.inference_mode()
    def forward(self, token_ids_T: Tensor, cache: KvCache, *, logits: Literal["last", "all", "none"]) -> Tensor:
        """Logits of the chunk: fp32 [1, V] of its last token, [T, V] of all, or [0, V].

        Args:
            token_ids_T: int64 on the model's device, at least one token.
            cache: this sequence's cache. Grows by T tokens.
            logits: whose logits to compute. In the last layer only their rows pass through attention and MLP.

        Raises:
            ShapeError: the chunk is empty or not one-dimensional.
        """
        if token_ids_T.dim() != 1 or len(token_ids_T) == 0:
            raise ShapeError(f"a chunk is a vector of at least one token, not of shape {tuple(token_ids_T.shape)}")
        config, weights, kernels = self.config, self.weights, self._kernels
        tokens, wanted = len(token_ids_T), len(token_ids_T) if logits == "all" else 1
        rotary = self._rotary.rows(cache.tokens, tokens)
        x_TI = functional.embedding(token_ids_T, weights.embedding_VI)
        for index, layer in enumerate(weights.layers):
            rows = wanted if index == config.layers - 1 else tokens
            qkv_TE = kernels.norm_linear(x_TI, layer.attention_norm_I, config.norm_eps, layer.qkv)
            q_THD, k_TKD, v_TKD = kernels.rotate(qkv_TE, rotary, config.head_geometry, layer.qk_norms)
            attended_THD = cache.attend(index, q_THD[-rows:], k_TKD, v_TKD)
            x_TI = kernels.linear_add(attended_THD.flatten(1), layer.output, x_TI[-rows:])
            gated_TG = kernels.norm_gate_up(x_TI, layer.mlp_norm_I, config.norm_eps, layer.gate_up)
            x_TI = kernels.linear_add(gated_TG, layer.down, x_TI)
        cache.advance(tokens)
        if logits == "none":
            return torch.empty(0, config.vocabulary_size, dtype=torch.float32, device=x_TI.device)
        return kernels.logits(x_TI, weights.final_norm_I, config.norm_eps, weights.lm_head)
