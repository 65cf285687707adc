"""The load driver's own HTTP, against sockets that answer by script."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import pytest

from h3kv.bench.serve_client import Answer, Ask, Target, learn
from h3kv.bench.serve_http import Address, Connection, parse_address, parse_head
from h3kv.bench.serve_load import Outcome, all_at_once, at_times, one_by_one, over_connections
from h3kv.bench.serve_soak import check_whole
from h3kv.core.errors import ConfigError, PeerBusyError, PeerError, PeerUnavailableError, RequestError
from h3kv.core.types import Tier

OK = b"HTTP/1.1 200 OK\r\n"
USAGE = (
    b'{"choices":[],"usage":{"prompt_tokens":9,"completion_tokens":2,"prompt_tokens_details":{"cached_tokens":5},'
    b'"h3":{"cached_tokens":{"device":1,"host":4,"nvme":0}}}}'
)
EVENTS = (
    b": 1 of 9 prompt tokens read\n\n",
    b'data: {"choices":[{"index":0,"delta":{"role":"assistant","content":""},"finish_reason":null}]}\n\n',
    b'data: {"choices":[{"index":0,"text":"north ","finish_reason":null}]}\n\n',
    b'data:{"choices":[{"index":0,"delta":{"content":"sea"},"finish_reason":null}]}\r\n\r\n',
    b'data: {"choices":[{"index":0,"text":"","finish_reason":"length"}]}\n\n',
    b"data: " + USAGE + b"\n\ndata: [DONE]\n\n",
)


def chunked(pieces: Sequence[bytes]) -> bytes:
    """A body whose chunks are not its lines."""
    body, parts = b"".join(pieces), []
    for start in range(0, len(body), 50):
        part = body[start : start + 50]
        parts.append(b"%x\r\n%s\r\n" % (len(part), part))
    return OK + b"Transfer-Encoding: chunked\r\n\r\n" + b"".join(parts) + b"0\r\n\r\n"


def sized(status: bytes, body: bytes) -> bytes:
    return b"HTTP/1.1 %s\r\nContent-Length: %d\r\n\r\n%s" % (status, len(body), body)


class Script:
    """Answers requests in turn, the last answer for all others; an empty one closes the connection."""

    def __init__(self, *answers: bytes) -> None:
        self.answers = list(answers)
        self.requests: list[bytes] = []
        self.connections = 0

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        try:
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                length = int(parse_head(b"HTTP/1.1 200 OK\r\n" + head).headers.get("content-length", "0"))
                self.requests.append(head + await reader.readexactly(length))
                answer = self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]
                writer.write(answer)
                await writer.drain()
                if not answer or b"Connection: close" in answer:
                    return
        except asyncio.IncompleteReadError:
            return
        finally:
            writer.close()

    @asynccontextmanager
    async def target(self) -> AsyncIterator[Target]:
        server = await asyncio.start_server(self.serve, "127.0.0.1", 0)
        async with server:
            port = server.sockets[0].getsockname()[1]
            yield Target("server", Address("127.0.0.1", port), "tiny", key="secret")


def test_an_address_is_read_from_a_url_with_or_without_the_apis_own_path() -> None:
    assert parse_address("http://127.0.0.1:8000/v1") == Address("127.0.0.1", 8000)
    assert parse_address("http://host/behind/v1/") == Address("host", 80, "/behind")
    assert parse_address("https://host") == Address("host", 443, "", is_tls=True)


@pytest.mark.parametrize("url", ["127.0.0.1:8000", "ftp://host", "http://", "http://host:99999"])
def test_what_is_no_url_of_a_server_is_refused(url: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_address(url)
    assert caught.value.field == "url"


def test_an_answer_in_pieces_is_noted_with_its_text_times_and_usage() -> None:
    script = Script(chunked(EVENTS))

    async def ask() -> list[Answer]:
        async with script.target() as target:
            return await one_by_one(target, [Ask((1, 2, 3), 2), Ask(({"role": "user", "content": "x"},), 2)])

    answers = asyncio.run(ask())
    assert [answer.text for answer in answers] == ["north sea", "north sea"]
    for answer in answers:
        assert answer.sent_ns <= answer.piece_ns[0] <= answer.piece_ns[1] <= answer.end_ns
        assert len(answer.gaps_ns) == 1
        assert (answer.prompt_tokens, answer.answer_tokens, answer.cached_tokens) == (9, 2, 5)
        assert answer.cached_by_tier == {Tier.DEVICE: 1, Tier.HOST: 4, Tier.NVME: 0}
    assert script.connections == 1, "a connection is used again"
    assert script.requests[0].startswith(b"POST /v1/completions HTTP/1.1\r\n")
    assert b'"prompt":[1,2,3]' in script.requests[0]
    assert b"Authorization: Bearer secret" in script.requests[0]
    assert script.requests[1].startswith(b"POST /v1/chat/completions HTTP/1.1\r\n")


def test_bodies_end_with_their_length_or_with_the_connection() -> None:
    script = Script(sized(b"200 OK", b"one"), OK + b"Connection: close\r\n\r\ntwo", sized(b"200 OK", b"three"))

    async def read() -> list[bytes]:
        async with script.target() as target, Connection(target.address) as connection:
            return [await connection.body(await connection.request("GET", "/health")) for _ in range(3)]

    assert asyncio.run(read()) == [b"one", b"two", b"three"]
    assert script.connections == 2


def test_a_refusal_says_what_the_server_said() -> None:
    script = Script(sized(b"400 Bad Request", b"no such model"), sized(b"503 Service Unavailable", b"busy"))

    async def ask(target: Target) -> Answer:
        async with target.connection() as connection:
            return await target.answer(connection, Ask((1,), 1))

    async def both() -> None:
        async with script.target() as target:
            with pytest.raises(RequestError, match="answered 400: no such model"):
                await ask(target)
            with pytest.raises(PeerBusyError, match="answered 503: busy"):
                await ask(target)

    asyncio.run(both())


def test_a_server_that_ends_an_answer_in_its_middle_is_an_error() -> None:
    script = Script(OK + b"Transfer-Encoding: chunked\r\nConnection: close\r\n\r\nff\r\ndata: {")

    async def ask() -> None:
        async with script.target() as target:
            with pytest.raises(PeerUnavailableError):
                await one_by_one(target, [Ask((1,), 1)])

    asyncio.run(ask())


def test_an_error_within_an_answer_is_raised() -> None:
    script = Script(chunked([EVENTS[2], b'data: {"error":{"message":"the worker is gone"}}\n\n']))

    async def ask() -> None:
        async with script.target() as target:
            with pytest.raises(PeerUnavailableError, match="the worker is gone"):
                await all_at_once(target, [Ask((1,), 1)])

    asyncio.run(ask())


def test_a_connection_that_was_closed_meanwhile_is_opened_again() -> None:
    script = Script(chunked(EVENTS), b"", chunked(EVENTS))

    async def ask() -> list[Answer]:
        async with script.target() as target:
            return await one_by_one(target, [Ask((1,), 1), Ask((2,), 1)])

    assert [answer.text for answer in asyncio.run(ask())] == ["north sea"] * 2
    assert script.connections == 2


def test_nobody_at_an_address_is_an_error_that_names_it() -> None:
    async def ask() -> None:
        async with Script(b"").target() as target:
            pass
        with pytest.raises(PeerUnavailableError, match=r"127\.0\.0\.1"):
            await one_by_one(target, [Ask((1,), 1)])

    asyncio.run(ask())


def test_a_server_that_cannot_ignore_the_end_of_text_is_asked_without() -> None:
    refusing = Script(sized(b"400 Bad Request", b"ignore_eos: not supported"), chunked(EVENTS))
    strict = Script(sized(b"400 Bad Request", b"no such model"))

    async def both() -> None:
        async with refusing.target() as target:
            assert not (await learn(target)).ignores_eos
        async with strict.target() as target:
            with pytest.raises(RequestError, match="no such model"):
                await learn(target)

    asyncio.run(both())
    assert b"ignore_eos" in refusing.requests[0]
    assert b"ignore_eos" not in refusing.requests[1]


def test_a_server_is_asked_without_what_it_refused_and_with_all_else() -> None:
    script = Script(sized(b"400 Bad Request", b"skip_special_tokens: not supported"), chunked(EVENTS))

    async def ask() -> None:
        async with script.target() as target:
            learned = await learn(replace(target, group=7))
            assert (learned.ignores_eos, learned.group) == (True, 7)

    asyncio.run(ask())
    assert b"ignore_eos" in script.requests[1]
    assert b"skip_special_tokens" not in script.requests[1]


def test_requests_over_a_few_connections_all_get_an_answer_and_errors_are_kept() -> None:
    script = Script(sized(b"400 Bad Request", b"first"), chunked(EVENTS))

    async def ask() -> None:
        async with script.target() as target:
            errors = await over_connections(target, (Ask((n,), 1) for n in range(20)), connections=3)
            assert [str(error) for error in errors] == ["the server answered 400: first"]

    asyncio.run(ask())
    assert len(script.requests) == 20
    assert script.connections <= 4, "one is opened again behind an error"


def test_requests_at_given_times_are_all_asked_and_failures_are_told_apart() -> None:
    script = Script(sized(b"400 Bad Request", b"first"), chunked(EVENTS))

    async def ask() -> None:
        async with script.target() as target:
            timed = [(0, Ask((1,), 1)), (1000, Ask((2,), 1)), (2000, Ask((3,), 1))]
            outcomes = await at_times(target, timed, running_max=1)
            assert sum(outcome.answer is None for outcome in outcomes) == 1
            assert sum(outcome.error is not None for outcome in outcomes) == 1

    asyncio.run(ask())


def test_an_answer_without_its_end_its_usage_or_its_tokens_is_an_error() -> None:
    target = Target("x", Address("127.0.0.1", 1), "m")
    whole = Answer(0, prompt_tokens=3, answer_tokens=4, is_done=True)
    check_whole(Ask((1,), 4), whole, target)
    bad: list[tuple[str, dict[str, Any]]] = [
        ("DONE", {"is_done": False}),
        ("usage", {"prompt_tokens": 0}),
        ("tokens", {"answer_tokens": 3}),
    ]
    for lacks, field in bad:
        with pytest.raises(PeerError, match=lacks):
            check_whole(Ask((1,), 4), replace(whole, **field), target)
    check_whole(Ask((1,), 4), replace(whole, answer_tokens=3), replace(target, refused=frozenset({"ignore_eos"})))


def test_a_time_to_first_token_also_counts_from_when_a_request_was_due() -> None:
    answer = Answer(sent_ns=70, piece_ns=[100])
    assert (answer.ttft_ns, Outcome(answer, None, 20).ttft_due_ns) == (30, 80)
    assert Outcome(None, PeerError("x", peer="y"), 20).ttft_due_ns is None
