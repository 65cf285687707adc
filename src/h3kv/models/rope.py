"""Rotary position embedding with static scaling.

Scaling is plain data and never depends on the length of a sequence, so keys that were cached once stay true.

Shapes: T tokens, D head dim, R = D/2 rotated pairs.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

from h3kv.core.errors import ConfigError

FACTOR_MAX: Final = 1 << 24
"""Positions are fp32 when they are rotated: beyond 2^24 neighbours fall together."""


class RopeKind(enum.StrEnum):
    """How frequencies are changed to reach further than the model was trained for."""

    DEFAULT = "default"
    LINEAR = "linear"
    LLAMA3 = "llama3"
    YARN = "yarn"
    NTK = "ntk"


@dataclass(frozen=True, slots=True)
class RopeScaling:
    """One static scaling. Fields that a kind does not use keep their defaults."""

    kind: RopeKind = RopeKind.DEFAULT
    factor: float = 1.0
    """How many times longer the context becomes. All kinds but default."""
    original_context: int | None = None
    """Positions the model was trained for. llama3, yarn. None in an override: the model's own number."""
    low_freq_factor: float = 1.0
    """llama3: wavelengths above `original_context / low_freq_factor` are divided by `factor`."""
    high_freq_factor: float = 4.0
    """llama3: wavelengths below `original_context / high_freq_factor` stay as they are."""
    beta_fast: float = 32.0
    """yarn: dimensions that turn more often than this over the original context stay as they are."""
    beta_slow: float = 1.0
    """yarn: dimensions that turn less often than this are divided by `factor`."""
    attention_factor: float | None = None
    """yarn: multiplies cos and sin. None: 0.1 ln(factor) + 1."""
    truncate: bool = True
    """yarn: round the ramp's ends to whole dimensions."""

    def __post_init__(self) -> None:
        """Check the numbers.

        Raises:
            ConfigError: a number is out of range; the message states the rule.
        """
        if not 1.0 <= self.factor <= FACTOR_MAX:
            raise ConfigError(f"rope factor {self.factor} is not a number from 1 to {FACTOR_MAX}", field="rope.factor")
        if self.original_context is not None and self.original_context <= 0:
            raise ConfigError("rope original_context must be a positive token count", field="rope.original_context")
        if self.high_freq_factor <= self.low_freq_factor:
            raise ConfigError("rope high_freq_factor must exceed low_freq_factor", field="rope.high_freq_factor")
        if self.beta_fast <= self.beta_slow:
            raise ConfigError("rope beta_fast must exceed beta_slow", field="rope.beta_fast")


@dataclass(frozen=True, slots=True)
class RotaryRows:
    """Cosines and sines for the tokens of one chunk."""

    cos_TR: Tensor
    """fp32, contiguous; the attention factor of YaRN is multiplied in."""
    sin_TR: Tensor
    """As `cos_TR`."""


class Rotary:
    """Rows of cosines and sines for any positions, computed when asked for.

    Angles are products of an fp32 position and an fp32 frequency, as in transformers.
    """

    def __init__(self, *, head_dim: int, theta: float, scaling: RopeScaling, device: torch.device) -> None:
        frequencies_R, self._amplitude = inverse_frequencies(head_dim, theta, scaling)
        self._frequencies_R = frequencies_R.to(device)

    def rows(self, start: int, tokens: int) -> RotaryRows:
        """Rows for the positions `start .. start + tokens - 1`, on the device given at construction."""
        return self.rows_at(range(start, start + tokens))

    def rows_at(self, positions: Sequence[int]) -> RotaryRows:
        """Rows for any positions, one for each, in order."""
        if isinstance(positions, range):
            positions_T = torch.arange(positions.start, positions.stop, dtype=torch.float32)
        else:
            positions_T = torch.tensor(positions, dtype=torch.float32)
        positions_T = positions_T.to(self._frequencies_R.device)
        angles_TR = torch.outer(positions_T, self._frequencies_R)
        return RotaryRows(angles_TR.cos().mul_(self._amplitude), angles_TR.sin().mul_(self._amplitude))


def inverse_frequencies(head_dim: int, theta: float, scaling: RopeScaling) -> tuple[Tensor, float]:
    """Radians per position of each rotated pair, [R] fp32 on the CPU, and the factor on cos and sin.

    Raises:
        ConfigError: llama3 or yarn without `original_context`.
    """
    match scaling.kind:
        case RopeKind.DEFAULT:
            return _plain(head_dim, theta), 1.0
        case RopeKind.LINEAR:
            return _plain(head_dim, theta) / scaling.factor, 1.0
        case RopeKind.NTK:
            return _plain(head_dim, ntk_theta(head_dim, theta, scaling.factor)), 1.0
        case RopeKind.LLAMA3:
            return _llama3(_plain(head_dim, theta), scaling), 1.0
        case RopeKind.YARN:
            return _yarn(_plain(head_dim, theta), theta, scaling), _yarn_amplitude(scaling)


def ntk_theta(head_dim: int, theta: float, factor: float) -> float:
    """The base that stretches the slowest pair by `factor` and leaves the fastest alone."""
    return float(theta * factor ** (head_dim / (head_dim - 2)))


def _plain(head_dim: int, theta: float) -> Tensor:
    exponents_R = torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim
    return 1.0 / torch.pow(theta, exponents_R)


def _llama3(plain_R: Tensor, scaling: RopeScaling) -> Tensor:
    """Source: Llama 3.1. Long waves are stretched, short ones kept, those between interpolated."""
    context = _original_context(scaling)
    turns_R = context * plain_R / (2 * math.pi)
    kept_R = (turns_R - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
    kept_R = kept_R.clamp(0.0, 1.0)
    return (1 - kept_R) * plain_R / scaling.factor + kept_R * plain_R


def _yarn(plain_R: Tensor, theta: float, scaling: RopeScaling) -> Tensor:
    """Source: Peng et al. 2023, "YaRN", section 3.2."""
    context, pairs = _original_context(scaling), len(plain_R)

    def pair_that_turns(times: float) -> float:
        return pairs * math.log(context / (times * 2 * math.pi)) / math.log(theta)

    low, high = pair_that_turns(scaling.beta_fast), pair_that_turns(scaling.beta_slow)
    if scaling.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, 2 * pairs - 1)
    width = high - low if high != low else 0.001  # A step instead of a ramp.
    stretched_R = ((torch.arange(pairs, dtype=torch.float32) - low) / width).clamp(0.0, 1.0)
    return stretched_R * plain_R / scaling.factor + (1 - stretched_R) * plain_R


def _yarn_amplitude(scaling: RopeScaling) -> float:
    if scaling.attention_factor is not None:
        return scaling.attention_factor
    return 0.1 * math.log(scaling.factor) + 1.0


def _original_context(scaling: RopeScaling) -> int:
    if scaling.original_context is None:
        raise ConfigError(
            f"rope {scaling.kind} needs original_context: the positions the model was trained for",
            field="rope.original_context",
        )
    return scaling.original_context
