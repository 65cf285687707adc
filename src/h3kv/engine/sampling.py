"""The next token from the model's scores.

Shapes: V vocabulary, C candidates, N those of them that are left.
"""

from __future__ import annotations

import math
from typing import Final

import torch
from torch import Tensor

from h3kv.core.errors import NumericsError
from h3kv.engine.request import SamplingParameters

NUCLEUS_FIRST: Final = 1024
"""Tokens that are sorted at first for `top_p`. Only a nearly flat distribution needs all."""


class Sampler:
    """Chooses the tokens of one request.

    The choice depends on the parameters, the scores and how many tokens were drawn before: never on other requests, the
    device, or the number of threads.
    """

    def __init__(self, parameters: SamplingParameters) -> None:
        self._parameters = parameters
        self._generator = torch.Generator().manual_seed(parameters.seed)

    def choose(self, logits_V: Tensor) -> int:
        """The next token.

        Args:
            logits_V: fp32 scores on any device. Not modified.

        Raises:
            NumericsError: a score is NaN, or the largest is infinite.

        Cost: one pass when greedy, a few with a temperature; with `top_p`, rarely a sort of the vocabulary.
        """
        # The first of equal maxima, as torch promises; NaN counts as the largest.
        likeliest = int(logits_V.argmax())
        if not math.isfinite(logits_V[likeliest]):
            raise NumericsError(
                f"the model's score of token {likeliest} is {float(logits_V[likeliest])}: its weights are damaged, or "
                "too large for this element type; try --dtype fp32 or fetch the model again"
            )
        if self._parameters.temperature == 0:
            return likeliest
        ids_C, probabilities_C = self._candidates(logits_V.cpu())
        # The inverse of the cumulative distribution, in fp64 and in a fixed order: one random number for each token.
        sums_C = probabilities_C.cumsum(0)
        draw = torch.rand(1, generator=self._generator, dtype=torch.float64) * sums_C[-1]
        place = int(torch.searchsorted(sums_C, draw, right=True))
        return int(ids_C[min(place, len(ids_C) - 1)])

    def _candidates(self, logits_V: Tensor) -> tuple[Tensor, Tensor]:
        """Tokens that may be chosen, and their probabilities before any was left out by `top_p` or `min_p`."""
        parameters = self._parameters
        ids_C = torch.arange(len(logits_V)) if parameters.top_k is None else largest(logits_V, parameters.top_k)
        scores_C = logits_V[ids_C].double()
        probabilities_C = ((scores_C - scores_C.max()) / parameters.temperature).softmax(0)
        if parameters.min_p > 0:
            kept = (probabilities_C >= parameters.min_p * probabilities_C.max()).nonzero().squeeze(1)
            ids_C, probabilities_C = ids_C[kept], probabilities_C[kept]
        if parameters.top_p < 1:
            kept = nucleus(probabilities_C, parameters.top_p)
            ids_C, probabilities_C = ids_C[kept], probabilities_C[kept]
        return ids_C, probabilities_C


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
    places_N = largest(probabilities_C, NUCLEUS_FIRST)
    if probabilities_C[places_N].sum() < top_p:
        places_N = largest(probabilities_C, len(probabilities_C))
    values_N = probabilities_C[places_N]
    before_N = values_N.cumsum(0) - values_N
    reached = max(int((before_N < top_p).sum()), 1)
    return places_N[:reached]
