"""Documents: texts that are read once, and that chats name by their ids."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any, Final

from pydantic import Field, StringConstraints, ValidationError
from starlette.requests import Request

from h3kv.api.gpu_worker.v1 import gpu_worker_service_pb2 as pb
from h3kv.core.client_limits import DOCUMENT_NAME_BYTES_MAX, DOCUMENT_TTL_S_MAX
from services.gateway.bodies import Body
from services.gateway.metrics import call_of
from services.gateway.problems import FieldError, MediaTypeError, body_error
from services.gateway.requests import BodyBounds, check_no_query, media_type, read_body, read_bytes, unless_gone
from services.gateway.worker import Worker

ID_CHARACTERS_MAX: Final = 100
"""Of an id that is asked about: ours are shorter, so a cut one is nobody's."""

Ttl = Annotated[int, Field(ge=1, le=DOCUMENT_TTL_S_MAX)]

_STATES: Final = {
    pb.DOCUMENT_STATE_READING: "processing",
    pb.DOCUMENT_STATE_READY: "ready",
    pb.DOCUMENT_STATE_FAILED: "failed",
}


class DocumentOptions(Body):
    """What may be said about a new document besides its text."""

    name: str = ""
    ttl_seconds: Ttl | None = None
    pinned: bool = False


class DocumentBody(DocumentOptions):
    """Of `POST /v1/documents`."""

    text: Annotated[str, StringConstraints(min_length=1)]


class DocumentChange(Body):
    """Of `PATCH /v1/documents/{id}`."""

    ttl_seconds: Ttl | None = None
    pinned: bool | None = None


@dataclass(frozen=True, slots=True)
class DocumentHandler:
    """Answers requests about documents.

    Args:
        worker: which keeps them.
        bounds: of a body with a document.
        change_bounds: of a body without one.
    """

    worker: Worker
    bounds: BodyBounds
    change_bounds: BodyBounds

    async def create(self, request: Request, tenant: pb.Tenant) -> dict[str, Any]:
        """A new document: from JSON, or from plain text with its options in the query. Raises H3Error."""
        kind = media_type(request)
        if kind == "text/plain":
            options: DocumentOptions = _options(request)
            text = _decoded(await read_bytes(request, self.bounds))
        elif kind.startswith("multipart/"):
            raise MediaTypeError(f"{kind} is not supported: send JSON, or the text itself as text/plain", param=None)
        else:
            check_no_query(request)
            body = await read_body(request, DocumentBody, self.bounds)
            options, text = body, body.text
        if len(options.name.encode()) > DOCUMENT_NAME_BYTES_MAX:
            raise FieldError(f"name: longer than {DOCUMENT_NAME_BYTES_MAX} bytes: shorten it", param="name")
        asked = pb.CreateDocumentRequest(
            tenant=tenant, text=text, name=options.name, ttl_s=options.ttl_seconds, is_pinned=options.pinned
        )
        return document_fields(await unless_gone(request, self.worker.create_document(asked, call_of(request.scope))))

    async def show(self, request: Request, document: str, tenant: pb.Tenant) -> dict[str, Any]:
        """One document. Raises H3Error."""
        asked = pb.GetDocumentRequest(tenant=tenant, id=document[:ID_CHARACTERS_MAX])
        return document_fields(await self.worker.document(asked, call_of(request.scope)))

    async def show_all(self, request: Request, tenant: pb.Tenant) -> dict[str, Any]:
        """All documents of a tenant, oldest first. Raises H3Error."""
        found = await self.worker.documents(pb.ListDocumentsRequest(tenant=tenant), call_of(request.scope))
        return {"object": "list", "data": [document_fields(each) for each in found], "has_more": False}

    async def change(self, request: Request, document: str, tenant: pb.Tenant) -> dict[str, Any]:
        """A document after a change. Raises H3Error."""
        body = await read_body(request, DocumentChange, self.change_bounds)
        if body.ttl_seconds is None and body.pinned is None:
            raise FieldError("the body changes nothing: give ttl_seconds or pinned", param=None)
        asked = pb.UpdateDocumentRequest(
            tenant=tenant, id=document[:ID_CHARACTERS_MAX], ttl_s=body.ttl_seconds, is_pinned=body.pinned
        )
        return document_fields(await self.worker.update_document(asked, call_of(request.scope)))

    async def delete(self, request: Request, document: str, tenant: pb.Tenant) -> dict[str, Any]:
        """What became of a document that is forgotten. Raises H3Error."""
        asked = pb.DeleteDocumentRequest(tenant=tenant, id=document[:ID_CHARACTERS_MAX])
        is_erased = await self.worker.delete_document(asked, call_of(request.scope))
        return {"id": document, "object": "document", "deleted": True, "erased": is_erased}


def document_fields(document: pb.Document) -> dict[str, Any]:
    """A document as clients see it."""
    return {
        "id": document.id,
        "object": "document",
        "name": document.name or None,
        "status": _STATES.get(document.state, "processing"),
        "error": document.failure or None,
        "progress": {"done_tokens": document.done_tokens, "tokens": document.tokens},
        "kv_bytes": document.kv_bytes,
        "created_at": document.created_s,
        "expires_at": document.expires_s if document.HasField("expires_s") else None,
        "pinned": document.is_pinned,
    }


def _options(request: Request) -> DocumentOptions:
    """What the query says. Its values are text: numbers and truth values are read from it as JSON writes them."""
    given: dict[str, Any] = dict(request.query_params)
    if given.get("ttl_seconds", "").isdecimal():
        given["ttl_seconds"] = int(given["ttl_seconds"][:20])
    given["pinned"] = {"true": True, "false": False}.get(given.get("pinned", "false"), given.get("pinned"))
    try:
        return DocumentOptions.model_validate(given)
    except ValidationError as error:
        raise body_error(error) from error


def _decoded(body: bytes) -> str:
    if not body:
        raise FieldError("the text is empty: send one", param="text")
    try:
        return body.decode()
    except UnicodeDecodeError as error:
        raise FieldError(
            f"the text is no UTF-8 ({error.reason} at byte {error.start}): convert it", param="text"
        ) from error
