"""Partial attention results and how they merge.

Shapes: T query tokens, H query heads, D head dim.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from h3kv.core.errors import ShapeError


@dataclass(frozen=True, slots=True)
class Part:
    """Attention over some of the tokens.

    `lse_TH` is the natural logarithm of the sum of exp(scaled score); -inf with a zero output where no token was seen.
    """

    out_THD: Tensor
    lse_TH: Tensor


def merge(parts: Sequence[Part]) -> Part:
    """Attention over the tokens of all parts, as if computed by one softmax.

    Args:
        parts: at least one; fp32, equal shapes, disjoint sets of tokens. Merged in the order given.

    Raises:
        ShapeError: no part, or shapes that differ.

    Cost: one pass over all outputs. Empty parts change nothing, gaps of any size stay finite.
    Source: Milakov and Gimelshein 2018, "Online normalizer calculation for softmax"; the sigmoid form of two weights
    w_a = sigmoid(lse_a - lse_b) never exponentiates a positive number.
    """
    if not parts:
        raise ShapeError("merge needs at least one part")
    merged = parts[0]
    for part in parts[1:]:
        if part.out_THD.shape != merged.out_THD.shape or part.lse_TH.shape != merged.lse_TH.shape:
            raise ShapeError(f"parts differ in shape: {tuple(merged.out_THD.shape)} and {tuple(part.out_THD.shape)}")
        merged = _merge_pair(merged, part)
    return merged


def _merge_pair(a: Part, b: Part) -> Part:
    # Where both are empty the difference is NaN: any finite gap does, both outputs are zero there.
    gap_TH = torch.nan_to_num(a.lse_TH - b.lse_TH, nan=0.0, posinf=torch.inf, neginf=-torch.inf)
    weight_TH1 = torch.sigmoid(gap_TH).unsqueeze(-1)
    out_THD = torch.lerp(b.out_THD, a.out_THD, weight_TH1)
    # logaddexp(a, b) = max + log1p(exp(-|gap|)) = max - logsigmoid(|gap|); -inf + 0 stays -inf.
    largest_TH = torch.maximum(a.lse_TH, b.lse_TH)
    both_empty_TH = torch.isneginf(largest_TH)
    lse_TH = largest_TH - torch.nn.functional.logsigmoid(gap_TH.abs())
    return Part(out_THD, torch.where(both_empty_TH, largest_TH, lse_TH))
