"""What goes wrong in one request is its own: others go on, and all that it held comes back."""

from collections import deque
from collections.abc import Iterator, Sequence
from typing import Any

import pytest

from h3kv.core.errors import HostMemoryError, InternalError
from h3kv.core.types import BlockKey, SegmentId
from h3kv.engine.events import Event, Failed, Finished, PrefillProgress, TokenGenerated
from h3kv.engine.request import Request, SamplingParameters
from h3kv.engine.stopping import FinishReason
from h3kv.telemetry import names
from h3kv.testing.engines import Rig, make_rig, one_thread, prompt_tokens, tiny_store
from h3kv.testing.faulty_store import Call, FaultyStore, InjectedFaultError

from .test_engine_cancel import BrokenModel

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("single_thread")]


@pytest.fixture
def single_thread() -> Iterator[None]:
    with one_thread():
        yield


PROMPT = prompt_tokens(31, 300)
REQUEST = Request(prompt=tuple(PROMPT), sampling=SamplingParameters(max_new_tokens=4, ignore_eos=True))


def drain(rig: Rig) -> list[Event]:
    events: list[Event] = []
    while rig.engine.has_work:
        events += rig.engine.step()
    return events


def expected() -> list[int]:
    return make_rig().answer(PROMPT)[0]


def tokens_of(events: list[Event]) -> list[int]:
    return [event.token for event in events if isinstance(event, TokenGenerated)]


def test_step_beside_an_open_stream_takes_nothing_from_it() -> None:
    rig = make_rig()
    stream = rig.engine.generate(REQUEST)
    seen = [next(stream)]
    other = rig.engine.submit(REQUEST)
    assert {event.request for event in drain(rig)} == {other}
    seen += stream
    assert tokens_of(seen) == expected()
    assert isinstance(seen[-1], Finished)
    rig.check_idle()


def test_stream_of_a_request_that_is_lost_ends_with_an_error() -> None:
    rig = make_rig()
    stream = rig.engine.generate(REQUEST)
    next(stream)
    rig.engine._running.clear()
    with pytest.raises(InternalError, match="without a last event"):
        next(stream)


@pytest.mark.parametrize(
    "error",
    [
        RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 123 bytes."),
        MemoryError(),
        ValueError("strange"),
        AssertionError(),
    ],
)
@pytest.mark.parametrize("call", [1, 2, 5])
def test_unexpected_exception_fails_its_request_and_no_other(error: Exception, call: int) -> None:
    """Two requests take turns; of six chunks and six tokens one breaks."""
    rig = make_rig(model=BrokenModel(call=call, error=error))
    requests = [rig.engine.submit(REQUEST) for _ in range(2)]
    events = drain(rig)
    ends = {event.request: event for event in events if isinstance(event, Failed | Finished)}
    assert set(ends) == set(requests)
    (failed,) = [event for event in ends.values() if isinstance(event, Failed)]
    (finished,) = [event for event in ends.values() if isinstance(event, Finished)]
    assert failed.error.__cause__ is error
    if isinstance(error, RuntimeError | MemoryError):
        assert isinstance(failed.error, HostMemoryError)
        assert failed.error.needed_bytes == (123 if isinstance(error, RuntimeError) else None)
    else:
        assert isinstance(failed.error, InternalError)
        assert type(error).__name__ in str(failed.error)
    assert tokens_of([event for event in events if event.request == finished.request]) == expected()
    rig.check_idle()


def test_stream_goes_on_when_another_request_breaks() -> None:
    model = BrokenModel(call=100, error=ValueError("strange"))
    rig = make_rig(model=model)
    stream = rig.engine.generate(REQUEST)
    seen = [next(stream)]
    other = rig.engine.submit(REQUEST)
    model.calls_left = 2
    seen += stream
    assert tokens_of(seen) == expected()
    assert isinstance(drain(rig)[-1], Failed)
    assert rig.engine.cancel(other) is None
    rig.check_idle()


