"""OpenAI's API as far as it is served: bodies of requests, and what answers look like.

A field that is not listed here is refused by its name: what a client asks for is done, or it is told.
"""

from __future__ import annotations

import secrets
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Final, Literal

from pydantic import BaseModel, ConfigDict, Field, StringConstraints

from h3kv.api.common.v1 import types_pb2
from h3kv.api.gpu_worker.v1 import gpu_worker_service_pb2 as pb

SEED_MAX: Final = 2**63 - 1
TOKENS_MAX: Final = 2**31 - 1
COMPLETION_TOKENS: Final = 16
"""Length of a completion that names none, as in OpenAI's API. A chat has the node's default."""

Stop = Annotated[str, StringConstraints(min_length=1)]
TokenId = Annotated[int, Field(ge=0, le=2**32 - 1)]


@dataclass(frozen=True, slots=True)
class AnswerKind:
    """How answers of one kind of request are written."""

    prefix: str
    """Of their ids."""
    whole: str
    """What an answer in one piece is called."""
    chunk: str
    """What a piece of a stream is called."""
    is_chat: bool


COMPLETION: Final = AnswerKind("cmpl", "text_completion", "text_completion", is_chat=False)
CHAT: Final = AnswerKind("chatcmpl", "chat.completion", "chat.completion.chunk", is_chat=True)


class Body(BaseModel):
    """Base of what clients send: types are not converted, other fields are refused."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, allow_inf_nan=False)


class StreamOptions(Body):
    """What a stream says besides the text."""

    include_usage: bool = False
    """Whether a last chunk without text carries the usage."""


class AnswerBody(Body):
    """What both kinds of requests have."""

    model: str
    max_tokens: Annotated[int, Field(ge=1, le=TOKENS_MAX)] | None = None
    temperature: Annotated[float, Field(ge=0.0, le=100.0)] | None = None
    top_p: Annotated[float, Field(gt=0.0, le=1.0)] | None = None
    seed: Annotated[int, Field(ge=0, le=SEED_MAX)] | None = None
    stop: Stop | Annotated[list[Stop], Field(max_length=16)] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None

    def sampling(self, *, max_tokens: int | None) -> pb.Sampling:
        """How to choose tokens. Without a seed, one is drawn: two equal requests then have two answers.

        Args:
            max_tokens: length of the answer where the body names none; None: the node's default.
        """
        stops = [self.stop] if isinstance(self.stop, str) else (self.stop or [])
        return pb.Sampling(
            temperature=1.0 if self.temperature is None else self.temperature,
            top_p=1.0 if self.top_p is None else self.top_p,
            seed=secrets.randbelow(SEED_MAX) if self.seed is None else self.seed,
            max_new_tokens=max_tokens if self.max_tokens is None else self.max_tokens,
            stop=stops,
        )


class CompletionBody(AnswerBody):
    """Of `POST /v1/completions`."""

    kind: ClassVar[AnswerKind] = COMPLETION

    prompt: str | Annotated[list[TokenId], Field(min_length=1)]

    def request(self) -> pb.GenerateRequest:
        """The same for gpu_worker."""
        sampling = self.sampling(max_tokens=COMPLETION_TOKENS)
        if isinstance(self.prompt, str):
            return pb.GenerateRequest(text=self.prompt, sampling=sampling)
        return pb.GenerateRequest(tokens=pb.Tokens(ids=self.prompt), sampling=sampling)


class Message(Body):
    """One message of a chat."""

    role: Literal["system", "user", "assistant"]
    content: str


class ChatBody(AnswerBody):
    """Of `POST /v1/chat/completions`."""

    kind: ClassVar[AnswerKind] = CHAT

    messages: Annotated[list[Message], Field(min_length=1)]

    def request(self) -> pb.GenerateRequest:
        """The same for gpu_worker, which applies the model's template."""
        messages = [pb.ChatMessage(role=message.role, content=message.content) for message in self.messages]
        return pb.GenerateRequest(chat=pb.Chat(messages=messages), sampling=self.sampling(max_tokens=None))


