"""From a request of HTTP to its answer: whole, or as a stream of server-sent events."""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from collections.abc import AsyncGenerator, AsyncIterator, Coroutine
from dataclasses import dataclass
from typing import Any, Final, TypeVar

from pydantic import ValidationError
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.types import Receive, Scope, Send

from h3kv.api.gpu_worker.v1 import gpu_worker_service_pb2 as pb
from h3kv.core.errors import H3Error, MessageSizeError, ModelNotFoundError
from h3kv.core.units import NS_PER_S, describe_size
from h3kv.rpc.call_context import CallContext
from h3kv.telemetry import spans
from h3kv.telemetry.trace_context import parse_traceparent
from h3kv.telemetry.tracing import Span, Tracer
from services.gateway.metrics import call_of
from services.gateway.openai import AnswerBody, AnswerWriter, ChatBody, CompletionBody
from services.gateway.problems import ClientGoneError, FieldError, body_error, error_fields
from services.gateway.worker import Worker

BODY_SECONDS: Final = 30.0
"""For a body to arrive."""
END: Final = b"data: [DONE]\n\n"

BodyT = TypeVar("BodyT", bound=AnswerBody)
ResultT = TypeVar("ResultT")


@dataclass(frozen=True, slots=True)
class Answerer:
    """Answers requests for text.

    Args:
        worker: which computes.
        tracer: where a request's trace begins.
        body_max_bytes: of a request.
    """

    worker: Worker
    tracer: Tracer
    body_max_bytes: int

    async def answer(self, request: Request, kind: type[CompletionBody] | type[ChatBody]) -> Response:
        """The answer, or its beginning: the status is known once the first event came.

        Raises:
            H3Error: what stands in the way.
            ClientGoneError: nobody waits for it any more.
        """
        call = call_of(request.scope)
        async with contextlib.AsyncExitStack() as stack:
            parent, named = parse_traceparent(call.traceparent), {spans.REQUEST_ID: call.request_id}
            span = stack.enter_context(self.tracer.begin(spans.COMPLETE, parent=parent, attributes=named))
            body = await read_body(request, kind, bytes_max=self.body_max_bytes)
            onward = CallContext(call.request_id, None if span.context is None else span.context.traceparent)
            writer = await self._writer(body, onward)
            events = self.worker.generate(body.request(), onward)
            await stack.enter_async_context(contextlib.aclosing(events))
            first = await unless_gone(request, anext(events))
            if body.stream:
                has_usage = body.stream_options is not None and body.stream_options.include_usage
                chunks = stream_chunks(_joined(first, events), writer, span, has_usage=has_usage)
                return EventStream(chunks, stack.pop_all())
            text, finished = await unless_gone(request, collect(_joined(first, events)))
            note_usage(span, finished.usage)
            return JSONResponse(writer.whole(text, finished))

    async def _writer(self, body: CompletionBody | ChatBody, call: CallContext) -> AnswerWriter:
        model = await self.worker.model(call)
        if body.model != model.name:
            raise ModelNotFoundError(
                f"no model is called {body.model[:100]!r} here: this node serves {model.name!r}", path=body.model[:100]
            )
        return AnswerWriter(body.kind, call.request_id, model.name, time.time_ns() // NS_PER_S)


class EventStream(StreamingResponse):
    """Sends chunks as they come. When the client goes away, or all is sent, everything behind it is closed."""

    def __init__(self, chunks: AsyncGenerator[bytes], closing: contextlib.AsyncExitStack) -> None:
        super().__init__(chunks, media_type="text/event-stream", headers={"Cache-Control": "no-cache"})
        self._chunks = chunks
        self._closing = closing

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """As ASGI says."""
        async with self._closing, contextlib.aclosing(self._chunks):
            await super().__call__(scope, receive, send)


async def stream_chunks(
    events: AsyncIterator[pb.GenerateResponse], writer: AnswerWriter, span: Span, *, has_usage: bool
) -> AsyncGenerator[bytes]:
    """Server-sent events of one answer. An error is the last of them: the status has been sent long before.

    While the prompt is read, comments keep the connection alive.
    """
    for opening in writer.opening():
        yield encoded(opening)
    try:
        async for event in events:
            match event.WhichOneof("event"):
                case "progress":
                    read = event.progress
                    yield f": {read.done_tokens} of {read.prompt_tokens} prompt tokens read\n\n".encode()
                case "token":
                    if event.token.text:
                        yield encoded(writer.chunk(event.token.text))
                case "finished":
                    note_usage(span, event.finished.usage)
                    yield encoded(writer.chunk("", event.finished.reason))
                    if has_usage:
                        yield encoded(writer.usage_chunk(event.finished.usage))
                    yield END
    except H3Error as error:
        span.fail(error)
        yield encoded(error_fields(error))


async def collect(events: AsyncIterator[pb.GenerateResponse]) -> tuple[str, pb.Finished]:
    """The whole text of an answer, and its end."""
    pieces: list[str] = []
    async for event in events:
        if event.HasField("finished"):
            return "".join(pieces), event.finished
        pieces.append(event.token.text)
    raise AssertionError("an answer ends with `finished`, or raises")


async def read_body(request: Request, kind: type[BodyT], *, bytes_max: int) -> BodyT:
    """The body of a request, checked.

    Raises:
        MessageSizeError: it is too large. No more of it than that was read.
        RequestError: it is not JSON of this kind, or takes too long to arrive.
        ClientGoneError: it does not come.
    """
    too_large = MessageSizeError(
        f"the body is larger than {describe_size(bytes_max)}: send less, or raise http.body_max"
    )
    announced = request.headers.get("content-length", "")
    if announced.isdecimal() and int(announced) > bytes_max:
        raise too_large
    body = bytearray()
    try:
        async with asyncio.timeout(BODY_SECONDS):
            async for piece in request.stream():
                body += piece
                if len(body) > bytes_max:
                    raise too_large
    except TimeoutError as error:
        raise FieldError(f"the body did not arrive within {BODY_SECONDS:g} s: send it at once", param=None) from error
    except ClientDisconnect as error:
        raise ClientGoneError from error
    try:
        return kind.model_validate_json(bytes(body))
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


def note_usage(span: Span, usage: pb.Usage) -> None:
    """Keep what an answer took."""
    span.set({spans.PROMPT_TOKENS: usage.prompt_tokens, spans.GENERATED_TOKENS: usage.generated_tokens})


def encoded(chunk: dict[str, Any]) -> bytes:
    """One server-sent event."""
    return f"data: {json.dumps(chunk, ensure_ascii=False, separators=(',', ':'))}\n\n".encode()


async def _joined(
    first: pb.GenerateResponse, rest: AsyncIterator[pb.GenerateResponse]
) -> AsyncIterator[pb.GenerateResponse]:
    yield first
    async for event in rest:
        yield event


async def _wait_until_gone(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass
