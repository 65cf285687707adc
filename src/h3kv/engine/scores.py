"""Scores as a request wants them changed before a token is chosen: bias, and penalties of what was said already.

Shapes: V vocabulary, N tokens that were seen, M tokens with a bias.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Final

import torch
from torch import Tensor

from h3kv.engine.request import SamplingParameters

SEEN_FIRST: Final = 256
"""Tokens for which there is room at first; it doubles when it is full."""


class SeenTokens:
    """Tokens of a text, each once, with how often the answer has them.

    Args:
        prompt: tokens that count as seen, though the answer has none of them yet.
    """

    def __init__(self, prompt: Iterable[int]) -> None:
        tokens = list(dict.fromkeys(prompt))
        self._places = {token: place for place, token in enumerate(tokens)}
        room = max(SEEN_FIRST, 2 * len(tokens))
        self._ids = torch.zeros(room, dtype=torch.int64)
        self._ids[: len(tokens)] = torch.tensor(tokens, dtype=torch.int64)
        self._counts = torch.zeros(room, dtype=torch.float32)

    @property
    def ids_N(self) -> Tensor:
        """Their numbers, int64, in order of first sight. A view that the next `add` makes stale."""
        return self._ids[: len(self._places)]

    @property
    def counts_N(self) -> Tensor:
        """How often the answer has each, fp32. A view that the next `add` makes stale."""
        return self._counts[: len(self._places)]

    def add(self, token: int) -> None:
        """The answer has this token once more."""
        place = self._places.setdefault(token, len(self._places))
        if place == len(self._ids):
            self._ids = torch.cat([self._ids, torch.zeros_like(self._ids)])
            self._counts = torch.cat([self._counts, torch.zeros_like(self._counts)])
        self._ids[place] = token
        self._counts[place] += 1


class ScoreChanges:
    """What one request adds to scores. It keeps count of the answer's tokens.

    Args:
        parameters: of the request.
        prompt: its tokens.
    """

    def __init__(self, parameters: SamplingParameters, prompt: Sequence[int]) -> None:
        self._repetition = parameters.repetition_penalty
        self._frequency = parameters.frequency_penalty
        self._presence = parameters.presence_penalty
        has_penalties = (self._repetition, self._frequency, self._presence) != (1, 0, 0)
        self._seen = SeenTokens(prompt if self._repetition != 1 else ()) if has_penalties else None
        self._biased_M = torch.tensor([token for token, _ in parameters.logit_bias], dtype=torch.int64)
        self._bias_M = torch.tensor([bias for _, bias in parameters.logit_bias], dtype=torch.float32)

    @property
    def is_empty(self) -> bool:
        """Whether scores stay as they are, whatever the answer."""
        return self._seen is None and not len(self._biased_M)

    def apply(self, scores_V: Tensor) -> None:
        """Change scores in place: bias, then the penalty of repetition, then those of frequency and presence.

        Args:
            scores_V: fp32 on the CPU.

        Cost: of the tokens that were seen, whatever the vocabulary.
        """
        scores_V[self._biased_M] += self._bias_M
        if self._seen is None:
            return
        ids_N, counts_N = self._seen.ids_N, self._seen.counts_N
        values_N = scores_V[ids_N]
        if self._repetition != 1:
            values_N = torch.where(values_N > 0, values_N / self._repetition, values_N * self._repetition)
        scores_V[ids_N] = values_N - self._frequency * counts_N - self._presence * (counts_N > 0)

    def add(self, token: int) -> None:
        """The answer has grown by a token."""
        if self._seen is not None:
            self._seen.add(token)
