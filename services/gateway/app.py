"""Puts the gateway together, serves until it is told to end, and takes it apart again."""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import logging
import os
import socket
import time
from dataclasses import replace
from pathlib import Path
from typing import Final

import uvicorn
from fastapi import FastAPI, Request
from starlette.exceptions import HTTPException
from starlette.responses import Response
from starlette.types import ASGIApp

from h3kv.core.errors import AddressInUseError, ConfigError, H3Error
from h3kv.core.units import NS_PER_S
from h3kv.rpc.addresses import UnixAddress
from h3kv.rpc.async_client import AsyncPeerChannel
from h3kv.rpc.unix_socket import SocketClaim
from h3kv.service_process import open_process
from h3kv.telemetry import spans
from h3kv.telemetry.event_log import log_event
from h3kv.telemetry.metric import Service
from h3kv.telemetry.process_telemetry import ProcessTelemetry
from services.gateway.answers import Answerer
from services.gateway.connections import bounded_protocol
from services.gateway.documents import DocumentHandler
from services.gateway.draining import DrainingServer
from services.gateway.health import Health
from services.gateway.hosts import HostCheck
from services.gateway.metrics import RequestMeter, call_of
from services.gateway.problems import GONE, ClientGoneError, error_response, plain_response
from services.gateway.requests import BodyBounds
from services.gateway.routes import ROUTES, WATCHED, Handlers, add_routes
from services.gateway.settings import HttpSettings, Settings
from services.gateway.tenants import Tenants, read_tenants
from services.gateway.tokens import TokenCounter
from services.gateway.worker import Worker

BACKLOG: Final = 512
SERVER_ERROR: Final = 500

_log = logging.getLogger(__name__)


def serve() -> None:
    """Run the process to its end.

    Raises:
        H3Error: it cannot start; the message says what to do.
    """
    with open_process(Service.GATEWAY, Settings) as process, contextlib.ExitStack() as stack:
        settings, telemetry = process.settings, process.telemetry
        log_event(_log, "metrics", {spans.PEER: settings.instance, spans.ADDRESS: telemetry.server.url})
        listener = open_listener(settings.http, stack)
        process.stop.check()
        asyncio.run(_serve(settings, telemetry, listener))


def make_app(settings: Settings, telemetry: ProcessTelemetry, channel: AsyncPeerChannel) -> ASGIApp:
    """The application, with a channel to gpu_worker that its owner closes.

    Raises:
        ConfigError: the file of tenants cannot be used.
    """
    tenants = read_tenants(settings.tenants_file)
    app = FastAPI(openapi_url=None, redirect_slashes=False)
    app.state.handlers = _handlers(settings, Worker(channel, answer_ns=settings.request_ns), telemetry, tenants)
    add_routes(app)
    _add_problems(app)
    guarded = app if tenants.need_keys else _guarded(app, settings.http)
    return RequestMeter(
        guarded, page=telemetry.metrics, routes=ROUTES, requests_max=settings.http.requests_max, free=WATCHED
    )


def _guarded(app: ASGIApp, http: HttpSettings) -> HostCheck:
    """The application where no key is needed: asked by those who mean it."""
    names = frozenset(name.lower() for name in (*http.names, http.host))
    is_named = bool(http.names) or not http.is_remote_allowed
    return HostCheck(app, names=names, is_any_host_fine=http.socket is not None or not is_named, open_paths=WATCHED)


def open_listener(http: HttpSettings, stack: contextlib.ExitStack) -> socket.socket:
    """A socket that listens, closed with the stack.

    Raises:
        ConfigError: the host is one that other machines reach, and that was not allowed; or a folder is missing.
        AddressInUseError: another process serves there.
    """
    if http.socket is not None:
        path = http.socket.absolute()
        claim = SocketClaim(UnixAddress(path))
        stack.callback(claim.release)
        listener = stack.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM))
        with claim.binding(group=None):
            listener.bind(os.fspath(path))
    else:
        _check_host(http)
        family = socket.AF_INET6 if ":" in http.host else socket.AF_INET
        listener = stack.enter_context(socket.socket(family, socket.SOCK_STREAM))
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind((http.host, http.port))
        except OSError as error:
            place = f"{http.host}:{http.port}"
            raise AddressInUseError(
                f"nothing can be served at {place} ({error}): end what serves there, or set http.port", address=place
            ) from error
    listener.listen(BACKLOG)
    return listener


