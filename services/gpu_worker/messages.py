"""Between the messages of gpu_worker and the nouns of the engine. What comes in is checked here."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, Final

from h3kv.api.gpu_worker.v1 import gpu_worker_service_pb2 as pb
from h3kv.core.client_limits import ANSWERS_MAX, PROMPTS_MAX
from h3kv.core.errors import InternalError, RequestError
from h3kv.core.types import Tier
from h3kv.engine.events import Event, Finished, PrefillProgress, RequestStatistics, TokenGenerated, TokenLogprobs
from h3kv.engine.request import Request, SamplingParameters
from h3kv.engine.stopping import FinishReason
from h3kv.models.grammars import CompiledGrammar, GrammarCompiler, GrammarKind
from h3kv.models.least_tokens import LeastTokens
from h3kv.models.tokenizer import Tokenizer
from h3kv.rpc.convert import tier_message
from services.gpu_worker.chats import DocumentTexts, read_chat

ROOM_TOKENS: Final = 8192
"""Prompt and answer where nobody says how much there is."""
QUOTA_LENGTH: Final = 4096
"""Longest answer of a tenant with a quota, where its request names none."""
LONG_CHARACTERS: Final = 512 << 10
"""A prompt that takes a while to be cut into tokens."""
TENANT_BYTES_MAX: Final = 64
"""Of a tenant's name, and of its salt."""

_REASONS: Mapping[FinishReason, pb.FinishReason] = {
    FinishReason.STOP: pb.FINISH_REASON_STOP,
    FinishReason.LENGTH: pb.FINISH_REASON_LENGTH,
    FinishReason.CANCELLED: pb.FINISH_REASON_CANCELLED,
}

TokenBytes = Callable[[int], bytes]
"""UTF-8 bytes of a token, perhaps parts of characters."""


