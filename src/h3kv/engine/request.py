"""What a caller asks for, checked when it is made."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, NewType

from h3kv.core.client_limits import LOGPROBS_MAX, SEED_MAX
from h3kv.core.errors import RequestError
from h3kv.engine.field_checks import are_biases, are_stops, are_tokens, is_int, is_number, lie_between, require, shown
from h3kv.engine.grammar import Grammar

RequestId = NewType("RequestId", int)
"""Number of a request, unique within one engine and never used twice."""

STOPS_MAX: Final = 16
"""Stop strings of one request: each is searched in every piece of text."""

BIAS_MAX: Final = 100
"""Either way: more than scores differ by, so that a token is as good as certain or ruled out."""


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
    """Longest answer."""
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
    skip_special_tokens: bool = True
    """Leave the names of special tokens out of the text. Where a text ends, its last token is left out anyway."""

    def __post_init__(self) -> None:
        self._check_candidates()
        self._check_length()
        self._check_scores()

    def _check_candidates(self) -> None:
        temperature, top_p = self.temperature, self.top_p
        require(is_number(temperature, least=0, most=100), "temperature", temperature, "must be a number from 0 to 100")
        rule = "must be a whole number from 1, or left out"
        require(self.top_k is None or is_int(self.top_k, least=1), "top_k", self.top_k, rule)
        rule = "must be a number above 0, up to 1"
        require(is_number(top_p, least=0, most=1) and top_p > 0, "top_p", top_p, rule)
        require(is_number(self.min_p, least=0, most=1), "min_p", self.min_p, "must be a number from 0 to 1")
        rule = f"must be a whole number from 0 to {SEED_MAX}"
        require(is_int(self.seed, least=0, most=SEED_MAX), "seed", self.seed, rule)

    def _check_length(self) -> None:
        length = self.max_new_tokens
        require(is_int(length, least=1), "max_new_tokens", length, "must be a whole number from 1")
        rule = f"must be a tuple of up to {STOPS_MAX} strings, none empty"
        require(are_stops(self.stop, most=STOPS_MAX), "stop", self.stop, rule)
        rule = "must be a tuple of token numbers from 0"
        require(are_tokens(self.stop_token_ids), "stop_token_ids", self.stop_token_ids, rule)
        for name in ("ignore_eos", "skip_special_tokens"):
            require(isinstance(getattr(self, name), bool), name, getattr(self, name), "must be true or false")
        require(self.grammar is None or isinstance(self.grammar, Grammar), "grammar", self.grammar, "must be a Grammar")
        rule = "must be false with a grammar, whose end is the end of the answer"
        require(self.grammar is None or not self.ignore_eos, "ignore_eos", self.ignore_eos, rule)

    def _check_scores(self) -> None:
        for name in ("presence_penalty", "frequency_penalty"):
            penalty = getattr(self, name)
            require(is_number(penalty, least=-2, most=2), name, penalty, "must be a number from -2 to 2")
        repetition = self.repetition_penalty
        rule = "must be a number above 0, up to 10"
        require(is_number(repetition, least=0, most=10) and repetition > 0, "repetition_penalty", repetition, rule)
        rule = f"must be pairs of a token number and a number from -{BIAS_MAX} to {BIAS_MAX}, no token twice"
        require(are_biases(self.logit_bias, most=BIAS_MAX), "logit_bias", self.logit_bias, rule)
        rule, count = f"must be a whole number from 0 to {LOGPROBS_MAX}, or left out", self.logprobs
        require(count is None or is_int(count, least=0, most=LOGPROBS_MAX), "logprobs", count, rule)


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
    may_be_cut: bool = False
    """Whether a shorter answer will do where the tiers have no room for `max_new_tokens`, which nobody asked for."""
    is_reading: bool = False
    """Whether only its KV is wanted, by no client: it is none of the requests that are counted and timed."""

    def __post_init__(self) -> None:
        require(isinstance(self.prompt, tuple), "prompt", self.prompt, "must be a tuple of token numbers")
        rule = "must be SamplingParameters"
        require(isinstance(self.sampling, SamplingParameters), "sampling", self.sampling, rule)
        require(isinstance(self.tenant, bytes), "tenant", self.tenant, "must be bytes")

    def check(self, vocabulary_size: int) -> None:
        """Check the tokens against the model.

        Raises:
            RequestError: the prompt is empty, or a token of it or of `logit_bias` lies outside the vocabulary.
        """
        last = vocabulary_size - 1
        for token, _ in self.sampling.logit_bias:
            require(token <= last, "logit_bias", token, f"must be of token numbers from 0 to {last}")
        if not self.prompt:
            raise RequestError("prompt = (): the prompt is empty; give at least one token")
        if lie_between(self.prompt, 0, last):
            return
        for place, token in enumerate(self.prompt):
            if not is_int(token, least=0, most=last):
                raise RequestError(
                    f"prompt[{place}] = {shown(token)}: must be a token number from 0 to {last}; "
                    "use the tokenizer of this model"
                )
