"""Spans of the steps of one request: every chunk of its prompt, and some of the steps of its answer."""

from __future__ import annotations

from collections.abc import Sequence

from h3kv.engine.events import Event, Failed, PrefillProgress, TokenGenerated
from h3kv.telemetry import spans
from h3kv.telemetry.trace_context import TraceContext
from h3kv.telemetry.tracing import Span, Tracer


class StepSpans:
    """Of each step: `begin` before it, `end` after it. A chunk that takes several steps has one span; `close` at last.

    Args:
        tracer: where spans go.
        parent: the request's own span; None where it is not traced.
    """

    def __init__(self, tracer: Tracer, parent: TraceContext | None) -> None:
        self._tracer = tracer
        self._parent = parent
        self._read_tokens: int | None = None
        self._steps = 0
        self._span: Span | None = None
        self._is_reading = False

    def begin(self, *, is_prefill: bool, sequences: int) -> TraceContext | None:
        """The context for what happens inside the step; None where that is not traced.

        Args:
            is_prefill: whether a prompt is read.
            sequences: that take part.
        """
        if self._parent is None:
            return None
        if is_prefill:
            self._span = self._span or self._tracer.begin(spans.PREFILL, parent=self._parent)
            self._is_reading = True
            return self._span.context
        self.close()
        if self._tracer.traces_step(self._steps, self._parent):
            step = {spans.STEP: self._steps, spans.SEQUENCES: sequences}
            self._span = self._tracer.begin(spans.DECODE_STEP, parent=self._parent, attributes=step)
        return None if self._span is None else self._span.context

    def end(self, events: Sequence[Event]) -> None:
        """Take notice of what the step gave: nothing where a chunk goes on, or a token has to be taken again."""
        if self._is_reading and not events:
            return
        progress = next((event for event in events if isinstance(event, PrefillProgress)), None)
        span, self._span, self._is_reading = self._span, None, False
        if progress is not None:
            before = progress.cached_tokens if self._read_tokens is None else self._read_tokens
            self._read_tokens = progress.done_tokens
            if span is not None:
                span.set({spans.TOKENS: max(progress.done_tokens - before, 0)})
        else:
            self._steps += any(isinstance(event, TokenGenerated) for event in events)
        if span is not None:
            for event in events:
                if isinstance(event, Failed):
                    span.fail(event.error)
            span.end()

    def close(self) -> None:
        """The request has ended, and a step of it may not have."""
        self._is_reading = False
        if self._span is not None:
            self._span.end()
            self._span = None
