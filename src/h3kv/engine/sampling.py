"""The next token from the model's scores.

Shapes: V vocabulary, C candidates, N those of them that are left.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from h3kv.core.errors import NumericsError, RequestError
from h3kv.engine.events import TokenLogprobs
from h3kv.engine.logprobs import token_logprobs
from h3kv.engine.ranking import largest, nucleus
from h3kv.engine.request import SamplingParameters
from h3kv.engine.scores import ScoreChanges


@dataclass(frozen=True, slots=True)
class Choice:
    """A token that was chosen."""

    token: int
    logprobs: TokenLogprobs | None = None
    """Where the request asked for them."""


class Sampler:
    """Chooses the tokens of one request. It keeps count of them.

    The choice depends on the parameters, the scores and the tokens before: never on other requests, the device, or the
    number of threads.

    Args:
        parameters: of the request.
        prompt: its tokens.
    """

    def __init__(self, parameters: SamplingParameters, *, prompt: Sequence[int]) -> None:
        self._parameters = parameters
        self._generator = torch.Generator().manual_seed(parameters.seed)
        self._changes = ScoreChanges(parameters, prompt)
        self._matcher = None if parameters.grammar is None else parameters.grammar.matcher()

    @property
    def is_greedy(self) -> bool:
        """Whether each token is the first of those with the highest score, and nothing is to be said of it.

        Then one pass over the scores is enough.
        """
        return self._parameters.temperature == 0 and self._parameters.logprobs is None and not self._changes_scores

    def choose(self, logits_V: Tensor) -> Choice:
        """The next token, which the answer has from now on.

        Args:
            logits_V: fp32 scores on any device. Not modified.

        Raises:
            NumericsError: a score is NaN, or the largest is infinite.
            RequestError: the grammar and the model leave no token, or the grammar is too complex.

        Cost: one pass when greedy, a few with a temperature; with `top_p`, rarely a sort of the vocabulary.
        """
        # The first of equal maxima, as torch promises; NaN counts as the largest.
        likeliest = int(logits_V.argmax())
        check_score(likeliest, float(logits_V[likeliest]))
        if self.is_greedy:
            return Choice(likeliest)
        logits_V = logits_V.cpu()
        token = self._pick(self._changed(logits_V) if self._changes_scores else logits_V)
        self._changes.add(token)
        if self._matcher is not None:
            self._matcher.accept(token)
        count = self._parameters.logprobs
        return Choice(token, None if count is None else token_logprobs(logits_V, token, count))

    @property
    def _changes_scores(self) -> bool:
        return self._matcher is not None or not self._changes.is_empty

    def _changed(self, logits_V: Tensor) -> Tensor:
        """A copy of the scores as the request wants them; at least one is finite."""
        scores_V = logits_V.clone()
        self._changes.apply(scores_V)
        if self._matcher is not None:
            self._matcher.restrict(scores_V)
            if not scores_V.max().isfinite():
                raise RequestError(
                    "response_format: the model rules out every token that the grammar allows next; "
                    "allow more, or choose another model"
                )
        return scores_V

    def _pick(self, scores_V: Tensor) -> int:
        if self._parameters.temperature == 0:
            return int(scores_V.argmax())
        ids_C, probabilities_C = self._candidates(scores_V)
        # The inverse of the cumulative distribution, in fp64 and in a fixed order: one random number for each token.
        sums_C = probabilities_C.cumsum(0)
        draw = torch.rand(1, generator=self._generator, dtype=torch.float64) * sums_C[-1]
        # Where rounding reaches the sum itself, the last candidate that is possible at all.
        last = torch.searchsorted(sums_C, sums_C[-1:])
        place = torch.minimum(torch.searchsorted(sums_C, draw, right=True), last)
        return int(ids_C[place])

    def _candidates(self, scores_V: Tensor) -> tuple[Tensor, Tensor]:
        """Tokens that may be chosen, and their probabilities before any was left out by `top_p` or `min_p`."""
        parameters = self._parameters
        ids_C, scores_C = torch.arange(len(scores_V)), scores_V.double()
        if parameters.top_k is not None:
            ids_C = largest(scores_V, parameters.top_k)
            scores_C = scores_C[ids_C]
        probabilities_C = ((scores_C - scores_C.max()) / parameters.temperature).softmax(0)
        if parameters.min_p > 0:
            kept = (probabilities_C >= parameters.min_p * probabilities_C.max()).nonzero().squeeze(1)
            ids_C, probabilities_C = ids_C[kept], probabilities_C[kept]
        if parameters.top_p < 1:
            kept = nucleus(probabilities_C, parameters.top_p)
            ids_C, probabilities_C = ids_C[kept], probabilities_C[kept]
        return ids_C, probabilities_C


def check_score(token: int, score: float) -> None:
    """Check the largest score of a model, NaN counting as the largest of all, and so all others.

    Args:
        token: whose score it is.
        score: of the first maximum.

    Raises:
        NumericsError: it is NaN or infinite.
    """
    if not math.isfinite(score):
        raise NumericsError(
            f"the model's score of token {token} is {score}: its weights are damaged, or "
            "too large for this element type; try --dtype fp32 or fetch the model again"
        )
