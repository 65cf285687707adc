"""What the gateway counts, and what every answer carries: an id."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from typing import Final

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from h3kv.core.errors import PeerBusyError, PeerCancelledError, QuotaError
from h3kv.core.units import NS_PER_S
from h3kv.rpc.call_context import REQUEST_ID, CallContext, read_context
from h3kv.telemetry import names, spans
from h3kv.telemetry.event_log import log_event
from h3kv.telemetry.metric import Service
from h3kv.telemetry.metrics_page import MetricsPage
from h3kv.telemetry.tracing import Attributes
from services.gateway.problems import GONE, error_response

CALL: Final = "h3.call"
"""Where the scope of a request holds its `CallContext`."""
TENANT: Final = "h3.tenant"
"""Where it holds the name of who asks, once that is known."""
METER: Final = "h3.meter"
"""Where it holds the `RequestMeter`."""
RETRY_AFTER_S: Final = 1
"""Requests end all the time."""
ID: Final = "{id}"
"""End of a route whose paths end with an id."""
OTHER: Final = "other"
"""Route of requests for paths that are not served: their number is not bounded."""

_log = logging.getLogger(__name__)


class RequestMeter:
    """Wraps the application: counts requests, bounds them, names them.

    Args:
        app: what answers.
        page: receives counts.
        routes: paths that are served; `/v1/models/{id}` stands for all that begin like it.
        requests_max: at a time; further ones are refused. A tenant that has a name gets at most half of them.
        free: paths that do not count among these: those who watch the node see it under load as well.
    """

    def __init__(
        self,
        app: ASGIApp,
        *,
        page: MetricsPage,
        routes: frozenset[str],
        requests_max: int,
        free: frozenset[str] = frozenset(),
    ) -> None:
        self._app = app
        self._page = page
        self._routes = routes
        self._requests_max = requests_max
        self._free = free
        self._in_flight = 0
        self._tenant_max = max(requests_max // 2, 1)
        self._of_tenants: Counter[str] = Counter()
        page.gauge(names.HTTP_IN_FLIGHT, 0)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """As ASGI says."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        call = scope[CALL] = _named(scope)
        scope[METER] = self
        status, began_ns, has_begun = GONE, time.monotonic_ns(), False

        async def send_named(message: Message) -> None:
            nonlocal status, has_begun
            if message["type"] == "http.response.start":
                status, has_begun = message["status"], True
                message["headers"] = [*message["headers"], (REQUEST_ID.encode(), call.request_id.encode())]
            await send(message)

        counted = int(scope["path"] not in self._free)
        self._change(counted)
        try:
            is_fine = not counted or self._in_flight <= self._requests_max
            app = self._app if is_fine else self._refusal()
            await app(scope, receive, send_named)
        except asyncio.CancelledError:
            # Only the end of the process cancels requests. An answer that has begun is cut off.
            status = GONE
            if not has_begun:
                ending = PeerCancelledError("the gateway ends", peer=Service.GATEWAY)
                await error_response(ending)(scope, receive, send_named)
        finally:
            self._change(-counted)
            self._end_of(scope.get(TENANT))
            self._report(scope, status, time.monotonic_ns() - began_ns)

    def note_tenant(self, scope: Scope, tenant: str) -> None:
        """It is known now whose a request is, until it has ended.

        Raises:
            QuotaError: the tenant has as many as it may.
        """
        scope[TENANT] = tenant
        self._of_tenants[tenant] += 1
        if tenant and self._of_tenants[tenant] > self._tenant_max:
            message = f"{self._tenant_max} requests of the tenant are being answered: send it again later"
            raise QuotaError(message, retry_after_s=RETRY_AFTER_S)

    def _end_of(self, tenant: str | None) -> None:
        if tenant is not None:
            self._of_tenants[tenant] -= 1
            if not self._of_tenants[tenant]:
                del self._of_tenants[tenant]

    def _change(self, by: int) -> None:
        self._in_flight += by
        self._page.gauge(names.HTTP_IN_FLIGHT, self._in_flight)

    def _refusal(self) -> ASGIApp:
        message = f"{self._requests_max} requests are being answered: send it again later"
        return error_response(PeerBusyError(message, peer=Service.GATEWAY))

    def _route(self, path: str) -> str:
        """What requests for a path are counted under."""
        if path in self._routes:
            return path
        begins = (route for route in self._routes if route.endswith(ID) and path.startswith(route.removesuffix(ID)))
        return next(begins, OTHER)

    def _report(self, scope: Scope, status: int, duration_ns: int) -> None:
        path = scope["path"]
        route = self._route(path)
        self._page.count(names.HTTP_REQUESTS, route=route, status=str(status))
        self._page.observe(names.HTTP_DURATION, duration_ns / NS_PER_S, route=route)
        ended: Attributes = {
            spans.REQUEST_ID: call_of(scope).request_id,
            spans.OUTCOME: str(status),
            spans.DURATION_NS: duration_ns,
            **({spans.TENANT: scope[TENANT]} if scope.get(TENANT) else {}),
        }
        level = logging.INFO if path.startswith("/v1/") else logging.DEBUG
        log_event(_log, "request_ended", ended, level=level)


def note_tenant(scope: Scope, tenant: str) -> None:
    """See `RequestMeter.note_tenant`."""
    meter = scope[METER]
    assert isinstance(meter, RequestMeter)
    meter.note_tenant(scope, tenant)


def call_of(scope: Scope) -> CallContext:
    """Id and trace of a request."""
    call = scope[CALL]
    assert isinstance(call, CallContext)
    return call


def _named(scope: Scope) -> CallContext:
    """What the client sent, or new: a malformed id could break a log."""
    sent = ((name.decode("latin-1"), value.decode("latin-1")) for name, value in scope["headers"])
    return read_context(tuple(sent))
