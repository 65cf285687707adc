"""The numbers that define a decoder, and what they must satisfy, whatever file they came from."""

from __future__ import annotations

import dataclasses
import enum
from dataclasses import dataclass
from typing import Final

from h3kv.core.errors import ConfigError, ModelCorruptError, ModelUnsupportedError
from h3kv.core.limits import HEAD_DIM_MAX
from h3kv.models.kernels import HeadGeometry
from h3kv.models.rope import RopeKind, RopeScaling

HEAD_DIM_MIN: Final = 4
"""Two rotated pairs: NTK scaling keeps the first and stretches the last."""


class Family(enum.StrEnum):
    """Model families. They differ only in biases and query/key norms, which the config states apart."""

    LLAMA = "llama"
    MISTRAL = "mistral"
    QWEN2 = "qwen2"
    QWEN3 = "qwen3"


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """A decoder of the Llama family."""

    family: Family
    vocabulary_size: int
    hidden_size: int
    intermediate_size: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    norm_eps: float
    rope_theta: float
    rope: RopeScaling
    max_context: int
    """Positions that may be used, with the scaling in `rope`."""
    tied_embeddings: bool
    """The output projection is the embedding."""
    qkv_bias: bool
    output_bias: bool
    """Bias of attention's output projection."""
    mlp_bias: bool
    qk_norm: bool
    """Each query and key head is normalised before rotation."""

    @property
    def head_geometry(self) -> HeadGeometry:
        """How the fused projection divides into heads."""
        return HeadGeometry(self.heads, self.kv_heads, self.head_dim)

    @property
    def is_scaled(self) -> bool:
        """Positions are scaled already, so that they cannot be scaled again."""
        return self.rope.kind is not RopeKind.DEFAULT

    def with_context(self, rope: RopeScaling | None, max_context: int | None) -> ModelConfig:
        """This config with another static scaling, another limit of the context, or both.

        Args:
            rope: stretches the trained positions of a model without a scaling of its own by the factor.
            max_context: tokens; the default is all that the scaling reaches.

        Raises:
            ConfigError: `max_context` exceeds what the scaling reaches, or `rope` is for a model that brings its own.
        """
        is_within = max_context is None or 0 < max_context <= self.max_context
        if self.is_scaled and not (rope is None and is_within):
            raise ConfigError(
                f"the model brings its own rope scaling '{self.rope.kind}' to {self.max_context:,} tokens; it cannot "
                "be stretched further: give no other scaling, and a context within these",
                field="max_context" if rope is None else "rope",
            )
        config = self if rope is None else self._rescaled(rope)
        if max_context is None:
            return config
        if not 0 < max_context <= config.max_context:
            trained = self.rope.original_context or self.max_context
            raise ConfigError(
                f"a context of {max_context} tokens is not within 1..{config.max_context}, which the model reaches "
                f"with rope scaling '{config.rope.kind}'; lower it, or give a static scaling (yarn or ntk) "
                f"with factor >= {max(max_context / trained, 1.0):.4g}",
                field="max_context",
            )
        return dataclasses.replace(config, max_context=max_context)

    def _rescaled(self, rope: RopeScaling) -> ModelConfig:
        trained = rope.original_context or self.rope.original_context or self.max_context
        rope = dataclasses.replace(rope, original_context=trained)
        return dataclasses.replace(self, rope=rope, max_context=int(trained * rope.factor))


def check_config(config: ModelConfig, path: str) -> None:
    """Check that the numbers fit together and that this version can run them.

    Raises:
        ModelCorruptError: they contradict each other, or rotate nothing.
        ModelUnsupportedError: an odd, very small or very large head dimension.
    """
    if config.heads % config.kv_heads:
        raise ModelCorruptError(
            f"{config.heads} query heads do not divide among {config.kv_heads} KV heads in {path}; "
            "fetch the config again",
            path=path,
        )
    if config.head_dim % 2 or not HEAD_DIM_MIN <= config.head_dim <= HEAD_DIM_MAX:
        raise ModelUnsupportedError(
            f"head dimension {config.head_dim} in {path} is not supported: it must be even and from {HEAD_DIM_MIN} to "
            f"{HEAD_DIM_MAX}; choose another model",
            path=path,
        )
    if config.rope_theta <= 1.0:
        raise ModelCorruptError(
            f"rope_theta {config.rope_theta:g} in {path} does not exceed 1, so all positions look alike; "
            "fetch the config again",
            path=path,
        )
