"""Between the messages of gpu_worker and the nouns of the engine. What comes in is checked here."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from h3kv.api.gpu_worker.v1 import gpu_worker_service_pb2 as pb
from h3kv.core.errors import InternalError, RequestError
from h3kv.core.types import Tier
from h3kv.engine.events import Event, Finished, PrefillProgress, RequestStatistics, TokenGenerated
from h3kv.engine.request import Request, SamplingParameters
from h3kv.engine.stopping import FinishReason
from h3kv.models.tokenizer import Tokenizer
from h3kv.rpc.convert import tier_message

TENANT_BYTES_MAX = 64
ROLES = ("system", "user", "assistant")

_REASONS: Mapping[FinishReason, pb.FinishReason] = {
    FinishReason.STOP: pb.FINISH_REASON_STOP,
    FinishReason.LENGTH: pb.FINISH_REASON_LENGTH,
    FinishReason.CANCELLED: pb.FINISH_REASON_CANCELLED,
}


@dataclass(frozen=True, slots=True)
class PromptReader:
    """Makes prompts of this process's model.

    Args:
        tokenizer: of the model; its threads are its own.
        max_new_tokens: length of an answer whose request names none.
    """

    tokenizer: Tokenizer
    max_new_tokens: int

    def read_request(self, message: pb.GenerateRequest) -> Request:
        """The request in a message. Raises RequestError for what cannot be answered by any model."""
        if len(message.tenant) > TENANT_BYTES_MAX:
            raise RequestError(f"tenant has {len(message.tenant)} bytes: up to {TENANT_BYTES_MAX} are allowed")
        return Request(
            prompt=tuple(self.read_prompt(message)),
            sampling=self._sampling(message.sampling),
            tenant=message.tenant,
        )

    def read_prompt(self, message: pb.GenerateRequest | pb.TokenizeRequest) -> list[int]:
        """Token numbers of a prompt. Raises RequestError without one, or where the chat template refuses it."""
        kind = message.WhichOneof("prompt")
        if kind == "tokens" and isinstance(message, pb.GenerateRequest):
            return list(message.tokens.ids)
        if kind == "text":
            return self.tokenizer.encode(message.text, add_special_tokens=True)
        if kind == "chat":
            return self.tokenizer.encode(self.tokenizer.apply_chat(_messages(message.chat)))
        raise RequestError("prompt: none was given; give a text, a chat, or tokens")

    def _sampling(self, message: pb.Sampling) -> SamplingParameters:
        given = {field.name: value for field, value in message.ListFields()}
        for name in ("stop", "stop_token_ids"):
            given[name] = tuple(given.get(name, ()))
        return SamplingParameters(**{"max_new_tokens": self.max_new_tokens, **given})


def event_message(event: Event) -> pb.GenerateResponse:
    """An event as messages write it. One that ends with an error has no message."""
    match event:
        case PrefillProgress():
            progress = pb.PrefillProgress(
                done_tokens=event.done_tokens, cached_tokens=event.cached_tokens, prompt_tokens=event.prompt_tokens
            )
            return pb.GenerateResponse(progress=progress)
        case TokenGenerated():
            return pb.GenerateResponse(token=pb.TokenGenerated(id=event.token, text=event.text))
        case Finished():
            finished = pb.Finished(reason=_REASONS[event.reason], usage=_usage(event.statistics))
            return pb.GenerateResponse(finished=finished)
        case _:
            raise InternalError(f"{type(event).__name__} has no message")


def tier_tokens(tokens: Mapping[Tier, int]) -> list[pb.TierTokens]:
    """Tokens by tier as messages write them, without the tiers that have none."""
    return [pb.TierTokens(tier=tier_message(tier), tokens=count) for tier, count in tokens.items() if count]


def _usage(statistics: RequestStatistics) -> pb.Usage:
    gaps_ns = statistics.inter_token_ns
    return pb.Usage(
        prompt_tokens=statistics.prompt_tokens,
        cached_tokens=tier_tokens(statistics.cached_tokens),
        generated_tokens=statistics.generated_tokens,
        waiting_ns=statistics.waiting_ns,
        prefill_ns=statistics.prefill_ns,
        time_to_first_token_ns=statistics.time_to_first_token_ns,
        inter_token_ns_mean=sum(gaps_ns) // len(gaps_ns) if gaps_ns else None,
        inter_token_ns_max=max(gaps_ns) if gaps_ns else None,
        recall=statistics.recall,
    )


def _messages(chat: pb.Chat) -> list[dict[str, str]]:
    if not chat.messages:
        raise RequestError("messages: none was given; give at least one")
    for place, message in enumerate(chat.messages):
        if message.role not in ROLES:
            raise RequestError(f"messages[{place}].role = {message.role[:100]!r}: must be one of {', '.join(ROLES)}")
    return [{"role": message.role, "content": message.content} for message in chat.messages]
