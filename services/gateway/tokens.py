"""`POST /tokenize`: what a prompt is in tokens, as vLLM's servers answer it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, Final

from starlette.requests import Request

from h3kv.api.gpu_worker.v1 import gpu_worker_service_pb2 as pb
from h3kv.core.errors import QuotaError
from services.gateway.bodies import Body
from services.gateway.chat import DocumentIds, Messages, chat_of
from services.gateway.metrics import call_of
from services.gateway.problems import FieldError
from services.gateway.requests import BodyBounds, read_asked, unless_gone
from services.gateway.worker import Worker

AT_A_TIME_MAX: Final = 8
"""Prompts of one tenant that are counted at a time: that takes none of its tokens."""


class TokenizeBody(Body):
    """Of `POST /tokenize`: a prompt or messages."""

    NEUTRAL: ClassVar[Mapping[str, tuple[object, ...]]] = {
        "add_generation_prompt": (True,),
        "continue_final_message": (False,),
        "return_token_strs": (False,),
        "chat_template_kwargs": ({},),
    }

    model: str | None = None
    prompt: str | None = None
    messages: Messages | None = None
    document_ids: DocumentIds | None = None
    add_special_tokens: bool | None = None
    """Whether the model's begin token and the like are put before a prompt. A chat has those of its template."""

    def request(self, tenant: pb.Tenant) -> pb.TokenizeRequest:
        """The same for gpu_worker. Raises FieldError."""
        if (self.prompt is None) == (self.messages is None):
            raise FieldError("prompt or messages: give one of them", param="prompt")
        if self.messages is None:
            if self.document_ids is not None:
                raise FieldError("document_ids: only a chat has documents: give messages", param="document_ids")
            return pb.TokenizeRequest(text=self.prompt, tenant=tenant, is_bare=self.add_special_tokens is False)
        if self.add_special_tokens:
            rule = "a chat has those of its template: leave it out"
            raise FieldError(f"add_special_tokens: {rule}", param="add_special_tokens")
        return pb.TokenizeRequest(chat=chat_of(self.messages, self.document_ids or []), tenant=tenant)


@dataclass(frozen=True, slots=True)
class TokenCounter:
    """Answers such requests."""

    worker: Worker
    bounds: BodyBounds
    _counting: Counter[str] = field(default_factory=Counter)
    """Requests by the name of their tenant."""

    async def count(self, request: Request, tenant: pb.Tenant) -> dict[str, Any]:
        """The answer.

        Raises:
            QuotaError: the tenant has as many counted as it may at a time.
            H3Error: what else stands in the way.
            ClientGoneError: nobody waits for it any more.
        """
        if self._counting[tenant.name] >= AT_A_TIME_MAX:
            raise QuotaError(f"{AT_A_TIME_MAX} prompts are being counted: send it again later", retry_after_s=1)
        self._counting[tenant.name] += 1
        try:
            return await self._count(request, tenant)
        finally:
            self._counting[tenant.name] -= 1

    async def _count(self, request: Request, tenant: pb.Tenant) -> dict[str, Any]:
        call = call_of(request.scope)
        named, asked = await read_asked(
            request, TokenizeBody, self.bounds, make=lambda body: (body.model, body.request(tenant))
        )
        model = await self.worker.model(call) if named is None else await self.worker.require_model(named, call)
        ids = await unless_gone(request, self.worker.tokenize(asked, call))
        return {"count": len(ids), "max_model_len": model.context_tokens, "tokens": ids, "token_strs": None}