def _check_host(http: HttpSettings) -> None:
    if http.is_remote_allowed or http.host == "localhost":
        return
    try:
        is_local = ipaddress.ip_address(http.host).is_loopback
    except ValueError:
        is_local = False
    if not is_local:
        raise ConfigError(
            f"http.host = {http.host}: other machines could use the node there, without a password unless tenants_file "
            "names one: name 127.0.0.1, or allow it with http.is_remote_allowed",
            field="http.host",
        )


async def _serve(settings: Settings, telemetry: ProcessTelemetry, listener: socket.socket) -> None:
    async with AsyncPeerChannel(settings.worker, credentials=settings.credentials.read()) as channel:
        config = uvicorn.Config(
            make_app(settings, telemetry, channel),
            http=bounded_protocol(seconds=settings.http.body_seconds, connections_max=settings.http.connections_max),
            loop="asyncio",
            ws="none",
            lifespan="off",
            log_config=None,
            log_level="warning",
            access_log=False,
            server_header=False,
        )
        log_event(_log, "serving", {spans.PEER: settings.instance, spans.ADDRESS: _shown(listener)})
        # Signals are uvicorn's while it serves, and come to `StopSignal` again afterwards.
        server = DrainingServer(config, drain_s=settings.drain_seconds, end_answers=channel.close)
        await server.serve(sockets=[listener])


def _add_problems(app: FastAPI) -> None:
    @app.exception_handler(H3Error)
    async def refuse(request: Request, error: H3Error) -> Response:
        response = error_response(error)
        named = {spans.REQUEST_ID: call_of(request.scope).request_id, spans.ERROR_REASON: error.reason}
        # Messages about requests quote them, and what users write is for no log.
        log_event(_log, "request_failed", named, error=error if response.status_code >= SERVER_ERROR else None)
        return response

    @app.exception_handler(ClientGoneError)
    async def forget(request: Request, error: ClientGoneError) -> Response:
        del request, error
        return Response(status_code=GONE)

    @app.exception_handler(HTTPException)
    async def refuse_path(request: Request, error: HTTPException) -> Response:
        known = ", ".join(sorted(ROUTES))
        said = f"{request.method} {request.url.path[:100]}: known are {known}"
        return plain_response(error.status_code, said, error.headers)

    @app.exception_handler(Exception)
    async def report(request: Request, error: Exception) -> Response:
        request_id = call_of(request.scope).request_id
        log_event(_log, "request_broken", {spans.REQUEST_ID: request_id}, error=error, level=logging.ERROR)
        return plain_response(500, f"a mistake of ours ended request {request_id}: the gateway's log says where")


def _handlers(settings: Settings, worker: Worker, telemetry: ProcessTelemetry, tenants: Tenants) -> Handlers:
    http = settings.http
    bounds = BodyBounds(http.body_max, settings.body_ns, "http.body_max")
    document_bounds = replace(bounds, bytes_max=http.document_max, setting="http.document_max")
    return Handlers(
        worker=worker,
        health=Health(worker),
        tenants=tenants,
        answerer=Answerer(worker, telemetry.tracer, bounds),
        documents=DocumentHandler(worker, document_bounds, change_bounds=bounds),
        counter=TokenCounter(worker, bounds),
        metrics=telemetry.metrics,
        began_s=time.time_ns() // NS_PER_S,
    )


def _shown(listener: socket.socket) -> str:
    name = listener.getsockname()
    if isinstance(name, str):
        return str(UnixAddress(Path(name)))
    host, port = name[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
