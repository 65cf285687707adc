"""Reading what clients send, within bounds of size and time."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import Any, Final, TypeVar

from pydantic import ValidationError
from starlette.requests import ClientDisconnect, Request

from h3kv.core.errors import MessageSizeError
from h3kv.core.units import NS_PER_S, describe_size, format_duration
from services.gateway.bodies import Body
from services.gateway.problems import ClientGoneError, FieldError, LateBodyError, MediaTypeError, body_error

SMALL_BYTES: Final = 64 << 10
"""Larger bodies are read by another thread: others are answered meanwhile."""

BodyT = TypeVar("BodyT", bound=Body)
ResultT = TypeVar("ResultT")


@dataclass(frozen=True, slots=True)
class BodyBounds:
    """What a body may take."""

    bytes_max: int
    duration_ns: int
    setting: str
    """Which the size comes from."""


async def read_bytes(request: Request, bounds: BodyBounds) -> bytes:
    """The body of a request.

    Raises:
        MessageSizeError: it is too large. No more of it than that was read.
        LateBodyError: it takes too long to arrive.
        ClientGoneError: it does not come.
    """
    too_large = MessageSizeError(
        f"the body is larger than {describe_size(bounds.bytes_max)}: send less, or raise {bounds.setting}"
    )
    announced = request.headers.get("content-length", "")
    if announced.isdecimal() and int(announced) > bounds.bytes_max:
        raise too_large
    body = bytearray()
    try:
        async with asyncio.timeout(bounds.duration_ns / NS_PER_S):
            async for piece in request.stream():
                body += piece
                if len(body) > bounds.bytes_max:
                    raise too_large
    except TimeoutError as error:
        duration = format_duration(bounds.duration_ns)
        raise LateBodyError(f"the body did not arrive within {duration}: send it at once", param=None) from error
    except ClientDisconnect as error:
        raise ClientGoneError from error
    return bytes(body)


async def read_body(request: Request, kind: type[BodyT], bounds: BodyBounds) -> BodyT:
    """The body of a request, checked.

    Raises:
        MediaTypeError: it is not called JSON.
        RequestError: it is not JSON of this kind; and as `read_bytes`.
    """
    return await read_asked(request, kind, bounds, make=lambda body: body)


async def read_asked(
    request: Request, kind: type[BodyT], bounds: BodyBounds, *, make: Callable[[BodyT], ResultT]
) -> ResultT:
    """What is made of a body. Raises as `read_body`, and what `make` raises, which no other thread may mind."""
    named = media_type(request)
    if named != "application/json" and not (named.startswith("application/") and named.endswith("+json")):
        # A page of a stranger makes a browser send all other types without asking.
        raise MediaTypeError(f"content-type = {named[:100]!r}: send JSON, as application/json", param=None)
    content = await read_bytes(request, bounds)

    def read() -> ResultT:
        try:
            body = kind.model_validate_json(content)
        except ValidationError as error:
            raise body_error(error) from error
        return make(body)

    return read() if len(content) <= SMALL_BYTES else await asyncio.to_thread(read)


def media_type(request: Request) -> str:
    """What a body is called, without its parameters; empty where it is not called anything."""
    return request.headers.get("content-type", "").partition(";")[0].strip().lower()


def check_no_query(request: Request) -> None:
    """Raise FieldError for a query where none is read."""
    name = next(iter(request.query_params), None)
    if name is not None:
        shown = name[:100]
        raise FieldError(f"{shown}: no parameter of the query is read here: leave it out", param=shown)


async def unless_gone(request: Request, work: Coroutine[Any, Any, ResultT]) -> ResultT:
    """What some work gives back. It is cancelled when the client goes away before.

    Raises:
        ClientGoneError: then.
    """
    task = asyncio.ensure_future(work)
    gone = asyncio.ensure_future(_wait_until_gone(request))
    try:
        await asyncio.wait({task, gone}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientGoneError
        return task.result()
    finally:
        for each in (task, gone):
            each.cancel()
        await asyncio.wait({task, gone})


async def _wait_until_gone(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass
