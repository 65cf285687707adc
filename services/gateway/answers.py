"""From a request of HTTP to its answer: whole, or as a stream of server-sent events."""

from __future__ import annotations

import contextlib
import io
import json
import logging
import secrets
import time
from collections.abc import AsyncGenerator, AsyncIterator
from dataclasses import dataclass
from typing import Any, Final

from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.types import Receive, Scope, Send

from h3kv.api.gpu_worker.v1 import gpu_worker_service_pb2 as pb
from h3kv.core.errors import H3Error
from h3kv.core.units import NS_PER_S
from h3kv.rpc.call_context import CallContext
from h3kv.telemetry import spans
from h3kv.telemetry.event_log import log_event
from h3kv.telemetry.trace_context import parse_traceparent
from h3kv.telemetry.tracing import Span, Tracer
from services.gateway.chat import ChatBody
from services.gateway.choices import Event, generate_choices
from services.gateway.metrics import call_of
from services.gateway.openai import Asked, CompletionBody
from services.gateway.problems import FieldError, error_fields
from services.gateway.requests import BodyBounds, read_asked, unless_gone
from services.gateway.worker import Worker
from services.gateway.writers import AnswerWriter, ChoiceWriter, Style

END: Final = b"data: [DONE]\n\n"
ID_BYTES: Final = 12
STREAM_HEADERS: Final = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
"""Proxies hold nothing back."""
LOGPROBS_HELD_MAX: Final = 1 << 20
"""Of an answer in one piece: all of them are held until its end."""

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Answerer:
    """Answers requests for text.

    Args:
        worker: which computes.
        tracer: where a request's trace begins.
        bounds: of a request's body.
    """

    worker: Worker
    tracer: Tracer
    bounds: BodyBounds

    async def answer(self, request: Request, kind: type[CompletionBody | ChatBody], tenant: pb.Tenant) -> Response:
        """The answer, or its beginning: the status is known once the first event came.

        Raises:
            H3Error: what stands in the way.
            ClientGoneError: nobody waits for it any more.
        """
        call = call_of(request.scope)
        async with contextlib.AsyncExitStack() as stack:
            parent, named = parse_traceparent(call.traceparent), {spans.REQUEST_ID: call.request_id}
            span = stack.enter_context(self.tracer.begin(spans.COMPLETE, parent=parent, attributes=named))
            body, asked = await read_asked(request, kind, self.bounds, make=lambda body: (body, body.asked(tenant)))
            onward = CallContext(call.request_id, None if span.context is None else span.context.traceparent)
            model = await self.worker.require_model(body.model, onward)
            if not body.stream:
                _check_logprobs(asked, model.context_tokens)
            answer = Answer(
                AnswerWriter(body.kind, secrets.token_hex(ID_BYTES), model.name, time.time_ns() // NS_PER_S),
                _style(body),
                prompts=len(asked.prompts),
                choices_per_prompt=body.n,
                span=span,
                request_id=call.request_id,
            )
            events = generate_choices(self.worker, asked, onward)
            await stack.enter_async_context(contextlib.aclosing(events))
            first = await unless_gone(request, anext(events))
            if body.stream:
                chunks = answer.stream(_joined(first, events), has_usage=body.has_stream_usage)
                return EventStream(chunks, stack.pop_all())
            return JSONResponse(await unless_gone(request, answer.whole(_joined(first, events))))


class EventStream(StreamingResponse):
    """Sends chunks as they come. When the client goes away, or all is sent, everything behind it is closed."""

    def __init__(self, chunks: AsyncGenerator[bytes], closing: contextlib.AsyncExitStack) -> None:
        super().__init__(chunks, media_type="text/event-stream", headers=STREAM_HEADERS)
        self._chunks = chunks
        self._closing = closing

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """As ASGI says."""
        async with self._closing, contextlib.aclosing(self._chunks):
            await super().__call__(scope, receive, send)


class Answer:
    """One answer that is being written."""

    def __init__(
        self, writer: AnswerWriter, style: Style, *, prompts: int, choices_per_prompt: int, span: Span, request_id: str
    ) -> None:
        self._writer = writer
        self._choices = [ChoiceWriter(style, index) for index in range(prompts * choices_per_prompt)]
        self._choices_per_prompt = choices_per_prompt
        self._usages: dict[int, pb.Usage] = {}
        self._span = span
        self._request_id = request_id

    async def whole(self, events: AsyncIterator[Event]) -> dict[str, Any]:
        """The answer in one piece. Raises H3Error where a choice of it fails."""
        texts = [io.StringIO() for _ in self._choices]
        likely: list[list[pb.TokenGenerated]] = [[] for _ in self._choices]
        ends: dict[int, pb.Finished] = {}
        async for index, event in events:
            if event.HasField("token"):
                texts[index].write(event.token.text)
                if event.token.HasField("logprobs"):
                    likely[index].append(event.token)
            elif event.HasField("finished"):
                ends[index] = event.finished
                self._usages[index] = event.finished.usage
        choices = [
            choice.whole(texts[index].getvalue(), likely[index], ends[index])
            for index, choice in enumerate(self._choices)
        ]
        return self._writer.whole(choices, self._take_usages(), choices_per_prompt=self._choices_per_prompt)

    async def stream(self, events: AsyncIterator[Event], *, has_usage: bool) -> AsyncGenerator[bytes]:
        """Server-sent events. An error is the last of them: the status has been sent long before.

        While a prompt is read, comments keep the connection alive.
        """
        for choice in self._choices:
            for piece in choice.opening():
                yield encoded(self._writer.chunk(piece))
        try:
            async for index, event in events:
                if event.HasField("progress"):
                    read = event.progress
                    yield f": {read.done_tokens} of {read.prompt_tokens} prompt tokens read\n\n".encode()
                for piece in self._pieces(index, event):
                    yield encoded(self._writer.chunk(piece))
            usages = self._take_usages()
            if has_usage:
                yield encoded(self._writer.usage_chunk(usages, choices_per_prompt=self._choices_per_prompt))
            yield END
        except H3Error as error:
            self._span.fail(error)
            # Messages about requests quote them, and what users write is for no log.
            log_event(_log, "request_failed", {spans.REQUEST_ID: self._request_id, spans.ERROR_REASON: error.reason})
            yield encoded(error_fields(error))

    def _pieces(self, index: int, event: pb.GenerateResponse) -> list[dict[str, Any]]:
        """What an event adds to its choice."""
        match event.WhichOneof("event"):
            case "token":
                return self._choices[index].grow(event.token)
            case "finished":
                self._usages[index] = event.finished.usage
                return self._choices[index].end(event.finished)
            case _:
                return []

    def _take_usages(self) -> list[pb.Usage]:
        usages = [self._usages[index] for index in range(len(self._choices))]
        self._span.set(
            {
                spans.PROMPT_TOKENS: sum(usage.prompt_tokens for usage in usages[:: self._choices_per_prompt]),
                spans.GENERATED_TOKENS: sum(usage.generated_tokens for usage in usages),
            }
        )
        return usages


def encoded(chunk: dict[str, Any]) -> bytes:
    """One server-sent event."""
    return f"data: {json.dumps(chunk, ensure_ascii=False, separators=(',', ':'))}\n\n".encode()


def _check_logprobs(asked: Asked, context_tokens: int) -> None:
    """Raise FieldError for more of them than are held for an answer in one piece."""
    if not asked.sampling.HasField("logprobs"):
        return
    length = asked.sampling.max_new_tokens if asked.sampling.HasField("max_new_tokens") else context_tokens
    held = asked.count * min(length, context_tokens) * (1 + asked.sampling.logprobs)
    if held > LOGPROBS_HELD_MAX:
        rule = f"up to {held} of them, and an answer in one piece has at most {LOGPROBS_HELD_MAX}"
        raise FieldError(
            f"logprobs: {rule}: set stream to true, or lower max_tokens, n or top_logprobs", param="logprobs"
        )


def _style(body: CompletionBody | ChatBody) -> Style:
    tools = body.tool_use() if isinstance(body, ChatBody) else None
    return Style(body.kind, has_logprobs=body.has_logprobs, tools=tools)


async def _joined(first: Event, rest: AsyncIterator[Event]) -> AsyncIterator[Event]:
    yield first
    async for event in rest:
        yield event
