"""What a caller asks for, checked when it is made."""

from __future__ import annotations

import enum
import math
from dataclasses import dataclass
from typing import Final, NewType

from h3kv.core.errors import RequestError

RequestId = NewType("RequestId", int)
"""Number of a request, unique within one engine and never used twice."""

SEED_MAX: Final = 2**63 - 1
"""Largest seed that every generator of torch accepts."""

STOPS_MAX: Final = 16
"""Stop strings of one request: each is searched in every piece of text."""


LOGPROBS_MAX: Final = 20
"""Alternatives that are named for one token."""


class GrammarKind(enum.StrEnum):
    """How a grammar is written."""

    JSON_OBJECT = "json_object"
    """Any JSON object: there is no text."""
    JSON_SCHEMA = "json_schema"
    LARK = "lark"


@dataclass(frozen=True, slots=True)
class Grammar:
    """What an answer must be. The engine says whether it can be compiled."""

    kind: GrammarKind
    text: str = ""


def _require(fulfilled: bool, field: str, value: object, rule: str) -> None:
    if not fulfilled:
        raise RequestError(f"{field} = {value!r}: {rule}")


def _are_stops(stops: object) -> bool:
    return (
        isinstance(stops, tuple) and len(stops) <= STOPS_MAX and all(isinstance(stop, str) and stop for stop in stops)
    )


def _is_int(value: object, *, least: int, most: int | None = None) -> bool:
    """Whether a value is a whole number in a range. Callers pass what clients sent: types are checked too."""
    if not isinstance(value, int) or isinstance(value, bool):
        return False
    return value >= least and (most is None or value <= most)


def _are_tokens(tokens: object) -> bool:
    return isinstance(tokens, tuple) and all(_is_int(token, least=0) for token in tokens)


def _lie_between(tokens: tuple[int, ...], least: int, most: int) -> bool:
    """Whether all are whole numbers in a range: in one pass of C over a long prompt."""
    return set(map(type, tokens)) == {int} and least <= min(tokens) and max(tokens) <= most


