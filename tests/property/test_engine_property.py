"""Any order of submissions, steps and cancellations in a pool that is too small: right tokens, nothing leaked."""

import functools
import itertools
from collections.abc import Iterator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from h3kv.engine.events import Event, Failed, Finished, TokenGenerated
from h3kv.engine.request import Request, RequestId, SamplingParameters
from h3kv.engine.stopping import FinishReason
from h3kv.testing.engines import make_rig, one_thread, prompt_tokens, tiny_store
from h3kv.testing.faulty_store import Call, FaultyStore, InjectedFaultError

ANSWER = 3
DOCUMENTS = [prompt_tokens(seed, 400) for seed in (1, 2)]

LENGTHS = st.one_of(st.integers(1, 330), st.integers(1, 5).map(lambda blocks: 64 * blocks))
PROMPTS = st.tuples(st.sampled_from([0, 1]), LENGTHS, st.sampled_from([0, 1, 70]))
"""A document, how many tokens of it, and how many of another text after them."""
ACTIONS = st.one_of(
    PROMPTS,
    PROMPTS.map(lambda prompt: ("stream", prompt)),
    st.tuples(st.integers(0, 2), st.integers(1, 6)).map(lambda pull: ("pull", pull)),
    st.integers(1, 12).map(lambda steps: ("step", steps)),
    st.integers(0, 5).map(lambda number: ("cancel", number)),
)


def prompt_of(document: int, length: int, tail: int) -> tuple[int, ...]:
    return tuple(DOCUMENTS[document][:length] + prompt_tokens(9, tail))


@functools.cache
def expected(prompt: tuple[int, ...]) -> list[int]:
    return make_rig().answer(prompt, max_new_tokens=ANSWER)[0]


class History:
    """An engine in a pool of 16 blocks whose store breaks some moves, and what is known of its requests."""

    def __init__(self, broken: list[int], refused: dict[Call, list[int]]) -> None:
        store = FaultyStore(tiny_store(16), broken_moves=broken, broken_calls=refused)
        self.rig = make_rig(store=store)
        self.streams: list[Iterator[Event]] = []
        self.failed: set[RequestId] = set()
        self.prompts: dict[RequestId, tuple[int, ...]] = {}
        self.tokens: dict[RequestId, list[int]] = {}
        self.reasons: dict[RequestId, FinishReason] = {}

    def submit(self, prompt: tuple[int, ...]) -> None:
        sampling = SamplingParameters(max_new_tokens=ANSWER, ignore_eos=True)
        request = self.rig.engine.submit(Request(prompt=prompt, sampling=sampling))
        self.know(request, prompt)

    def stream(self, prompt: tuple[int, ...]) -> None:
        sampling = SamplingParameters(max_new_tokens=ANSWER, ignore_eos=True)
        stream = self.rig.engine.generate(Request(prompt=prompt, sampling=sampling))
        try:
            event = next(stream)
        except InjectedFaultError:
            return
        self.know(event.request, prompt)
        self.streams.append(stream)
        self.see(event)

    def pull(self, number: int, count: int) -> None:
        if number < len(self.streams):
            for event in itertools.islice(self.streams[number], count):
                self.see(event)

    def know(self, request: RequestId, prompt: tuple[int, ...]) -> None:
        self.prompts[request], self.tokens[request] = prompt, []

    def cancel(self, request: RequestId) -> None:
        finished = self.rig.engine.cancel(request)
        if finished is not None:
            self.reasons[request] = finished.reason

    def step(self) -> None:
        for event in self.rig.engine.step():
            self.see(event)
        statistics = self.rig.store.statistics()
        assert statistics.used_bytes <= statistics.capacity_bytes
        self.rig.engine.check_integrity()

    def see(self, event: Event) -> None:
        if isinstance(event, Failed):
            assert isinstance(event.error, InjectedFaultError)
            self.failed.add(event.request)
        if isinstance(event, TokenGenerated):
            self.tokens[event.request].append(event.token)
        if isinstance(event, Finished):
            self.reasons[event.request] = event.reason

    def act(self, action: tuple[object, ...]) -> None:
        match action:
            case ("step", int(steps)):
                for _ in range(steps):
                    self.step()
            case ("cancel", int(number)):
                self.cancel(RequestId(number + 1))
            case ("stream", (int(document), int(length), int(tail))):
                self.stream(prompt_of(document, length, tail))
            case ("pull", (int(number), int(count))):
                self.pull(number, count)
            case (int(document), int(length), int(tail)):
                self.submit(prompt_of(document, length, tail))

    def finish(self) -> None:
        while self.rig.engine.has_work:
            self.step()
        for number in range(len(self.streams)):
            self.pull(number, 1000)
        assert self.reasons.keys() | self.failed == self.prompts.keys()
        assert not self.reasons.keys() & self.failed
        for request, reason in self.reasons.items():
            answer = expected(self.prompts[request])
            seen = self.tokens[request]
            assert seen == (answer if reason is FinishReason.LENGTH else answer[: len(seen)])
        self.rig.check_idle()


@pytest.mark.slow
@settings(max_examples=60)
@given(
    actions=st.lists(ACTIONS, min_size=6, max_size=16),
    broken=st.lists(st.integers(1, 40), max_size=3),
    refused=st.fixed_dictionaries(
        {"submit": st.lists(st.integers(1, 12), max_size=2), "reserve": st.lists(st.integers(1, 6), max_size=1)}
    ),
)
def test_any_history_gives_right_tokens_and_leaks_nothing(
    actions: list[tuple[object, ...]], broken: list[int], refused: dict[Call, list[int]]
) -> None:
    with one_thread():
        history = History(broken, refused)
        for action in actions:
            history.act(action)
        history.finish()
