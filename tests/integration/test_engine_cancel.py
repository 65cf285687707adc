"""Requests that end early: cancelled, abandoned, interrupted, failed. All that they held comes back."""

from collections.abc import Iterator

import pytest
import torch

from h3kv.core.errors import HostMemoryError
from h3kv.engine.events import Event, Failed, Finished, PrefillProgress, TokenGenerated
from h3kv.engine.request import Request, RequestId, SamplingParameters
from h3kv.engine.stopping import FinishReason
from h3kv.telemetry import names
from h3kv.testing.engines import CONFIG, Rig, make_rig, one_thread, prompt_tokens, tiny_decoder
from h3kv.testing.hooked_model import Attending, HookedModel

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("single_thread")]


@pytest.fixture
def single_thread() -> Iterator[None]:
    with one_thread():
        yield


PROMPT = prompt_tokens(1, 500)
REQUEST = Request(prompt=tuple(PROMPT), sampling=SamplingParameters(max_new_tokens=20, ignore_eos=True))


class BrokenModel(HookedModel):
    """The tiny decoder, until its N-th call: that raises in the middle, when the first layer has been attended."""

    def __init__(self, *, call: int, error: BaseException) -> None:
        super().__init__(tiny_decoder(), before=self._count)
        self.calls_left = call
        self._error = error

    def _count(self, token_ids_T: torch.Tensor, attending: Attending) -> None:
        self.calls_left -= 1
        if self.calls_left == 0:
            q, k, v = (torch.zeros(len(token_ids_T), heads, CONFIG.head_dim) for heads in (4, 2, 2))
            attending.attend(0, q, k, v)
            raise self._error


def step_until(rig: Rig, kind: type[Event], *, count: int = 1) -> None:
    seen = 0
    while seen < count:
        seen += sum(isinstance(event, kind) for event in rig.engine.step())


def pull(events: Iterator[Event], kind: type[Event], *, count: int = 1) -> None:
    seen = 0
    while seen < count:
        seen += isinstance(next(events), kind)


@pytest.mark.parametrize("kind", [PrefillProgress, TokenGenerated])
def test_cancel_between_steps_gives_everything_back(kind: type[Event]) -> None:
    rig = make_rig()
    request = rig.engine.submit(REQUEST)
    step_until(rig, kind, count=2)
    finished = rig.engine.cancel(request)
    assert finished is not None
    assert finished.reason is FinishReason.CANCELLED
    assert finished.statistics.generated_tokens == (2 if kind is TokenGenerated else 0)
    assert rig.segments.statistics().pins == 0
    assert not rig.engine.has_work
    assert rig.engine.step() == []
    assert rig.telemetry.value(names.REQUESTS, reason="cancelled") == 1
    rig.check_idle()


def test_cancel_while_waiting_lets_the_next_one_start() -> None:
    rig = make_rig(capacity_blocks=16)
    running, waiting, behind = (rig.engine.submit(REQUEST) for _ in range(3))
    rig.engine.step()
    finished = rig.engine.cancel(waiting)
    assert finished is not None
    assert finished.reason is FinishReason.CANCELLED
    assert finished.statistics.time_to_first_token_ns is None
    assert set(rig.run()) == {running, behind}
    rig.check_idle()


def test_cancel_of_an_unknown_or_ended_request_does_nothing() -> None:
    rig = make_rig()
    request = rig.engine.submit(REQUEST)
    rig.run()
    assert rig.engine.cancel(request) is None
    assert rig.engine.cancel(RequestId(99)) is None
    rig.check_idle()


def test_cancelled_prefill_is_not_lost() -> None:
    rig = make_rig()
    request = rig.engine.submit(REQUEST)
    step_until(rig, PrefillProgress, count=3)
    rig.engine.cancel(request)
    tokens, finished = rig.answer(PROMPT)
    assert finished.statistics.cached_tokens_total == 384
    assert tokens == make_rig().answer(PROMPT)[0]
    rig.check_idle()


@pytest.mark.parametrize("kind", [PrefillProgress, TokenGenerated])
def test_leaving_the_stream_cancels(kind: type[Event]) -> None:
    rig = make_rig()
    stream = rig.engine.generate(REQUEST)
    pull(stream, kind)
    stream.close()
    assert rig.telemetry.value(names.REQUESTS, reason="cancelled") == 1
    rig.check_idle()


@pytest.mark.parametrize("kind", [PrefillProgress, TokenGenerated])
def test_interrupt_in_the_loop_over_events_cancels(kind: type[Event]) -> None:
    rig = make_rig()

    def consume() -> None:
        for event in rig.engine.generate(REQUEST):
            if isinstance(event, kind):
                raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        consume()
    assert rig.telemetry.value(names.REQUESTS, reason="cancelled") == 1
    rig.check_idle()


