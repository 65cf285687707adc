"""`POST /tokenize`: what a prompt is in tokens, as vLLM's servers answer it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar

from pydantic import Field
from starlette.requests import Request

from h3kv.api.gpu_worker.v1 import gpu_worker_service_pb2 as pb
from services.gateway.bodies import Body, DocumentId
from services.gateway.chat import DOCUMENTS_MAX, Message, chat_of
from services.gateway.metrics import call_of
from services.gateway.problems import FieldError
from services.gateway.requests import BodyBounds, read_body
from services.gateway.worker import Worker


class TokenizeBody(Body):
    """Of `POST /tokenize`: a prompt or messages."""

    NEUTRAL: ClassVar[Mapping[str, object]] = {
        "add_generation_prompt": True,
        "continue_final_message": False,
        "return_token_strs": False,
    }

    model: str | None = None
    prompt: str | None = None
    messages: Annotated[list[Message], Field(min_length=1)] | None = None
    document_ids: Annotated[list[DocumentId], Field(max_length=DOCUMENTS_MAX)] | None = None
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

    async def count(self, request: Request, tenant: pb.Tenant) -> dict[str, Any]:
        """The answer. Raises H3Error."""
        call = call_of(request.scope)
        body = await read_body(request, TokenizeBody, self.bounds)
        model = (
            await self.worker.model(call) if body.model is None else await self.worker.require_model(body.model, call)
        )
        ids = await self.worker.tokenize(body.request(tenant), call)
        return {"count": len(ids), "max_model_len": model.context_tokens, "tokens": ids, "token_strs": None}