class PromptReader:
    """Makes requests to this process's model from messages. Thread-safe.

    Args:
        tokenizer: of the model; its threads are its own.
        max_new_tokens: length of an answer whose request names none; None: what its prompt leaves of the room.
        documents: where chats find the texts of documents; None: there are none.
        room_tokens: that prompt and answer have together.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        max_new_tokens: int | None,
        documents: DocumentTexts | None = None,
        *,
        room_tokens: int = ROOM_TOKENS,
    ) -> None:
        self.tokenizer = tokenizer
        self._max_new_tokens = max_new_tokens
        self._room_tokens = room_tokens
        self._documents = documents
        self._grammars = GrammarCompiler(tokenizer)
        self._least = LeastTokens(tokenizer)

    def read_request(
        self, message: pb.GenerateRequest, *, prompt: tuple[int, ...] | None = None, length_max: int | None = None
    ) -> Request:
        """The request in a message, its grammar compiled.

        Args:
            message: as it came.
            prompt: its tokens, where they are known already.
            length_max: what it may be longest, and is where it says nothing; None: anything.

        Raises:
            RequestError: no model could answer it, or not this one.
            DocumentNotFoundError: a document of the chat is not the tenant's.
        """
        check_tenant(message.tenant)
        # What is cheap to refuse is refused before a long prompt is cut into tokens.
        sampling = self._sampling(message.sampling, message.tenant.salt)
        read, may_be_cut = tuple(self.read_prompt(message)) if prompt is None else prompt, False
        if not message.sampling.HasField("max_new_tokens"):
            length = length_max or self.default_length(len(read), message.tenant)
            sampling, may_be_cut = replace(sampling, max_new_tokens=length), True
        elif length_max is not None and sampling.max_new_tokens > length_max:
            raise RequestError(f"max_new_tokens = {sampling.max_new_tokens}: {length_max} were admitted")
        return Request(prompt=read, sampling=sampling, tenant=message.tenant.salt, may_be_cut=may_be_cut)

    def default_length(self, prompt_tokens: int, tenant: pb.Tenant, *, answers: int = 1) -> int:
        """Longest answer where a request names none. One with a quota does not reserve all of it for that."""
        if self._max_new_tokens is not None:
            return self._max_new_tokens
        length, per_minute = self._room_tokens - prompt_tokens, tokens_per_minute(tenant)
        if per_minute is not None:
            length = min(length, QUOTA_LENGTH, (per_minute - prompt_tokens) // answers)
        return max(length, 1)

    def least_tokens(self, message: pb.GenerateRequest) -> int:
        """Tokens that a long prompt has at least, its documents left out; 0 for one that is cut at once."""
        texts = [message.text, *(said.content for said in message.chat.messages)]
        return sum(map(self._least.of, texts)) if sum(map(len, texts)) >= LONG_CHARACTERS else 0

    def read_prompt(self, message: pb.GenerateRequest | pb.TokenizeRequest) -> list[int]:
        """Token numbers of a prompt.

        Raises:
            RequestError: there is none, or the chat template refuses it.
            DocumentNotFoundError: a document of the chat is not the tenant's.
        """
        check_tenant(message.tenant)
        match message.WhichOneof("prompt"), message:
            case "tokens", pb.GenerateRequest():
                return list(message.tokens.ids)
            case "text", pb.TokenizeRequest():
                return self.tokenizer.encode(message.text, add_special_tokens=not message.is_bare)
            case "text", _:
                return self.tokenizer.encode(message.text, add_special_tokens=True)
            case "chat", _:
                if self.tokenizer.chat_template is None:
                    raise RequestError("messages: this model has no chat template; give it a plain prompt")
                return self._read_chat(message)
            case _:
                raise RequestError("prompt: none was given; give a text, a chat, or tokens")

    def _read_chat(self, message: pb.GenerateRequest | pb.TokenizeRequest) -> list[int]:
        tenant, ids = message.tenant.name, list(message.chat.document_ids)
        chat = read_chat(message.chat, tenant=tenant, documents=self._documents)
        prompt = self.tokenizer.encode(self.tokenizer.apply_chat(chat.messages, tools=chat.tools))
        if ids and self._documents is not None and isinstance(message, pb.GenerateRequest):
            self._documents.note_prompt(tenant, ids, prompt)
        return prompt

    def _sampling(self, message: pb.Sampling, tenant: bytes) -> SamplingParameters:
        given: dict[str, Any] = {field.name: value for field, value in message.ListFields()}
        for name in ("stop", "stop_token_ids"):
            given[name] = tuple(given.get(name, ()))
        given["logit_bias"] = tuple(sorted(message.logit_bias.items()))
        given["grammar"] = self._grammar(message.grammar, tenant) if message.HasField("grammar") else None
        return SamplingParameters(**given)

    def _grammar(self, message: pb.Grammar, tenant: bytes) -> CompiledGrammar:
        match message.WhichOneof("kind"):
            case "json_object" if message.json_object:
                return self._grammars.compile(GrammarKind.JSON_OBJECT, tenant=tenant)
            case "json_schema":
                return self._grammars.compile(GrammarKind.JSON_SCHEMA, message.json_schema, tenant=tenant)
            case "lark":
                return self._grammars.compile(GrammarKind.LARK, message.lark, tenant=tenant)
            case _:
                raise RequestError("response_format: no kind was given; give json_object, json_schema or a grammar")


def check_tenant(tenant: pb.Tenant) -> None:
    """Check the sizes of a tenant's name and salt.

    Raises:
        RequestError: one is too long.
    """
    for field, size in (("name", len(tenant.name.encode())), ("salt", len(tenant.salt))):
        if size > TENANT_BYTES_MAX:
            raise RequestError(f"tenant.{field} has {size} bytes: up to {TENANT_BYTES_MAX} are allowed")


def tokens_per_minute(tenant: pb.Tenant) -> int | None:
    """What a tenant may have; None: any number."""
    return tenant.tokens_per_minute if tenant.HasField("tokens_per_minute") else None


def check_admit(message: pb.AdmitRequest) -> None:
    """Check a request of Admit but for its prompts.

    Raises:
        RequestError: a number is out of its bounds, or a prompt is another tenant's.
    """
    check_tenant(message.tenant)
    rules = (
        ("prompts", len(message.prompts), PROMPTS_MAX),
        ("answers", message.answers, ANSWERS_MAX),
        ("max_new_tokens", message.max_new_tokens if message.HasField("max_new_tokens") else 1, 2**31 - 1),
    )
    for name, value, most in rules:
        if not 1 <= value <= most:
            raise RequestError(f"{name} = {value}: must be 1 to {most}")
    if any(prompt.tenant != message.tenant for prompt in message.prompts):
        raise RequestError("prompts: each must have the tenant of the request")


def event_message(event: Event, token_bytes: TokenBytes) -> pb.GenerateResponse:
    """An event as messages write it. One that ends with an error has no message."""
    match event:
        case PrefillProgress():
            progress = pb.PrefillProgress(
                done_tokens=event.done_tokens, cached_tokens=event.cached_tokens, prompt_tokens=event.prompt_tokens
            )
            return pb.GenerateResponse(progress=progress)
        case TokenGenerated():
            logprobs = None if event.logprobs is None else _logprobs(event.token, event.logprobs, token_bytes)
            return pb.GenerateResponse(token=pb.TokenGenerated(id=event.token, text=event.text, logprobs=logprobs))
        case Finished():
            finished = pb.Finished(reason=_REASONS[event.reason], usage=_usage(event.statistics))
            return pb.GenerateResponse(finished=finished)
        case _:
            raise InternalError(f"{type(event).__name__} has no message")


def tier_tokens(tokens: Mapping[Tier, int]) -> list[pb.TierTokens]:
    """Tokens by tier as messages write them, without the tiers that have none."""
    return [pb.TierTokens(tier=tier_message(tier), tokens=count) for tier, count in tokens.items() if count]


def _logprobs(token: int, logprobs: TokenLogprobs, token_bytes: TokenBytes) -> pb.TokenLogprobs:
    def message(named: int, logprob: float) -> pb.TokenLogprob:
        return pb.TokenLogprob(id=named, logprob=logprob, text=token_bytes(named))

    top = [message(named, logprob) for named, logprob in logprobs.top]
    return pb.TokenLogprobs(chosen=message(token, logprobs.logprob), top=top)


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
        attended_fraction=statistics.attended_fraction,
        recomputed_tokens=statistics.recomputed_tokens,
    )
