"""What answers look like: whole, and in the pieces of a stream."""

from __future__ import annotations

import codecs
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

from h3kv.api.common.v1 import types_pb2
from h3kv.api.gpu_worker.v1 import gpu_worker_service_pb2 as pb
from h3kv.core.errors import InternalError
from services.gateway.openai import CHAT, AnswerKind
from services.gateway.tool_calls import CallMode, CallReader, ToolCall, ToolUse

_REASONS: Final = {pb.FINISH_REASON_STOP: "stop", pb.FINISH_REASON_LENGTH: "length"}
_TIERS: Final = {types_pb2.TIER_DEVICE: "device", types_pb2.TIER_HOST: "host", types_pb2.TIER_NVME: "nvme"}

IMPOSSIBLE: Final = -9999.0
"""Logprob of a token that cannot be."""

Fields = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Style:
    """How the choices of one answer are written."""

    kind: AnswerKind
    has_logprobs: bool = False
    tools: ToolUse | None = None


class ChoiceWriter:
    """Writes one choice: in pieces as it grows, or whole.

    The newest token is held back where logprobs are wanted: the one that ends a text is no part of the answer.
    """

    def __init__(self, style: Style, index: int) -> None:
        self._style = style
        self._index = index
        self._held: pb.TokenGenerated | None = None
        self._offsets = _Offsets()
        self._calls = 0
        self._named: ToolCall | None = None
        self._reader: CallReader | None = None
        if style.tools is not None:
            if style.tools.mode is CallMode.NAMED:
                self._named = ToolCall(next(iter(style.tools.names)), "")
            else:
                self._reader = CallReader(style.tools)

    def opening(self) -> list[Fields]:
        """Before the first text."""
        if self._style.kind is not CHAT:
            return []
        chunks = [self._delta({"role": "assistant", "content": None if self._named else ""})]
        if self._named is not None:
            chunks.append(self._delta({"tool_calls": [{"index": 0, **self._named.fields()}]}))
        return chunks

    def grow(self, token: pb.TokenGenerated) -> list[Fields]:
        """What one more token adds."""
        if not self._style.has_logprobs:
            return self._written(token.text, None)
        before, self._held = self._held, token
        return [] if before is None else self._written(before.text, before)

    def end(self, finished: pb.Finished) -> list[Fields]:
        """The last pieces."""
        held, reason = self._held, finish_reason(finished.reason)
        chunks = [] if held is None or _is_end(held, finished) else self._written(held.text, held)
        if self._style.kind is not CHAT:
            return [*chunks, self._piece("", None, reason)]
        if self._reader is not None:
            said, calls = self._reader.end()
            chunks += [self._delta({"content": said})] if said else []
            if calls:
                fields = [{"index": place, **call.fields()} for place, call in enumerate(calls)]
                chunks.append(self._delta({"tool_calls": fields}))
                reason = "tool_calls" if reason == "stop" else reason
        elif self._named is not None and reason == "stop":
            reason = "tool_calls"
        return [*chunks, {**self._delta({}), "finish_reason": reason}]

    def whole(self, text: str, likely: list[pb.TokenGenerated], finished: pb.Finished) -> Fields:
        """The choice in one piece.

        Args:
            text: of all its tokens.
            likely: its tokens, where logprobs are wanted.
            finished: its end.
        """
        reason = finish_reason(finished.reason)
        if likely and _is_end(likely[-1], finished):
            likely.pop()
        logprobs = self._logprobs(likely)
        if self._style.kind is not CHAT:
            return {"index": self._index, "text": text, "logprobs": logprobs, "finish_reason": reason}
        message: Fields = {"role": "assistant", "content": text, "refusal": None}
        if self._style.tools is not None:
            said, calls = self._style.tools.read(text)
            message["content"] = said if said or not calls else None
            if calls:
                message["tool_calls"] = [call.fields() for call in calls]
                reason = "tool_calls" if reason == "stop" else reason
        return {"index": self._index, "message": message, "logprobs": logprobs, "finish_reason": reason}

    def _written(self, text: str, likely: pb.TokenGenerated | None) -> list[Fields]:
        logprobs = self._logprobs([] if likely is None else [likely])
        if self._style.kind is not CHAT:
            return [self._piece(text, logprobs, None)] if text or likely is not None else []
        if self._named is not None:
            delta: Fields = {"tool_calls": [{"index": 0, "function": {"arguments": text}}]} if text else {}
        else:
            said = text if self._reader is None else self._reader.feed(text)
            delta = {"content": said} if said else {}
        return [self._delta(delta, logprobs)] if delta or likely is not None else []

    def _logprobs(self, tokens: Sequence[pb.TokenGenerated]) -> Fields | None:
        if not self._style.has_logprobs:
            return None
        entries = [token.logprobs for token in tokens if token.HasField("logprobs")]
        if self._style.kind is CHAT:
            return {"content": [_chat_logprob(entry) for entry in entries], "refusal": None}
        return self._offsets.fields(entries)

    def _delta(self, delta: Fields, logprobs: Fields | None = None) -> Fields:
        return {"index": self._index, "delta": delta, "logprobs": logprobs, "finish_reason": None}

    def _piece(self, text: str, logprobs: Fields | None, reason: str | None) -> Fields:
        return {"index": self._index, "text": text, "logprobs": logprobs, "finish_reason": reason}


