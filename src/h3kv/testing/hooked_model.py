"""A language model with something to do before and after each of its calls."""

from __future__ import annotations

from collections.abc import Callable, Generator
from typing import Literal, Protocol

from torch import Tensor

from h3kv.engine.sequence import LanguageModel
from h3kv.models.decoder import SteppedKvCache, TokenBatch


class Attending(Protocol):
    """What chunks and batches of tokens attend with."""

    def attend(self, layer: int, q_THD: Tensor, k_TKD: Tensor, v_TKD: Tensor) -> Tensor:
        """See `KvCache.attend` and `TokenBatch.attend`."""
        ...


class HookedModel:
    """Satisfies `engine.sequence.LanguageModel`.

    Args:
        model: does the work.
        before: called with the tokens of a call, and with what attends to them. What it raises, the call raises.
        after: called with the scores that a call gave, where it gave any.
    """

    def __init__(
        self,
        model: LanguageModel,
        *,
        before: Callable[[Tensor, Attending], None] = lambda *_: None,
        after: Callable[[Tensor], None] = lambda _: None,
    ) -> None:
        self.config = model.config
        self._model = model
        self._before = before
        self._after = after

    def steps(
        self, token_ids_T: Tensor, cache: SteppedKvCache, *, logits: Literal["last", "all", "none"]
    ) -> Generator[None, None, Tensor]:
        """See `Decoder.steps`."""
        self._before(token_ids_T, cache)
        scores = yield from self._model.steps(token_ids_T, cache, logits=logits)
        if logits != "none":
            self._after(scores)
        return scores

    def decode(self, token_ids_B: Tensor, batch: TokenBatch) -> Tensor:
        """See `Decoder.decode`."""
        self._before(token_ids_B, batch)
        scores_BV = self._model.decode(token_ids_B, batch)
        self._after(scores_BV)
        return scores_BV
