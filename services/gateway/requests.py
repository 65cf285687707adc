"""Reading what clients send, within bounds of size and time."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from dataclasses import dataclass
from typing import Any, TypeVar

from pydantic import ValidationError
from starlette.requests import ClientDisconnect, Request

from h3kv.core.errors import MessageSizeError
from h3kv.core.units import NS_PER_S, describe_size, format_duration
from services.gateway.bodies import Body
from services.gateway.problems import ClientGoneError, FieldError, body_error

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
        RequestError: it takes too long to arrive.
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
        raise FieldError(f"the body did not arrive within {duration}: send it at once", param=None) from error
    except ClientDisconnect as error:
        raise ClientGoneError from error
    return bytes(body)


async def read_body(request: Request, kind: type[BodyT], bounds: BodyBounds) -> BodyT:
    """The body of a request, checked. Raises as `read_bytes`, and RequestError where it is not JSON of this kind."""
    body = await read_bytes(request, bounds)
    try:
        return kind.model_validate_json(body)
    except ValidationError as error:
        raise body_error(error) from error


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
