"""OpenAI's API as far as it is served: what both kinds of requests for text have, and completions."""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, ClassVar, Final

from pydantic import Field, StringConstraints

from h3kv.api.gpu_worker.v1 import gpu_worker_service_pb2 as pb
from h3kv.core.client_limits import ANSWERS_MAX, LOGPROBS_MAX, PROMPTS_MAX, SEED_MAX
from services.gateway.bodies import TOKENS_MAX, Body, Ids, TokenId, few
from services.gateway.problems import FieldError

COMPLETION_TOKENS: Final = 16
"""Length of a completion that names none, as in OpenAI's API. A chat has the node's default."""
BIASES_MAX: Final = 1024
"""Tokens whose scores one request changes."""

Stop = Annotated[str, StringConstraints(min_length=1, max_length=1024)]
Bias = Annotated[float, Field(ge=-100.0, le=100.0)]
TokenText = Annotated[str, StringConstraints(pattern=r"^[0-9]{1,10}$")]


@dataclass(frozen=True, slots=True)
class AnswerKind:
    """How answers of one kind of request are written."""

    prefix: str
    """Of their ids."""
    whole: str
    """What an answer in one piece is called."""
    chunk: str
    """What a piece of a stream is called."""


@dataclass(frozen=True, slots=True)
class Asked:
    """What gpu_worker is asked for. Each prompt is there once, however many answers there are to be."""

    prompts: Sequence[pb.GenerateRequest]
    """Each without its sampling. At least one."""
    sampling: pb.Sampling
    """Of the first choice of each prompt."""
    choices: int
    """Answers to each prompt."""

    @property
    def count(self) -> int:
        """Answers to all of them. They are numbered prompt by prompt."""
        return len(self.prompts) * self.choices

    def sampling_of(self, place: int) -> pb.Sampling:
        """Of one choice of a prompt: all differ in their seeds alone."""
        sampling = pb.Sampling()
        sampling.CopyFrom(self.sampling)
        sampling.seed = (self.sampling.seed + place) % (SEED_MAX + 1)
        return sampling


COMPLETION: Final = AnswerKind("cmpl", "text_completion", "text_completion")
CHAT: Final = AnswerKind("chatcmpl", "chat.completion", "chat.completion.chunk")


class StreamOptions(Body):
    """What a stream says besides the text."""

    NEUTRAL: ClassVar[Mapping[str, tuple[object, ...]]] = {
        "include_obfuscation": (False,),
        "continuous_usage_stats": (False,),
    }

    include_usage: bool = False
    """Whether a last chunk without text carries the usage."""


class AnswerBody(Body):
    """What both kinds of requests have."""

    NEUTRAL: ClassVar[Mapping[str, tuple[object, ...]]] = {
        "top_k": (-1, 0),
        "min_tokens": (0,),
        "use_beam_search": (False,),
        "length_penalty": (1, 1.0),
        "include_stop_str_in_output": (False,),
        "spaces_between_special_tokens": (True, False),
    }
    kind: ClassVar[AnswerKind]

    model: str
    max_tokens: Annotated[int, Field(ge=1, le=TOKENS_MAX)] | None = None
    temperature: Annotated[float, Field(ge=0.0, le=100.0)] | None = None
    top_p: Annotated[float, Field(gt=0.0, le=1.0)] | None = None
    top_k: Annotated[int, Field(ge=1, le=TOKENS_MAX)] | None = None
    min_p: Annotated[float, Field(ge=0.0, le=1.0)] | None = None
    seed: Annotated[int, Field(ge=0, le=SEED_MAX)] | None = None
    n: Annotated[int, Field(ge=1, le=ANSWERS_MAX)] = 1
    stop: Stop | Annotated[list[Stop], Field(max_length=16, fail_fast=True)] | None = None
    stop_token_ids: Annotated[list[TokenId], Field(max_length=64, fail_fast=True)] | None = None
    ignore_eos: bool = False
    skip_special_tokens: bool | None = None
    presence_penalty: Annotated[float, Field(ge=-2.0, le=2.0)] | None = None
    frequency_penalty: Annotated[float, Field(ge=-2.0, le=2.0)] | None = None
    repetition_penalty: Annotated[float, Field(gt=0.0, le=10.0)] | None = None
    logit_bias: Annotated[dict[TokenText, Bias], few(BIASES_MAX)] | None = None
    stream: bool = False
    stream_options: StreamOptions | None = None
    user: str | None = None
    """Changes nothing: tenants are told apart by their keys."""

    @property
    def has_stream_usage(self) -> bool:
        """Whether a stream ends with the usage."""
        return self.stream_options is not None and self.stream_options.include_usage

    def check(self) -> None:
        """Raise FieldError where fields contradict one another."""
        if self.stream_options is not None and not self.stream:
            raise FieldError(
                "stream_options: only a stream has them: set stream to true, or leave them out", param="stream_options"
            )

    def sampling(self, *, max_tokens: int | None, logprobs: int | None) -> pb.Sampling:
        """How to choose the tokens of the first choice. Without a seed, one is drawn: equal requests then differ.

        Args:
            max_tokens: length of the answer; None: the node's default.
            logprobs: how many of the likeliest tokens are named beside each one; None: none, nor its own probability.
        """
        stops = [self.stop] if isinstance(self.stop, str) else (self.stop or [])
        seed = secrets.randbelow(SEED_MAX) if self.seed is None else self.seed
        return pb.Sampling(
            temperature=1.0 if self.temperature is None else self.temperature,
            top_p=1.0 if self.top_p is None else self.top_p,
            top_k=self.top_k,
            min_p=self.min_p,
            seed=seed,
            max_new_tokens=max_tokens,
            stop=stops,
            stop_token_ids=self.stop_token_ids or [],
            ignore_eos=self.ignore_eos,
            presence_penalty=self.presence_penalty,
            frequency_penalty=self.frequency_penalty,
            repetition_penalty=self.repetition_penalty,
            logit_bias=self._biases(),
            logprobs=logprobs,
            skip_special_tokens=self.skip_special_tokens,
        )

    def _biases(self) -> dict[int, float]:
        biases = {int(token): bias for token, bias in (self.logit_bias or {}).items()}
        if len(biases) != len(self.logit_bias or {}) or max(biases, default=0) >= 2**32:
            raise FieldError("logit_bias: its keys must be token numbers, each once", param="logit_bias")
        return biases


class CompletionBody(AnswerBody):
    """Of `POST /v1/completions`."""

    NEUTRAL: ClassVar[Mapping[str, tuple[object, ...]]] = {
        **AnswerBody.NEUTRAL,
        "echo": (False,),
        "best_of": (1,),
        "suffix": ("",),
    }
    kind: ClassVar[AnswerKind] = COMPLETION

    prompt: (
        str
        | Ids
        | Annotated[list[str], Field(min_length=1, max_length=PROMPTS_MAX, fail_fast=True)]
        | Annotated[list[Ids], Field(min_length=1, max_length=PROMPTS_MAX, fail_fast=True)]
    )
    logprobs: Annotated[int, Field(ge=0, le=LOGPROBS_MAX)] | None = None

    @property
    def has_logprobs(self) -> bool:
        """Whether the answer says how likely its tokens were."""
        return self.logprobs is not None

    def asked(self, tenant: pb.Tenant) -> Asked:
        """The same for gpu_worker."""
        self.check()
        length = COMPLETION_TOKENS if self.max_tokens is None else self.max_tokens
        sampling = self.sampling(max_tokens=length, logprobs=self.logprobs)
        return Asked([_asking(prompt, tenant) for prompt in self._prompts()], sampling, choices=self.n)

    def _prompts(self) -> Sequence[str | Sequence[int]]:
        if isinstance(self.prompt, str):
            return [self.prompt]
        texts = [each for each in self.prompt if isinstance(each, str)]
        many = [each for each in self.prompt if isinstance(each, list)]
        return texts or many or [[each for each in self.prompt if isinstance(each, int)]]


def _asking(prompt: str | Sequence[int], tenant: pb.Tenant) -> pb.GenerateRequest:
    if isinstance(prompt, str):
        return pb.GenerateRequest(text=prompt, tenant=tenant)
    return pb.GenerateRequest(tokens=pb.Tokens(ids=prompt), tenant=tenant)
