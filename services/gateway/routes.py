"""Which path is answered by what, and who may ask there."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

from fastapi import FastAPI, Request
from starlette.exceptions import HTTPException
from starlette.responses import JSONResponse, Response

from h3kv.api.gpu_worker.v1 import gpu_worker_service_pb2 as pb
from h3kv.core.errors import PeerError
from h3kv.telemetry.metrics_page import MetricsPage
from services.gateway.answers import Answerer
from services.gateway.chat import ChatBody
from services.gateway.documents import DocumentHandler
from services.gateway.health import Health
from services.gateway.metrics import call_of, note_tenant
from services.gateway.openai import CompletionBody
from services.gateway.problems import error_response
from services.gateway.requests import check_no_query
from services.gateway.tenants import Tenants
from services.gateway.tokens import TokenCounter
from services.gateway.worker import Worker

NOT_FOUND: Final = 404
COMPLETIONS: Final = "/v1/completions"
CHAT: Final = "/v1/chat/completions"
MODELS: Final = "/v1/models"
MODEL: Final = "/v1/models/{id}"
DOCUMENTS: Final = "/v1/documents"
DOCUMENT: Final = "/v1/documents/{id}"
TOKENIZE: Final = "/tokenize"
HEALTH: Final = "/health"
METRICS: Final = "/metrics"
WATCHED: Final = frozenset({HEALTH, METRICS})
"""Who watches the node asks here."""
ROUTES: Final = frozenset({COMPLETIONS, CHAT, MODELS, MODEL, DOCUMENTS, DOCUMENT, TOKENIZE, HEALTH, METRICS})


@dataclass(frozen=True, slots=True)
class Handlers:
    """What requests are answered from."""

    worker: Worker
    health: Health
    tenants: Tenants
    answerer: Answerer
    documents: DocumentHandler
    counter: TokenCounter
    metrics: MetricsPage
    began_s: int
    """When this process began, in seconds since 1970."""


def add_routes(app: FastAPI) -> None:
    """Answer at all paths. All but the health of the node need the key of a tenant, where there are tenants."""
    _add_answers(app)
    _add_documents(app)
    _add_node(app)


def _add_answers(app: FastAPI) -> None:
    @app.post(COMPLETIONS)
    async def complete(request: Request) -> Response:
        return await _handlers(request).answerer.answer(request, CompletionBody, _tenant(request))

    @app.post(CHAT)
    async def chat(request: Request) -> Response:
        return await _handlers(request).answerer.answer(request, ChatBody, _tenant(request))

    @app.post(TOKENIZE)
    async def tokenize(request: Request) -> Response:
        return JSONResponse(await _handlers(request).counter.count(request, _tenant(request)))


def _add_documents(app: FastAPI) -> None:
    @app.post(DOCUMENTS)
    async def create(request: Request) -> Response:
        return JSONResponse(await _handlers(request).documents.create(request, _tenant(request, has_query=True)))

    @app.get(DOCUMENTS)
    async def show_all(request: Request) -> Response:
        return JSONResponse(await _handlers(request).documents.show_all(request, _tenant(request)))

    @app.get(DOCUMENT)
    async def show(request: Request, id: str) -> Response:
        return JSONResponse(await _handlers(request).documents.show(request, id, _tenant(request)))

    @app.post(DOCUMENT)
    @app.patch(DOCUMENT)
    async def change(request: Request, id: str) -> Response:
        return JSONResponse(await _handlers(request).documents.change(request, id, _tenant(request)))

    @app.delete(DOCUMENT)
    async def delete(request: Request, id: str) -> Response:
        return JSONResponse(await _handlers(request).documents.delete(request, id, _tenant(request)))


def _add_node(app: FastAPI) -> None:
    @app.get(MODELS)
    async def models(request: Request) -> Response:
        _tenant(request)
        handlers = _handlers(request)
        found = await handlers.worker.model(call_of(request.scope))
        return JSONResponse({"object": "list", "data": [model_fields(found, handlers.began_s)]})

    # Names of models may have slashes.
    @app.get(MODEL.replace("{id}", "{id:path}"))
    async def model(request: Request, id: str) -> Response:
        _tenant(request)
        handlers = _handlers(request)
        found = await handlers.worker.require_model(id, call_of(request.scope))
        return JSONResponse(model_fields(found, handlers.began_s))

    @app.get(HEALTH)
    async def health(request: Request) -> Response:
        try:
            found = await _handlers(request).health.model()
        except PeerError as error:
            return error_response(error)
        return JSONResponse({"status": "serving", "model": found})

    @app.get(METRICS)
    async def metrics(request: Request) -> Response:
        if _handlers(request).tenants.need_keys:
            # They tell of all tenants: the process serves them at a port of its own.
            raise HTTPException(NOT_FOUND)
        page, content_type = _handlers(request).metrics.render(request.headers.get("accept", ""))
        return Response(page, media_type=content_type)


def model_fields(model: pb.GetModelResponse, created_s: int) -> dict[str, Any]:
    """One entry of the list of models."""
    return {
        "id": model.name,
        "object": "model",
        "created": created_s,
        "owned_by": "h3",
        "max_model_len": model.context_tokens,
    }


def _handlers(request: Request) -> Handlers:
    handlers = request.app.state.handlers
    assert isinstance(handlers, Handlers)
    return handlers


def _tenant(request: Request, *, has_query: bool = False) -> pb.Tenant:
    """Who asks, noted for the log and for its share of requests.

    Raises:
        ApiKeyError: nobody knows.
        QuotaError: the tenant has as many requests as it may.
        FieldError: there is a query, and there may be none.
    """
    tenant = _handlers(request).tenants.find(request.headers.get("authorization"))
    note_tenant(request.scope, tenant.name)
    if not has_query:
        check_no_query(request)
    return tenant
