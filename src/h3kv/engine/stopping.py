"""When an answer ends."""

from __future__ import annotations

import enum
from collections.abc import Set as AbstractSet

from h3kv.engine.request import SamplingParameters


class FinishReason(enum.StrEnum):
    """Why an answer ended."""

    STOP = "stop"
    """The model ended its text, or a stop token or stop string came."""
    LENGTH = "length"
    """`max_new_tokens` were generated."""
    CANCELLED = "cancelled"
    """The caller gave up."""


class StopRule:
    """Decides after each token of one request.

    Args:
        parameters: of the request.
        end_tokens: with which this model ends a text.
    """

    def __init__(self, parameters: SamplingParameters, end_tokens: AbstractSet[int]) -> None:
        own = frozenset(parameters.stop_token_ids)
        self._ends = own if parameters.ignore_eos else own | end_tokens
        self._max_new_tokens = parameters.max_new_tokens

    def is_end_token(self, token: int) -> bool:
        """Whether the answer ends with this token, which adds no text."""
        return token in self._ends

    def check(self, token: int, *, generated: int, stop_string_found: bool) -> FinishReason | None:
        """Why the answer ends with this token; None when it goes on.

        Args:
            token: the newest one.
            generated: tokens of the answer so far, this one included.
            stop_string_found: whether the text reached a stop string.
        """
        if self.is_end_token(token) or stop_string_found:
            return FinishReason.STOP
        return FinishReason.LENGTH if generated >= self._max_new_tokens else None
