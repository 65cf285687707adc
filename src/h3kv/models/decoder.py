"""A decoder of the Llama family: five operators and one attention per layer.

    chunk     T tokens of one sequence        in steps between which the caller may do something else
    decode    one token of each of B sequences, in one pass over the weights

Shapes: T tokens of the chunk, B sequences, H query heads, K KV heads, D head dim, I hidden features, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from typing import Literal, Protocol, TypeVar

import torch
from torch import Tensor
from torch.nn import functional

from h3kv.core.errors import ShapeError
from h3kv.models.config import ModelConfig
from h3kv.models.kernels import Kernels
from h3kv.models.rope import Rotary
from h3kv.models.weights import LayerWeights, Weights

ResultT = TypeVar("ResultT")


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


class SteppedKvCache(KvCache, Protocol):
    """One whose attention over a long chunk can be interrupted."""

    def attend_steps(self, layer: int, q_THD: Tensor, k_TKD: Tensor, v_TKD: Tensor) -> Generator[None, None, Tensor]:
        """As `attend`, with the same result, in steps."""
        ...


class TokenBatch(Protocol):
    """The next token of each of several sequences."""

    @property
    def positions(self) -> Sequence[int]:
        """Of the tokens, each in its sequence."""
        ...

    def attend(self, layer: int, q_BHD: Tensor, k_BKD: Tensor, v_BKD: Tensor) -> Tensor:
        """Append each token's key and value to its sequence, then attend to all of that: [B, H, D], as `KvCache`."""
        ...

    def advance(self) -> None:
        """End the tokens, after all layers saw them."""
        ...


class _Unstepped:
    """A cache whose attention is one step."""

    def __init__(self, cache: KvCache) -> None:
        self._cache = cache
        self.attend = cache.attend
        self.advance = cache.advance

    @property
    def tokens(self) -> int:
        return self._cache.tokens

    def attend_steps(self, layer: int, q_THD: Tensor, k_TKD: Tensor, v_TKD: Tensor) -> Generator[None, None, Tensor]:
        yield from ()
        return self._cache.attend(layer, q_THD, k_TKD, v_TKD)


class Decoder:
    """Runs tokens through the model. Holds no state of any sequence."""

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

    def forward(self, token_ids_T: Tensor, cache: KvCache, *, logits: Literal["last", "all", "none"]) -> Tensor:
        """As `steps`, all of them."""
        return run(self.steps(token_ids_T, _Unstepped(cache), logits=logits))

    @torch.inference_mode()
    def steps(
        self, token_ids_T: Tensor, cache: SteppedKvCache, *, logits: Literal["last", "all", "none"]
    ) -> Generator[None, None, Tensor]:
        """Logits of the chunk: fp32 [1, V] of its last token, [T, V] of all, or [0, V].

        Args:
            token_ids_T: int64 on the model's device, at least one token.
            cache: this sequence's cache. Grows by T tokens.
            logits: whose logits to compute. In the last layer only their rows pass through attention and MLP.

        Yields:
            Between layers, and within their attention: the caller may go on later, or never. Until then the cache does
            not count these tokens.

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
            attended_THD = yield from cache.attend_steps(index, q_THD[-rows:], k_TKD, v_TKD)
            x_TI = self._mix(attended_THD, x_TI[-rows:], layer)
            yield
        if logits == "none":
            scores_TV = torch.empty(0, config.vocabulary_size, dtype=torch.float32, device=x_TI.device)
        else:
            scores_TV = kernels.logits(x_TI, weights.final_norm_I, config.norm_eps, weights.lm_head)
        cache.advance(tokens)
        return scores_TV

    @torch.inference_mode()
    def decode(self, token_ids_B: Tensor, batch: TokenBatch) -> Tensor:
        """Logits of one more token of each sequence: fp32 [B, V].

        With native kernels each row is the same, bit for bit, whatever other rows there are.

        Args:
            token_ids_B: int64 on the model's device, one for each sequence of the batch, at least one.
            batch: their caches. Each grows by one token.
        """
        config, weights, kernels = self.config, self.weights, self._kernels
        rotary = self._rotary.rows_at(batch.positions)
        x_BI = functional.embedding(token_ids_B, weights.embedding_VI)
        for index, layer in enumerate(weights.layers):
            qkv_BE = kernels.norm_linear(x_BI, layer.attention_norm_I, config.norm_eps, layer.qkv)
            q_BHD, k_BKD, v_BKD = kernels.rotate(qkv_BE, rotary, config.head_geometry, layer.qk_norms)
            x_BI = self._mix(batch.attend(index, q_BHD, k_BKD, v_BKD), x_BI, layer)
        scores_BV = kernels.logits(x_BI, weights.final_norm_I, config.norm_eps, weights.lm_head)
        # Last of all: whatever went wrong before, the tokens may be computed again.
        batch.advance()
        return scores_BV

    def _mix(self, attended_THD: Tensor, x_TI: Tensor, layer: LayerWeights) -> Tensor:
        """What a layer does with its attention."""
        kernels = self._kernels
        x_TI = kernels.linear_add(attended_THD.flatten(1), layer.output, x_TI)
        gated_TG = kernels.norm_gate_up(x_TI, layer.mlp_norm_I, self.config.norm_eps, layer.gate_up)
        return kernels.linear_add(gated_TG, layer.down, x_TI)


def run(steps: Generator[None, None, ResultT]) -> ResultT:
    """What steps come to, all of them taken."""
    while True:
        try:
            next(steps)
        except StopIteration as end:
            result: ResultT = end.value
            return result
