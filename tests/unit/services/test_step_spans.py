from collections.abc import Sequence

from h3kv.core.errors import NumericsError
from h3kv.engine.events import Event, Failed, PrefillProgress, TokenGenerated
from h3kv.engine.request import RequestId
from h3kv.telemetry import spans
from h3kv.telemetry.trace_context import TraceContext
from h3kv.telemetry.tracing import NOTHING, Attributes, NullTracer, UnrecordedSpan
from services.gpu_worker.steps import StepSpans

ID = RequestId(1)
PARENT = TraceContext(b"t" * 16, b"s" * 8)
TOKEN = TokenGenerated(ID, 7, "x")


class ListedSpan(UnrecordedSpan):
    def __init__(self, name: str, attributes: Attributes, ended: list[tuple[str, Attributes]]) -> None:
        super().__init__(TraceContext(b"t" * 16, b"c" * 8))
        self._name, self._attributes, self._ended = name, dict(attributes), ended

    def set(self, attributes: Attributes) -> None:
        self._attributes |= attributes

    def fail(self, error: BaseException) -> None:
        self._attributes[spans.ERROR_REASON] = type(error).__name__

    def end(self) -> None:
        self._ended.append((self._name, self._attributes))


class ListedTracer(NullTracer):
    """Keeps the spans that ended; every third step has one."""

    def __init__(self) -> None:
        self.ended: list[tuple[str, Attributes]] = []

    def begin(self, name: str, *, parent: TraceContext | None = None, attributes: Attributes = NOTHING) -> ListedSpan:
        assert parent == PARENT
        return ListedSpan(name, attributes, self.ended)

    def traces_step(self, step: int, parent: TraceContext | None) -> bool:
        return step % 3 == 0


def run(
    steps: Sequence[tuple[bool, Sequence[Event]]], *, parent: TraceContext | None = PARENT
) -> tuple[list[tuple[str, Attributes]], list[bool]]:
    """Spans that ended, and for each step whether it had a context."""
    tracer = ListedTracer()
    each, traced = StepSpans(tracer, parent), []
    for is_prefill, events in steps:
        traced.append(each.begin(is_prefill=is_prefill, sequences=1) is not None)
        each.end(events)
    return tracer.ended, traced


def test_chunks_say_what_they_computed_and_some_steps_of_the_answer_follow() -> None:
    chunks = [PrefillProgress(ID, done, 64, 300) for done in (128, 256, 300)]
    steps: list[tuple[bool, list[Event]]] = [(True, [chunks[0]]), (True, [chunks[1]]), (True, [chunks[2], TOKEN])]
    ended, traced = run([*steps, *[(False, [TOKEN])] * 5])
    assert ended == [
        (spans.PREFILL, {spans.TOKENS: 64}),
        (spans.PREFILL, {spans.TOKENS: 128}),
        (spans.PREFILL, {spans.TOKENS: 44}),
        (spans.DECODE_STEP, {spans.STEP: 0, spans.SEQUENCES: 1}),
        (spans.DECODE_STEP, {spans.STEP: 3, spans.SEQUENCES: 1}),
    ]
    assert traced == [True, True, True, True, False, False, True, False]


def test_request_without_a_trace_records_nothing() -> None:
    assert run([(True, [PrefillProgress(ID, 300, 0, 300), TOKEN]), (False, [TOKEN])], parent=None) == (
        [],
        [False, False],
    )


def test_step_that_is_taken_again_counts_once() -> None:
    ended, _ = run([(False, []), (False, [TOKEN]), (False, [TOKEN])])
    assert [attributes[spans.STEP] for _, attributes in ended] == [0, 0]


def test_step_that_fails_says_so() -> None:
    ended, _ = run([(True, [Failed(ID, NumericsError("no number: try fp32"))])])
    assert ended == [(spans.PREFILL, {spans.ERROR_REASON: "NumericsError"})]


def test_chunk_that_computes_lost_tokens_again_counts_no_less_than_none() -> None:
    ended, _ = run([(True, [PrefillProgress(ID, done, 0, 300)]) for done in (256, 128)])
    assert [attributes for _, attributes in ended] == [{spans.TOKENS: 256}, {spans.TOKENS: 0}]


def test_chunk_that_takes_several_turns_has_one_span() -> None:
    progress = PrefillProgress(ID, 300, 0, 300)
    ended, traced = run([(True, []), (True, []), (True, [progress, TOKEN])])
    assert ended == [(spans.PREFILL, {spans.TOKENS: 300})]
    assert traced == [True] * 3


def test_request_that_ends_within_a_chunk_leaves_no_span_open() -> None:
    tracer = ListedTracer()
    each = StepSpans(tracer, PARENT)
    each.begin(is_prefill=True, sequences=1)
    each.end([])
    assert tracer.ended == []
    each.close()
    each.close()
    assert tracer.ended == [(spans.PREFILL, {})]
