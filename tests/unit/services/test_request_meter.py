import asyncio
import json
from typing import Any

import pytest
from starlette.responses import PlainTextResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from h3kv.core.errors import QuotaError
from h3kv.telemetry import names
from h3kv.telemetry.metric import Service
from h3kv.telemetry.metrics_page import MetricsPage
from services.gateway.metrics import RequestMeter, call_of, note_tenant


class Served:
    """A metered application and what it sends."""

    def __init__(self, app: ASGIApp, *, requests_max: int = 8) -> None:
        self.page = MetricsPage(Service.GATEWAY)
        self.meter = RequestMeter(
            app,
            page=self.page,
            routes=frozenset({"/known", "/known/{id}"}),
            requests_max=requests_max,
            free=frozenset({"/free"}),
        )

    async def ask(self, path: str, *, headers: dict[str, str] | None = None) -> list[Message]:
        sent: list[Message] = []

        async def send(message: Message) -> None:
            sent.append(message)

        async def receive() -> Message:
            return {"type": "http.request", "body": b"", "more_body": False}

        raw = [(name.encode(), value.encode()) for name, value in (headers or {}).items()]
        scope: dict[str, Any] = {"type": "http", "method": "GET", "path": path, "headers": raw}
        await self.meter(scope, receive, send)
        return sent

    def count(self, route: str, status: int) -> float:
        return self.page.value(names.HTTP_REQUESTS, route=route, status=str(status))

    @property
    def in_flight(self) -> float:
        return self.page.value(names.HTTP_IN_FLIGHT)


async def greet(scope: Scope, receive: Receive, send: Send) -> None:
    await PlainTextResponse(call_of(scope).request_id)(scope, receive, send)


def header(sent: list[Message], name: bytes) -> bytes | None:
    return dict(sent[0]["headers"]).get(name)


def test_answers_are_counted_by_route_and_named() -> None:
    served = Served(greet)
    sent = asyncio.run(served.ask("/known", headers={"x-request-id": "r-1"}))
    assert header(sent, b"x-request-id") == sent[1]["body"] == b"r-1"
    asyncio.run(served.ask("/whatever/1"))
    asyncio.run(served.ask("/whatever/2"))
    for name in ("a", "b/c"):
        asyncio.run(served.ask(f"/known/{name}"))
    counts = [served.count(route, 200) for route in ("/known", "/known/{id}", "other")]
    assert (counts, served.in_flight) == ([1, 2, 2], 0)


def test_requests_beyond_the_bound_are_refused_to_be_sent_again() -> None:
    opened = asyncio.Event()

    async def wait(scope: Scope, receive: Receive, send: Send) -> None:
        await opened.wait()
        await greet(scope, receive, send)

    served = Served(wait, requests_max=1)

    async def both() -> list[Message]:
        first = asyncio.ensure_future(served.ask("/known"))
        await asyncio.sleep(0)
        assert served.in_flight == 1
        refused = await served.ask("/known")
        free = asyncio.ensure_future(served.ask("/free"))
        await asyncio.sleep(0)
        assert served.in_flight == 1
        opened.set()
        assert (await first)[0]["status"] == (await free)[0]["status"] == 200
        return refused

    refused = asyncio.run(both())
    assert (refused[0]["status"], header(refused, b"retry-after")) == (429, b"1")
    assert json.loads(refused[1]["body"])["error"]["code"] == "peer_busy"
    assert (served.count("/known", 429), served.count("/known", 200), served.in_flight) == (1, 1, 0)


def test_one_tenant_gets_half_of_the_requests_from_when_its_key_is_known() -> None:
    opened = asyncio.Event()

    async def wait(scope: Scope, receive: Receive, send: Send) -> None:
        note_tenant(scope, dict(scope["headers"])[b"tenant"].decode())
        await opened.wait()
        await greet(scope, receive, send)

    served = Served(wait, requests_max=8)

    async def ask() -> int:
        def by(tenant: str) -> asyncio.Future[list[Message]]:
            return asyncio.ensure_future(served.ask("/known", headers={"tenant": tenant}))

        first = [by("ann") for _ in range(4)]
        await asyncio.sleep(0)
        with pytest.raises(QuotaError, match="4 requests of the tenant") as caught:
            await by("ann")
        assert caught.value.retry_after_s == 1
        others = [by("bob"), *(by("") for _ in range(3))]
        await asyncio.sleep(0)
        opened.set()
        await asyncio.gather(*first, *others)
        # Those that ended count no more.
        assert (await by("ann"))[0]["status"] == 200
        return served.count("/known", 200)

    assert asyncio.run(ask()) == 9
    assert (served.in_flight, served.meter._of_tenants) == (0, {})


@pytest.mark.parametrize(("has_begun", "status"), [(True, 499), (False, 503)])
def test_an_end_of_the_process_cuts_what_has_begun_and_refuses_what_has_not(has_begun: bool, status: int) -> None:
    async def wait(scope: Scope, receive: Receive, send: Send) -> None:
        if has_begun:
            await send({"type": "http.response.start", "status": 200, "headers": []})
        await asyncio.Event().wait()

    served = Served(wait)

    async def end() -> list[Message]:
        asked = asyncio.ensure_future(served.ask("/known"))
        await asyncio.sleep(0)
        asked.cancel()
        return await asked

    sent = asyncio.run(end())
    assert (served.count("/known", status), served.in_flight) == (1, 0)
    assert sent[0]["status"] == (200 if has_begun else 503)
    assert len(sent) == (1 if has_begun else 2)
