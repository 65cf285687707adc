import asyncio
from typing import Any

import pytest
from starlette.responses import PlainTextResponse
from starlette.types import Message

from services.gateway.hosts import HostCheck


def status(
    host: str | None, origin: str | None = None, *, path: str = "/v1/models", is_any_host_fine: bool = False
) -> int:
    check = HostCheck(
        PlainTextResponse("x"),
        names=frozenset({"node.example", "127.0.0.1"}),
        is_any_host_fine=is_any_host_fine,
        open_paths=frozenset({"/health"}),
    )
    sent: list[Message] = []

    async def send(message: Message) -> None:
        sent.append(message)

    async def receive() -> Message:
        return {"type": "http.request", "body": b"", "more_body": False}

    given = {b"host": host, b"origin": origin}
    headers = [(name, value.encode("latin-1")) for name, value in given.items() if value is not None]
    scope: dict[str, Any] = {"type": "http", "method": "GET", "path": path, "headers": headers}
    asyncio.run(check(scope, receive, send))
    code: int = sent[0]["status"]
    return code


@pytest.mark.parametrize(
    "host",
    [
        "localhost",
        "localhost:8000",
        "LOCALHOST.",
        "x.localhost",
        "127.0.0.1:8000",
        "[::1]:8000",
        "10.1.2.3",
        "node.example",
    ],
)
def test_a_node_is_asked_by_its_names_and_addresses(host: str) -> None:
    assert status(host) == 200


@pytest.mark.parametrize(
    "host", [None, "", "evil.example", "localhost.evil.example", "127.0.0.1.evil.example:8000", "[", "\xff", "evil@x"]
)
def test_a_name_that_a_stranger_lets_lead_here_is_refused(host: str | None) -> None:
    assert status(host) == 403
    assert status(host, path="/health") == 200
    assert status(host, is_any_host_fine=True) == 200


@pytest.mark.parametrize(
    ("origin", "expected"),
    [
        ("http://localhost:3000", 200),
        ("http://127.0.0.1", 200),
        ("https://node.example", 200),
        ("http://10.1.2.3:8000", 200),
        ("http://10.9.9.9", 403),
        ("https://evil.example", 403),
        ("null", 403),
        ("", 403),
        ("http://[", 403),
    ],
)
def test_pages_of_other_sites_may_not_ask(origin: str, expected: int) -> None:
    assert status("10.1.2.3:8000", origin) == expected
