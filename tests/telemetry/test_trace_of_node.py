"""One request through the gateway is one trace through all processes that work for it."""

from __future__ import annotations

import secrets
from typing import Any

import pytest

from h3kv.core.types import Tier
from h3kv.telemetry import spans
from h3kv.telemetry.metric import Service
from h3kv.telemetry.spans import ATTRIBUTES, SPANS
from h3kv.testing.otlp_receiver import ReceivedSpan

from .node_rig import WholeNode, until

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

TOKENS = 24
OWN_SPANS = {spans.COMPLETE, spans.GENERATE, spans.PREFILL, spans.DECODE_STEP}
"""That every request has, whoever helps."""
EDGES = {
    (spans.COMPLETE, spans.GENERATE),
    (spans.GENERATE, spans.PREFILL),
    (spans.GENERATE, spans.DECODE_STEP),
}
TIERS = (spans.TIER_SOURCE, spans.TIER_TARGET)
WORKING = {Service.GATEWAY, Service.GPU_WORKER, Service.ANN_OFFLOAD, Service.NVME_IO}


def prompt(number: int) -> str:
    return f"{number}. " + "All work and no play makes Jane a dull girl. " * 60


class Trace:
    """The spans of one trace, as a tree below a span of the client."""

    def __init__(self, node: WholeNode) -> None:
        self._node = node
        self.id, self.client = secrets.token_bytes(16), secrets.token_bytes(8)

    @property
    def traceparent(self) -> str:
        return f"00-{self.id.hex()}-{self.client.hex()}-01"

    @property
    def spans(self) -> list[ReceivedSpan]:
        return [span for span in self._node.receiver.spans if span.trace_id == self.id]

    def named(self, name: str) -> list[ReceivedSpan]:
        return [span for span in self.spans if span.name == name]

    @property
    def is_whole(self) -> bool:
        """Whether nothing is known to be missing: processes send their spans by themselves, parents after children."""
        has_own = {span.name for span in self.spans} >= OWN_SPANS
        return has_own and all(self.is_top(span) or self.parent(span) is not None for span in self.spans)

    @property
    def services(self) -> set[str]:
        return {span.service for span in self.spans}

    def is_top(self, span: ReceivedSpan) -> bool:
        return span.parent_id == self.client

    def parent(self, span: ReceivedSpan) -> ReceivedSpan | None:
        return next((each for each in self.spans if each.span_id == span.parent_id), None)

    def edges(self) -> set[tuple[str, str]]:
        pairs = ((self.parent(span), span) for span in self.spans)
        return {(parent.name, span.name) for parent, span in pairs if parent is not None}


def check_declared(span: ReceivedSpan, parent: ReceivedSpan | None) -> None:
    """A span is as `telemetry/spans.py` declares it."""
    kind = SPANS[span.name]
    assert span.service == kind.service
    assert span.attributes.keys() <= ATTRIBUTES.keys(), span
    assert span.has_failed or set(kind.attributes) <= span.attributes.keys(), span
    assert span.start_ns <= span.end_ns
    if parent is None:
        assert kind.begins_trace, f"{span.name} begins no trace"
    else:
        assert parent.name in kind.parents, f"{span.name} below {parent.name}"


def traced_through_all(node: WholeNode) -> tuple[Trace, dict[str, Any]]:
    """A trace in which every process had a part, and its answer. Who computes what is decided by who is free."""
    asked: list[tuple[Trace, dict[str, Any]]] = []

    def found() -> tuple[Trace, dict[str, Any]] | None:
        trace = Trace(node)
        asked.append((trace, node.complete(prompt(len(asked)), tokens=TOKENS, traceparent=trace.traceparent)))
        return next(((each, answer) for each, answer in asked if each.is_whole and each.services == WORKING), None)

    whole: tuple[Trace, dict[str, Any]] = until(found, "a trace through all processes")
    return whole


def test_one_request_is_one_tree_over_all_processes_that_work_for_it(node: WholeNode) -> None:
    trace, answer = traced_through_all(node)
    assert trace.edges() >= EDGES
    assert [span.name for span in trace.spans if trace.is_top(span)] == [spans.COMPLETE]
    assert len({span.span_id for span in trace.spans}) == len(trace.spans)
    for span in trace.spans:
        if not trace.is_top(span):
            check_declared(span, trace.parent(span))
    (complete,), (generate,) = trace.named(spans.COMPLETE), trace.named(spans.GENERATE)
    assert complete.attributes[spans.REQUEST_ID] == generate.attributes[spans.REQUEST_ID]
    assert generate.attributes[spans.PROMPT_TOKENS] == answer["usage"]["prompt_tokens"]
    assert generate.attributes[spans.GENERATED_TOKENS] == answer["usage"]["completion_tokens"]
    read = sum(int(span.attributes[spans.TOKENS]) for span in trace.named(spans.PREFILL))
    assert read == answer["usage"]["prompt_tokens"] - sum(answer["usage"]["h3"]["cached_tokens"].values())
    helped = trace.named(spans.ATTEND)
    assert {span.instance for span in helped} <= {"ann_offload-0", "ann_offload-1"}
    assert all(int(span.attributes[spans.UNITS]) > 0 and int(span.attributes[spans.SIZE_BYTES]) > 0 for span in helped)
    moved = [*trace.named(spans.MOVE_SLABS), *trace.named(spans.READ_PAGES)]
    assert moved
    assert all(Tier.NVME in {span.attributes[key] for key in TIERS if key in span.attributes} for span in moved)
    assert all(int(span.attributes[spans.SIZE_BYTES]) > 0 for span in moved)


def test_a_request_without_a_trace_begins_one_at_the_gateway(node: WholeNode) -> None:
    before = {span.span_id for span in node.receiver.spans}
    node.complete("Who was Jane?", tokens=4)

    def roots() -> list[ReceivedSpan]:
        fresh = [span for span in node.receiver.spans if span.span_id not in before]
        return [span for span in fresh if span.name == spans.COMPLETE and span.parent_id is None]

    (root,) = until(roots, "a trace that the gateway began")
    until(
        lambda: any(span.parent_id == root.span_id and span.name == spans.GENERATE for span in node.receiver.spans),
        "the worker's part of it",
    )


def test_what_the_controller_decides_is_a_trace_of_its_own_that_reaches_the_store(node: WholeNode) -> None:
    def relayed() -> list[tuple[ReceivedSpan, ReceivedSpan]]:
        node.complete(prompt(0), tokens=4)
        decided = {span.span_id: span for span in node.receiver.spans if span.name == spans.DECIDE}
        passed = [span for span in node.receiver.spans if span.name == spans.RELAY]
        return [(decided[span.parent_id], span) for span in passed if span.parent_id in decided]

    for decision, relay in until(relayed, "a decision that was passed on"):
        assert decision.parent_id is None
        assert decision.trace_id == relay.trace_id
        assert int(decision.attributes[spans.COMMANDS]) >= int(relay.attributes[spans.COMMANDS]) > 0
        check_declared(decision, None)
        check_declared(relay, decision)
