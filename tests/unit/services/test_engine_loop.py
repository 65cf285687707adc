"""The engine's thread, over a tiny engine whose steps a test lets through one by one."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import pytest

from h3kv.core.errors import (
    ContextLengthError,
    InternalError,
    PeerBusyError,
    PeerTimeoutError,
    PeerUnavailableError,
    RegionError,
    RequestError,
)
from h3kv.core.units import NS_PER_S
from h3kv.engine.events import Event, Finished, PrefillProgress, TokenGenerated
from h3kv.engine.request import Request, SamplingParameters
from h3kv.telemetry.trace_context import UNTRACED, TraceContext, pack_context
from h3kv.telemetry.tracing import NOTHING, Attributes, NullTracer, Span, UnrecordedSpan
from h3kv.testing.engines import Rig, make_rig, prompt_tokens, tiny_decoder
from h3kv.testing.hooked_model import HookedModel
from services.gpu_worker.loop import Answer, EngineLoop

WAIT_S = 30.0
WAIT_NS = 30 * NS_PER_S


class GatedModel(HookedModel):
    """The tiny decoder. While it is held, a step waits in the middle."""

    def __init__(self) -> None:
        super().__init__(tiny_decoder(), before=lambda *_: self._wait())
        self.opened = threading.Event()
        self.opened.set()
        self.entered = threading.Event()

    def _wait(self) -> None:
        self.entered.set()
        assert self.opened.wait(WAIT_S), "nobody opened the gate"

    def hold(self) -> None:
        self.entered.clear()
        self.opened.clear()


class Loop:
    """A loop over a rig, and what it reports."""

    def __init__(self, *, requests_max: int = 8, tracer: NullTracer | None = None) -> None:
        self.model = GatedModel()
        self.rig: Rig = make_rig(model=self.model)
        self.failures: list[BaseException] = []
        self.looks = 0
        self.traces: list[bytes] = []
        self.loop = EngineLoop(
            self.rig,  # type: ignore[arg-type]
            tracer=tracer or NullTracer(),
            requests_max=requests_max,
            name="gpu_worker",
            on_failure=self.failures.append,
            on_step=self._look,
            on_trace=self.traces.append,
        )

    def _look(self, _: Any) -> None:
        self.looks += 1

    def submit(self, prompt: list[int], *, tokens: int = 4) -> Answer:
        sampling = SamplingParameters(max_new_tokens=tokens, ignore_eos=True)
        return self.loop.submit(Request(prompt=tuple(prompt), sampling=sampling), trace=None)

    def call(self) -> None:
        """Return when all commands before have been carried out."""
        self.loop.call(lambda _: None, timeout_ns=WAIT_NS)


@pytest.fixture
def running() -> Iterator[Loop]:
    held = Loop()
    held.loop.start()
    yield held
    held.model.opened.set()
    held.loop.stop()
    held.rig.engine.close()
    if not held.failures:
        held.rig.check_idle()


def tokens_of(events: list[Event]) -> list[int]:
    return [event.token for event in events if isinstance(event, TokenGenerated)]


def test_answers_are_those_of_the_engine(running: Loop) -> None:
    prompts = [prompt_tokens(seed, 300) for seed in (1, 2)]
    expected = [make_rig().answer(prompt)[0] for prompt in prompts]
    found = [list(answer) for answer in [running.submit(prompt) for prompt in prompts]]
    assert [tokens_of(events) for events in found] == expected
    for events in found:
        assert isinstance(events[0], PrefillProgress)
        assert isinstance(events[-1], Finished)


def test_refusal_of_the_engine_is_raised_by_the_answer(running: Loop) -> None:
    with pytest.raises(ContextLengthError):
        list(running.submit([1], tokens=10**6))
    with pytest.raises(RequestError, match="must be a token number"):
        list(running.submit([10**6]))
    assert len(tokens_of(list(running.submit([1, 2, 3])))) == 4


def test_cancelled_request_ends_before_the_next_step(running: Loop) -> None:
    running.model.hold()
    answer = running.submit(prompt_tokens(1, 100), tokens=50)
    assert running.model.entered.wait(WAIT_S)
    answer.cancel()
    answer.cancel()
    assert list(answer) == []
    running.model.opened.set()
    running.call()
    assert not running.rig.engine.has_work
    running.rig.engine.check_integrity()


def test_request_that_is_cancelled_before_it_began_never_begins(running: Loop) -> None:
    running.model.hold()
    first = running.submit(prompt_tokens(1, 100))
    assert running.model.entered.wait(WAIT_S)
    second = running.submit(prompt_tokens(2, 100))
    second.cancel()
    running.model.opened.set()
    assert len(tokens_of(list(first))) == 4
    assert list(second) == []


def test_reader_that_does_not_read_stops_nobody(running: Loop) -> None:
    silent = running.submit(prompt_tokens(1, 100), tokens=40)
    assert len(tokens_of(list(running.submit(prompt_tokens(2, 100), tokens=80)))) == 80
    assert len(tokens_of(list(silent))) == 40


def test_more_requests_than_allowed_are_refused() -> None:
    held = Loop(requests_max=2)
    for answer in [held.submit([1, 2, 3]) for _ in range(2)]:
        answer.cancel()
    # These may run: the engine has not come to the end of the others, and reads a document besides.
    answers = [held.submit([1, 2, 3]) for _ in range(3)]
    with pytest.raises(PeerBusyError, match="5 requests run, wait or end"):
        held.submit([1])
    held.loop.start()
    for answer in answers:
        assert len(tokens_of(list(answer))) == 4
    assert len(tokens_of(list(held.submit([1])))) == 4
    held.loop.stop()
    held.rig.check_idle()


def test_call_runs_between_two_steps_and_raises_what_the_function_does(running: Loop) -> None:
    assert running.loop.call(lambda node: node.engine.has_work, timeout_ns=WAIT_NS) is False

    def refuse(_: Any) -> None:
        raise RequestError("no: say yes")

    with pytest.raises(RequestError, match="say yes"):
        running.loop.call(refuse, timeout_ns=WAIT_NS)
    assert running.looks > 0


def test_call_that_waits_too_long_for_a_step_is_given_up(running: Loop) -> None:
    running.model.hold()
    answer = running.submit([1, 2, 3])
    assert running.model.entered.wait(WAIT_S)
    ran: list[None] = []
    with pytest.raises(PeerTimeoutError):
        running.loop.call(lambda _: ran.append(None), timeout_ns=1)
    running.model.opened.set()
    list(answer)
    running.call()
    assert ran == []


def test_drain_waits_for_answers_and_refuses_new_ones(running: Loop) -> None:
    running.model.hold()
    answer = running.submit([1, 2, 3])
    assert running.model.entered.wait(WAIT_S)
    draining = threading.Thread(target=running.loop.drain, args=(WAIT_NS,))
    draining.start()
    running.model.opened.set()
    assert len(tokens_of(list(answer))) == 4
    draining.join(WAIT_S)
    assert not draining.is_alive()
    with pytest.raises(PeerUnavailableError, match="is ending"):
        running.submit([1])


def test_answers_that_outlast_the_drain_end_with_an_error_to_repeat_them(running: Loop) -> None:
    running.model.hold()
    answer = running.submit([1, 2, 3])
    assert running.model.entered.wait(WAIT_S)
    running.loop.drain(1)
    with pytest.raises(PeerUnavailableError, match="repeat it"):
        list(answer)


class EverySpan(NullTracer):
    """Each span has a context of its own."""

    def __init__(self) -> None:
        self.contexts: list[TraceContext] = []

    def begin(self, name: str, *, parent: TraceContext | None = None, attributes: Attributes = NOTHING) -> Span:
        self.contexts.append(TraceContext(b"t" * 16, bytes([len(self.contexts) + 1] * 8)))
        return UnrecordedSpan(self.contexts[-1])

    def traces_step(self, step: int, parent: TraceContext | None) -> bool:
        return step == 1


def test_what_happens_inside_a_step_is_told_its_trace() -> None:
    tracer = EverySpan()
    held = Loop(tracer=tracer)
    held.loop.start()
    sampling = SamplingParameters(max_new_tokens=4, ignore_eos=True)
    request = Request(prompt=tuple(prompt_tokens(1, 100)), sampling=sampling)
    list(held.loop.submit(request, trace=TraceContext(b"t" * 16, b"p" * 8)))
    list(held.submit(prompt_tokens(2, 100)))
    held.loop.stop()
    prefill, step = map(pack_context, tracer.contexts)
    assert held.traces == [prefill, UNTRACED, step, UNTRACED]
    held.rig.check_idle()


def test_node_that_must_begin_anew_says_to_repeat_the_request(running: Loop) -> None:
    running.model.hold()
    answer = running.submit(prompt_tokens(1, 100))
    assert running.model.entered.wait(WAIT_S)

    def lose() -> None:
        raise RegionError("the region is void: map the new one", region="host")

    running.loop._commands.append(lose)
    running.model.opened.set()
    with pytest.raises(PeerUnavailableError, match="begins anew"):
        list(answer)
    running.loop.stop()
    assert [type(failure) for failure in running.failures] == [RegionError]


def test_engine_that_breaks_ends_all_answers_and_says_so(running: Loop) -> None:
    running.model.hold()
    answers = [running.submit(prompt_tokens(seed, 100)) for seed in (1, 2)]
    assert running.model.entered.wait(WAIT_S)

    def break_down(_: Any) -> None:
        raise ZeroDivisionError

    opener = threading.Thread(target=running.model.opened.set)
    opener.start()
    with pytest.raises(PeerUnavailableError):
        running.loop.call(break_down, timeout_ns=WAIT_NS)
    opener.join()
    for answer in answers:
        with pytest.raises(InternalError, match="the engine broke"):
            list(answer)
    running.loop.stop()
    assert [type(failure) for failure in running.failures] == [ZeroDivisionError]
    with pytest.raises(PeerUnavailableError):
        running.submit([1])