@pytest.mark.parametrize("number", range(1, 7))
def test_refused_seal_costs_reuse_and_nothing_else(number: int) -> None:
    rig = make_rig(store=FaultyStore(tiny_store(64), broken_calls={"submit": [number]}))
    for _ in range(3):
        assert rig.answer(PROMPT)[0] == expected()
        rig.engine.check_integrity()
    assert rig.telemetry.value(names.FAILED_SEALS, tier="device") <= 1
    if number <= 2:
        assert rig.telemetry.value(names.FAILED_SEALS, tier="device") == 1
    rig.check_idle()


@pytest.mark.parametrize(("call", "numbers"), [("reserve", range(1, 3)), ("address", range(1, 7))])
def test_refused_room_fails_its_request_and_no_other(call: Call, numbers: range) -> None:
    for number in numbers:
        rig = make_rig(store=FaultyStore(tiny_store(64), broken_calls={call: [number]}))
        requests = [rig.engine.submit(REQUEST) for _ in range(2)]
        ends = {event.request: event for event in drain(rig) if isinstance(event, Failed | Finished)}
        assert set(ends) == set(requests)
        (failed,) = [event for event in ends.values() if isinstance(event, Failed)]
        assert isinstance(failed.error, InjectedFaultError)
        assert rig.answer(PROMPT)[0] == expected()
        rig.check_idle()


@pytest.mark.parametrize(("call", "numbers"), [("reserve", range(1, 3)), ("address", range(1, 7))])
def test_interrupt_during_admission_leaves_the_request_waiting(call: Call, numbers: range) -> None:
    for number in numbers:
        store = FaultyStore(tiny_store(64), broken_calls={call: [number]}, refusal=KeyboardInterrupt())
        rig = make_rig(store=store)
        requests = [rig.engine.submit(REQUEST) for _ in range(2)]
        with pytest.raises(KeyboardInterrupt):
            drain(rig)
        assert set(rig.run()) == set(requests)
        rig.check_idle()


def test_interrupt_while_a_sequence_is_made_leaves_the_request_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    rig = make_rig()
    request = rig.engine.submit(REQUEST)

    def interrupted() -> int:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(rig.clock, "now_ns", interrupted)
        with pytest.raises(KeyboardInterrupt):
            rig.engine.step()
    assert rig.segments.statistics().pins == 0
    assert rig.store.statistics().used_bytes == 0
    assert set(rig.run()) == {request}
    rig.check_idle()


class InterruptedQueue(deque[Any]):
    """Interrupted once, when a request was put in or taken out."""

    is_armed = True

    def append(self, item: Any) -> None:
        super().append(item)
        self._interrupt()

    def remove(self, item: Any) -> None:
        super().remove(item)
        self._interrupt()

    def _interrupt(self) -> None:
        armed, self.is_armed = self.is_armed, False
        if armed:
            raise KeyboardInterrupt


@pytest.mark.parametrize("queue", ["_running", "_waiting"])
def test_interrupt_between_waiting_and_running_leaves_the_request_waiting(queue: str) -> None:
    rig = make_rig()
    requests = [rig.engine.submit(REQUEST) for _ in range(2)]
    setattr(rig.engine, queue, InterruptedQueue(getattr(rig.engine, queue)))
    with pytest.raises(KeyboardInterrupt):
        rig.engine.step()
    assert rig.store.statistics().used_bytes == 0
    assert set(rig.run()) == set(requests)
    rig.check_idle()


def test_request_ends_well_when_its_last_blocks_cannot_be_shared(monkeypatch: pytest.MonkeyPatch) -> None:
    rig = make_rig()
    stream = rig.engine.generate(REQUEST)
    assert isinstance(next(stream), PrefillProgress)

    def refuse(keys: Sequence[BlockKey], segment: SegmentId) -> None:
        raise OSError("no directory")

    with monkeypatch.context() as patch:
        patch.setattr(rig.directory, "publish", refuse)
        rig.engine.close()
    (last,) = stream
    assert isinstance(last, Finished)
    assert last.reason is FinishReason.CANCELLED
    assert rig.answer(PROMPT)[0] == expected()
    rig.check_idle()