@pytest.mark.parametrize("call", [1, 3, 4, 5, 9])
def test_interrupt_inside_a_step_ends_its_sequence_and_no_other(call: int) -> None:
    """500 tokens are four chunks; the fifth call decodes."""
    rig = make_rig(model=BrokenModel(call=call, error=KeyboardInterrupt()))
    with pytest.raises(KeyboardInterrupt):
        list(rig.engine.generate(REQUEST))
    assert rig.segments.statistics().pins == 0
    assert not rig.engine.has_work
    assert rig.answer(PROMPT)[0] == make_rig().answer(PROMPT)[0]
    rig.check_idle()


def test_interrupt_while_another_request_runs_leaves_that_one_alone() -> None:
    rig = make_rig(model=BrokenModel(call=3, error=KeyboardInterrupt()))
    interrupted, other = rig.engine.submit(REQUEST), rig.engine.submit(REQUEST)
    with pytest.raises(KeyboardInterrupt):
        rig.run()
    finished = rig.run()
    assert finished[interrupted].reason is FinishReason.CANCELLED
    assert finished[other].reason is FinishReason.LENGTH
    rig.check_idle()


def test_interrupt_loses_no_event() -> None:
    """What a stream left for others, and the end of the interrupted request, come with the next step."""
    model = BrokenModel(call=100, error=KeyboardInterrupt())
    rig = make_rig(model=model)
    submitted = rig.engine.submit(REQUEST)
    stream = rig.engine.generate(REQUEST)
    pull(stream, TokenGenerated, count=5)
    stream.close()
    model.calls_left = 1
    with pytest.raises(KeyboardInterrupt):
        rig.engine.step()
    events = rig.engine.step()
    assert [event.done_tokens for event in events if isinstance(event, PrefillProgress)] == [128, 256, 384, 500]
    assert isinstance(events[-1], Finished)
    assert events[-1].reason is FinishReason.CANCELLED
    assert events[-1].request == submitted
    rig.check_idle()


@pytest.mark.parametrize("call", [2, 6])
def test_error_of_one_request_is_its_own(call: int) -> None:
    error = HostMemoryError("no memory: lower the chunk", needed_bytes=1, available_bytes=0)
    rig = make_rig(model=BrokenModel(call=call, error=error))
    failing = rig.engine.submit(REQUEST)
    events = []
    while rig.engine.has_work:
        events += rig.engine.step()
    assert events[-1] == Failed(failing, error)
    assert rig.telemetry.value(names.REQUESTS, reason="HOST_MEMORY") == 1
    rig.engine.submit(REQUEST)
    rig.run()
    rig.check_idle()


def test_stream_raises_the_error_of_its_request() -> None:
    error = HostMemoryError("no memory: lower the chunk", needed_bytes=1, available_bytes=0)
    rig = make_rig(model=BrokenModel(call=2, error=error))
    with pytest.raises(HostMemoryError):
        list(rig.engine.generate(REQUEST))
    rig.check_idle()


def test_streams_run_side_by_side_and_each_gets_its_own_events() -> None:
    rig = make_rig()
    streams = [rig.engine.generate(REQUEST) for _ in range(3)]
    events: list[list[Event]] = [[], [], []]
    for stream, seen in zip(streams, events, strict=True):
        seen.append(next(stream))
    streams[1].close()
    for stream, seen in ((streams[2], events[2]), (streams[0], events[0])):
        seen += stream
    for seen in (events[0], events[2]):
        assert len({event.request for event in seen}) == 1
        assert isinstance(seen[-1], Finished)
    assert rig.engine.step() == []
    rig.check_idle()


def test_cancel_from_outside_ends_a_stream_with_its_finish() -> None:
    rig = make_rig()
    stream = rig.engine.generate(REQUEST)
    request = next(stream).request
    rig.engine.cancel(request)
    (last,) = stream
    assert isinstance(last, Finished)
    assert last.reason is FinishReason.CANCELLED
    rig.check_idle()


def test_events_of_submitted_requests_wait_while_a_stream_steps() -> None:
    rig = make_rig()
    submitted = rig.engine.submit(REQUEST)
    list(rig.engine.generate(REQUEST))
    assert rig.engine.has_work
    events = []
    while rig.engine.has_work:
        events += rig.engine.step()
    assert {event.request for event in events} == {submitted}
    assert sum(isinstance(event, TokenGenerated) for event in events) == 20
    rig.check_idle()


def test_close_cancels_everything() -> None:
    rig = make_rig(capacity_blocks=16)
    for _ in range(3):
        rig.engine.submit(REQUEST)
    rig.engine.step()
    rig.engine.close()
    assert rig.telemetry.value(names.REQUESTS, reason="cancelled") == 3
    rig.check_idle()
