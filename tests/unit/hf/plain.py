"""Plain attention over tensors that grow by concatenation: what the two edits replace.

Shapes: B rows, T new tokens, S all tokens, H query heads, K KV heads, D head dim.
"""

from __future__ import annotations

import torch
from torch import Tensor


def causal_mask(tokens: int, total: int) -> Tensor:
    """What is added to the scores, [T, S]."""
    return torch.full((tokens, total), -torch.inf).triu(total - tokens + 1)


class PlainAttention:
    """The oracle: everything in one tensor per layer, computed in fp64."""

    def __init__(self) -> None:
        self.k_BKSD: Tensor | None = None
        self.v_BKSD: Tensor | None = None

    def scores(self, q_BHTD: Tensor, k_BKTD: Tensor) -> Tensor:
        self.k_BKSD = k_BKTD if self.k_BKSD is None else torch.cat([self.k_BKSD, k_BKTD], dim=2)
        group = q_BHTD.shape[1] // k_BKTD.shape[1]
        return q_BHTD.double() @ self.k_BKSD.double().repeat_interleave(group, dim=1).transpose(-2, -1)

    def weighted(self, p_BHTS: Tensor, v_BKTD: Tensor) -> Tensor:
        self.v_BKSD = v_BKTD if self.v_BKSD is None else torch.cat([self.v_BKSD, v_BKTD], dim=2)
        group = p_BHTS.shape[1] // v_BKTD.shape[1]
        return p_BHTS.double() @ self.v_BKSD.double().repeat_interleave(group, dim=1)

    def attend(self, q_BHTD: Tensor, k_BKTD: Tensor, v_BKTD: Tensor, *, scale: float) -> Tensor:
        scores_BHTS = self.scores(q_BHTD, k_BKTD) * scale
        masked_BHTS = scores_BHTS + causal_mask(*scores_BHTS.shape[2:])
        return self.weighted(masked_BHTS.softmax(-1), v_BKTD)