def _are_biases(biases: object) -> bool:
    if not isinstance(biases, tuple) or not all(isinstance(pair, tuple) and len(pair) == 2 for pair in biases):
        return False
    are_sound = all(_is_int(token, least=0) and _is_number(bias) and -100 <= bias <= 100 for token, bias in biases)
    return are_sound and len({token for token, _ in biases}) == len(biases)


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParameters:
    """How tokens are chosen and when to stop.

    Raises:
        RequestError: a value against its rule; the message names the field.
    """

    temperature: float = 0.0
    """0 takes the most likely token; otherwise scores are divided by it. Up to 100."""
    top_k: int | None = None
    """Only so many of the most likely tokens; of equally likely ones, those with the lower numbers."""
    top_p: float = 1.0
    """Only the most likely tokens that reach this probability together; always at least one. Applied last."""
    min_p: float = 0.0
    """Only tokens at least this fraction as likely as the most likely one. Applied after `top_k`."""
    seed: int = 0
    """Start of the random numbers. The same seed and scores give the same tokens."""
    max_new_tokens: int = 256
    """Longest answer. Room for all of it is reserved before the request starts."""
    stop: tuple[str, ...] = ()
    """The answer ends before the first of these."""
    stop_token_ids: tuple[int, ...] = ()
    """The answer ends with the first of these, which adds no text."""
    ignore_eos: bool = False
    """Go on after the model's own end of text."""
    presence_penalty: float = 0.0
    """Taken off the score of a token that the answer has already."""
    frequency_penalty: float = 0.0
    """Taken off the score of a token once for each time that the answer has it."""
    repetition_penalty: float = 1.0
    """Divides positive scores of tokens that prompt or answer have, and multiplies negative ones."""
    logit_bias: tuple[tuple[int, float], ...] = ()
    """Tokens, each once, with what is added to their scores."""
    logprobs: int | None = None
    """How many of the likeliest tokens are named beside each token of the answer; None: none, and not its own
    probability either."""
    grammar: Grammar | None = None
    """What the answer must be."""

    def __post_init__(self) -> None:
        temperature, top_p, min_p = self.temperature, self.top_p, self.min_p
        rule = "must be a number from 0 (greedy) to 100"
        _require(_is_number(temperature) and 0 <= temperature <= 100, "temperature", temperature, rule)
        rule = "must be a whole number from 1, or left out"
        _require(self.top_k is None or _is_int(self.top_k, least=1), "top_k", self.top_k, rule)
        _require(_is_number(top_p) and 0 < top_p <= 1, "top_p", top_p, "must be a number above 0, up to 1")
        _require(_is_number(min_p) and 0 <= min_p <= 1, "min_p", min_p, "must be a number from 0 to 1")
        rule = f"must be a whole number from 0 to {SEED_MAX}"
        _require(_is_int(self.seed, least=0, most=SEED_MAX), "seed", self.seed, rule)
        rule = "must be a whole number from 1"
        _require(_is_int(self.max_new_tokens, least=1), "max_new_tokens", self.max_new_tokens, rule)
        _require(_are_stops(self.stop), "stop", self.stop, f"must be a tuple of up to {STOPS_MAX} strings, none empty")
        rule = "must be a tuple of token numbers from 0"
        _require(_are_tokens(self.stop_token_ids), "stop_token_ids", self.stop_token_ids, rule)
        _require(isinstance(self.ignore_eos, bool), "ignore_eos", self.ignore_eos, "must be true or false")
        for name in ("presence_penalty", "frequency_penalty"):
            value = getattr(self, name)
            _require(_is_number(value) and -2 <= value <= 2, name, value, "must be a number from -2 to 2")
        repetition = self.repetition_penalty
        rule = "must be a number above 0, up to 10"
        _require(_is_number(repetition) and 0 < repetition <= 10, "repetition_penalty", repetition, rule)
        rule = "must be pairs of a token number and a number from -100 to 100, no token twice"
        _require(_are_biases(self.logit_bias), "logit_bias", self.logit_bias, rule)
        rule = f"must be a whole number from 0 to {LOGPROBS_MAX}, or left out"
        _require(
            self.logprobs is None or _is_int(self.logprobs, least=0, most=LOGPROBS_MAX), "logprobs", self.logprobs, rule
        )
        _require(
            self.grammar is None or isinstance(self.grammar, Grammar), "grammar", self.grammar, "must be a Grammar"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """One prompt and how to answer it.

    Raises:
        RequestError: a field of another type; the message names it.
    """

    prompt: tuple[int, ...]
    """Token numbers, at least one."""
    sampling: SamplingParameters = SamplingParameters()
    tenant: bytes = b""
    """Salt of the block keys: only requests with the same salt share KV."""

    def __post_init__(self) -> None:
        _require(isinstance(self.prompt, tuple), "prompt", self.prompt, "must be a tuple of token numbers")
        rule = "must be SamplingParameters"
        _require(isinstance(self.sampling, SamplingParameters), "sampling", self.sampling, rule)
        _require(isinstance(self.tenant, bytes), "tenant", self.tenant, "must be bytes")

    def check(self, vocabulary_size: int) -> None:
        """Check the prompt against the model.

        Raises:
            RequestError: the prompt is empty or has a number outside the vocabulary.
        """
        if not self.prompt:
            raise RequestError("prompt = (): the prompt is empty; give at least one token")
        if _lie_between(self.prompt, 0, vocabulary_size - 1):
            return
        for place, token in enumerate(self.prompt):
            if not _is_int(token, least=0, most=vocabulary_size - 1):
                raise RequestError(
                    f"prompt[{place}] = {token!r}: must be a token number from 0 to {vocabulary_size - 1}; "
                    "use the tokenizer of this model"
                )
