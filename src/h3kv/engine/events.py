"""What the engine reports of a request: PrefillProgress and TokenGenerated, many; then one Finished or Failed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from h3kv.core.errors import H3Error
from h3kv.core.types import Tier
from h3kv.engine.request import RequestId
from h3kv.engine.stopping import FinishReason


@dataclass(frozen=True, slots=True)
class RequestStatistics:
    """Counts and times of one request. Times are integer nanoseconds of the engine's clock."""

    prompt_tokens: int
    cached_tokens: Mapping[Tier, int]
    """Prompt tokens whose KV was found, by the tier in which it lay. All others were computed."""
    generated_tokens: int
    waiting_ns: int
    """From submission until room was there."""
    prefill_ns: int
    """Spent in this request's own prefill steps."""
    time_to_first_token_ns: int | None
    """From submission; None when no token came."""
    inter_token_ns: tuple[int, ...]
    """From each token to the next, steps of other requests included."""
    recall: float | None = None
    """Share of attention in the tokens that retrieval read, mean of a sample; None where nothing was measured."""
    attended_fraction: float | None = None
    """Tokens that the answer's tokens attended to, over those that full attention reads; None without any token."""
    recomputed_tokens: int = 0
    """Prompt tokens whose KV was found in the cold store, and computed all the same."""

    @property
    def cached_tokens_total(self) -> int:
        """Prompt tokens whose KV was found in any tier."""
        return sum(self.cached_tokens.values())


@dataclass(frozen=True, slots=True)
class PrefillProgress:
    """A chunk of the prompt was read."""

    request: RequestId
    done_tokens: int
    """Prompt tokens in the cache, those that were found included."""
    cached_tokens: int
    """Prompt tokens that were found."""
    prompt_tokens: int


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """How likely a token was by the model's scores alone: before temperature, penalties, bias and grammar."""

    logprob: float
    """Natural logarithm of the chosen token's probability."""
    top: tuple[tuple[int, float], ...]
    """The likeliest tokens and theirs, best first; of equals the lower number first."""


@dataclass(frozen=True, slots=True)
class TokenGenerated:
    """The answer grew by a token. All `text` joined is the answer."""

    request: RequestId
    token: int
    text: str
    """What became certain with this token: whole characters, nothing that may begin a stop string."""
    logprobs: TokenLogprobs | None = None
    """Where the request asked for them."""


@dataclass(frozen=True, slots=True)
class Finished:
    """The answer is complete, or was cancelled. The request holds nothing any more."""

    request: RequestId
    reason: FinishReason
    statistics: RequestStatistics


@dataclass(frozen=True, slots=True)
class Failed:
    """The request ended with an error. It holds nothing any more."""

    request: RequestId
    error: H3Error


Event = PrefillProgress | TokenGenerated | Finished | Failed
