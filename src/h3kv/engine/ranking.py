"""Orders of values that nothing but the values decides: equal ones stand in order of their places.

Shapes: C candidates, N those of them that are chosen.
"""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor

NUCLEUS_FIRST: Final = 1024
"""Values that are sorted at first for a nucleus, and eight times as many each time that they do not reach it. Only a
nearly flat distribution needs all."""


def largest(values_C: Tensor, count: int) -> Tensor:
    """Places of the largest values, largest first, equal ones in order of their places. All where there are fewer."""
    places_N = torch.arange(len(values_C))
    if count < len(values_C):
        # All that reach the last of them; the cut below then drops ties beyond the count.
        places_N = (values_C >= values_C.topk(count).values[-1]).nonzero().squeeze(1)
    order_N = values_C[places_N].sort(descending=True, stable=True).indices
    return places_N[order_N[:count]]


def nucleus(probabilities_C: Tensor, top_p: float) -> Tensor:
    """Places of the fewest values that reach `top_p` together, largest first; at least one.

    Source: Holtzman et al. 2020, "The Curious Case of Neural Text Degeneration", section 3.1.
    """
    count = NUCLEUS_FIRST
    places_N = largest(probabilities_C, count)
    while count < len(probabilities_C) and probabilities_C[places_N].sum() < top_p:
        count *= 8
        places_N = largest(probabilities_C, count)
    values_N = probabilities_C[places_N]
    before_N = values_N.cumsum(0) - values_N
    reached = max(int((before_N < top_p).sum()), 1)
    return places_N[:reached]