_REASONS: Final = {pb.FINISH_REASON_STOP: "stop", pb.FINISH_REASON_LENGTH: "length"}
_TIERS: Final = {types_pb2.TIER_DEVICE: "device", types_pb2.TIER_HOST: "host", types_pb2.TIER_NVME: "nvme"}


@dataclass(frozen=True, slots=True)
class AnswerWriter:
    """Writes one answer, whole or in chunks.

    Args:
        kind: of the request.
        request_id: makes the answer's id.
        model: as users call it.
        created_s: when it was asked for, in seconds since 1970.
    """

    kind: AnswerKind
    request_id: str
    model: str
    created_s: int

    def opening(self) -> list[dict[str, Any]]:
        """Chunks before the first text."""
        if not self.kind.is_chat:
            return []
        return [self._chunk({"index": 0, "delta": {"role": "assistant", "content": ""}, "finish_reason": None})]

    def chunk(self, text: str, reason: pb.FinishReason | None = None) -> dict[str, Any]:
        """A chunk of text; with a reason the last one."""
        said = {"delta": {"content": text} if text else {}} if self.kind.is_chat else {"text": text, "logprobs": None}
        return self._chunk({"index": 0, **said, "finish_reason": finish_reason(reason)})

    def usage_chunk(self, usage: pb.Usage) -> dict[str, Any]:
        """The chunk that carries the usage alone."""
        return {**self._head(self.kind.chunk), "choices": [], "usage": usage_fields(usage)}

    def whole(self, text: str, finished: pb.Finished) -> dict[str, Any]:
        """The answer in one piece."""
        said: dict[str, Any] = (
            {"message": {"role": "assistant", "content": text}} if self.kind.is_chat else {"text": text}
        )
        choice = {"index": 0, **said, "logprobs": None, "finish_reason": finish_reason(finished.reason)}
        return {**self._head(self.kind.whole), "choices": [choice], "usage": usage_fields(finished.usage)}

    def _chunk(self, choice: dict[str, Any]) -> dict[str, Any]:
        return {**self._head(self.kind.chunk), "choices": [choice]}

    def _head(self, name: str) -> dict[str, Any]:
        return {
            "id": f"{self.kind.prefix}-{self.request_id}",
            "object": name,
            "created": self.created_s,
            "model": self.model,
        }


def finish_reason(reason: pb.FinishReason | None) -> str | None:
    """Why an answer ended, in OpenAI's words."""
    return None if reason is None else _REASONS.get(reason, "stop")


def usage_fields(usage: pb.Usage) -> dict[str, Any]:
    """Tokens as OpenAI counts them; under `h3` where the prompt was found, and times in milliseconds."""
    cached = {_TIERS[entry.tier]: entry.tokens for entry in usage.cached_tokens if entry.tier in _TIERS}
    times = {
        "waiting_ms": usage.waiting_ns,
        "prefill_ms": usage.prefill_ns,
        "time_to_first_token_ms": usage.time_to_first_token_ns if usage.HasField("time_to_first_token_ns") else None,
        "inter_token_ms_mean": usage.inter_token_ns_mean if usage.HasField("inter_token_ns_mean") else None,
        "inter_token_ms_max": usage.inter_token_ns_max if usage.HasField("inter_token_ns_max") else None,
    }
    return {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.generated_tokens,
        "total_tokens": usage.prompt_tokens + usage.generated_tokens,
        "prompt_tokens_details": {"cached_tokens": sum(cached.values())},
        "h3": {
            "cached_tokens": {name: cached.get(name, 0) for name in _TIERS.values()},
            "recall": usage.recall if usage.HasField("recall") else None,
            **{name: None if value is None else round(value / 1e6, 3) for name, value in times.items()},
        },
    }


def model_fields(name: str, created_s: int) -> dict[str, Any]:
    """One entry of the list of models."""
    return {"id": name, "object": "model", "created": created_s, "owned_by": "h3"}