class _Offsets:
    """Logprobs as completions write them, with the place in the text where each token begins."""

    def __init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._characters = 0

    def fields(self, entries: Sequence[pb.TokenLogprobs]) -> Fields:
        """The next tokens, in their order."""
        offsets = []
        for entry in entries:
            offsets.append(self._characters)
            self._characters += len(self._decoder.decode(entry.chosen.text))
        return {
            "tokens": [token_text(entry.chosen.text) for entry in entries],
            "token_logprobs": [_logprob(entry.chosen) for entry in entries],
            "top_logprobs": [{token_text(each.text): _logprob(each) for each in entry.top} for entry in entries],
            "text_offset": offsets,
        }


@dataclass(frozen=True, slots=True)
class AnswerWriter:
    """Writes one answer of one choice or more, whole or in chunks.

    Args:
        kind: of the request.
        id: of the answer, behind a prefix.
        model: as users call it.
        created_s: when it was asked for, in seconds since 1970.
    """

    kind: AnswerKind
    id: str
    model: str
    created_s: int

    def chunk(self, choice: Fields) -> Fields:
        """A chunk with a piece of one choice."""
        return {**self._head(self.kind.chunk), "choices": [choice]}

    def usage_chunk(self, usages: Sequence[pb.Usage], *, choices_per_prompt: int) -> Fields:
        """The chunk that carries the usage alone."""
        usage = usage_fields(usages, choices_per_prompt=choices_per_prompt)
        return {**self._head(self.kind.chunk), "choices": [], "usage": usage}

    def whole(self, choices: Sequence[Fields], usages: Sequence[pb.Usage], *, choices_per_prompt: int) -> Fields:
        """The answer in one piece."""
        usage = usage_fields(usages, choices_per_prompt=choices_per_prompt)
        return {**self._head(self.kind.whole), "choices": list(choices), "usage": usage}

    def _head(self, name: str) -> Fields:
        return {
            "id": f"{self.kind.prefix}-{self.id}",
            "object": name,
            "created": self.created_s,
            "model": self.model,
        }


def finish_reason(reason: pb.FinishReason) -> str:
    """Why an answer ended, in OpenAI's words. Raises InternalError for an end that no answer has."""
    if reason not in _REASONS:
        raise InternalError(f"an answer ended with {pb.FinishReason.Name(reason)}, which is no end of one")
    return _REASONS[reason]


def usage_fields(usages: Sequence[pb.Usage], *, choices_per_prompt: int) -> Fields:
    """Tokens as OpenAI counts them: each prompt once, every choice's answer. Under `h3` is what the first choice took;
    what the others took follows there where there are any.
    """
    prompts = usages[::choices_per_prompt]
    prompt_tokens = sum(usage.prompt_tokens for usage in prompts)
    generated = sum(usage.generated_tokens for usage in usages)
    taken = [h3_fields(usage) for usage in usages]
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": generated,
        "total_tokens": prompt_tokens + generated,
        "prompt_tokens_details": {"cached_tokens": sum(sum(_cached(usage).values()) for usage in prompts)},
        "h3": {**taken[0], **({"choices": taken} if len(taken) > 1 else {})},
    }


def h3_fields(usage: pb.Usage) -> Fields:
    """Where the prompt was found, how much was attended to, and times in milliseconds; None: not measured."""
    cached = _cached(usage)
    times = {
        "waiting_ms": usage.waiting_ns,
        "prefill_ms": usage.prefill_ns,
        "time_to_first_token_ms": usage.time_to_first_token_ns if usage.HasField("time_to_first_token_ns") else None,
        "inter_token_ms_mean": usage.inter_token_ns_mean if usage.HasField("inter_token_ns_mean") else None,
        "inter_token_ms_max": usage.inter_token_ns_max if usage.HasField("inter_token_ns_max") else None,
    }
    return {
        "cached_tokens": {name: cached.get(name, 0) for name in _TIERS.values()},
        "recomputed_tokens": usage.recomputed_tokens,
        "attended_fraction": _finite(usage.attended_fraction) if usage.HasField("attended_fraction") else None,
        "recall": _finite(usage.recall) if usage.HasField("recall") else None,
        **{name: None if value is None else round(value / 1e6, 3) for name, value in times.items()},
    }


def token_text(data: bytes) -> str:
    r"""A token as text; bytes that are no whole characters as `\xe2`."""
    return data.decode(errors="backslashreplace")


def _cached(usage: pb.Usage) -> dict[str, int]:
    return {_TIERS[entry.tier]: entry.tokens for entry in usage.cached_tokens if entry.tier in _TIERS}


def _is_end(newest: pb.TokenGenerated, finished: pb.Finished) -> bool:
    """Whether a text ended with this token, which is no part of it."""
    return finished.reason == pb.FINISH_REASON_STOP and not newest.text


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None


def _chat_logprob(entry: pb.TokenLogprobs) -> Fields:
    return {**_likely(entry.chosen), "top_logprobs": [_likely(each) for each in entry.top]}


def _likely(entry: pb.TokenLogprob) -> Fields:
    return {"token": token_text(entry.text), "logprob": _logprob(entry), "bytes": list(entry.text)}


def _logprob(entry: pb.TokenLogprob) -> float | None:
    """JSON has no infinity: what cannot be has the number that OpenAI's API writes for it; what is none is null."""
    return None if math.isnan(entry.logprob) else max(entry.logprob, IMPOSSIBLE)
