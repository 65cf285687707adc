"""The engine when room is short, moves fail, or requests are many."""

from collections.abc import Iterator

import pytest

from h3kv.core.errors import ContextLengthError, TierFullError
from h3kv.core.units import describe_size, parse_size
from h3kv.engine.events import Event, Failed, Finished
from h3kv.engine.request import Request, RequestId, SamplingParameters
from h3kv.telemetry import names
from h3kv.testing.engines import LAYOUT, Rig, make_rig, one_thread, prompt_tokens, tiny_store
from h3kv.testing.fake_store import FakeStore
from h3kv.testing.faulty_store import FaultyStore

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("single_thread")]


@pytest.fixture
def single_thread() -> Iterator[None]:
    with one_thread():
        yield


SAMPLING = SamplingParameters(max_new_tokens=4, ignore_eos=True)


def submit(rig: Rig, prompt: list[int], *, max_new_tokens: int = 4) -> RequestId:
    sampling = SamplingParameters(max_new_tokens=max_new_tokens, ignore_eos=True)
    return rig.engine.submit(Request(prompt=tuple(prompt), sampling=sampling))


def expected(prompt: list[int]) -> list[int]:
    return make_rig().answer(prompt)[0]


def collect(rig: Rig) -> dict[RequestId, list[Event]]:
    events: dict[RequestId, list[Event]] = {}
    while rig.engine.has_work:
        for event in rig.engine.step():
            events.setdefault(event.request, []).append(event)
        rig.engine.check_integrity()
    return events


def tokens_of(events: list[Event]) -> list[int]:
    return [event.token for event in events if hasattr(event, "token")]


@pytest.mark.parametrize("is_prefix_cached", [False, True])
def test_two_requests_with_one_prefix_finish_in_a_pool_for_one(is_prefix_cached: bool) -> None:
    document = prompt_tokens(1, 1000)
    prompts = [document + prompt_tokens(seed, 60) for seed in (2, 3)]
    rig = make_rig(capacity_blocks=24)
    if is_prefix_cached:
        rig.answer(document)
    requests = [submit(rig, prompt) for prompt in prompts]
    events = collect(rig)
    for request, prompt in zip(requests, prompts, strict=True):
        assert isinstance(events[request][-1], Finished)
        assert tokens_of(events[request]) == expected(prompt)
    rig.check_idle()


def test_requests_that_do_not_fit_together_run_one_after_the_other() -> None:
    rig = make_rig(capacity_blocks=16)
    prompts = [prompt_tokens(seed, 700) for seed in (4, 5, 6)]
    requests = [submit(rig, prompt) for prompt in prompts]
    rig.engine.step()
    assert rig.telemetry.value(names.REQUESTS_IN_FLIGHT) == 1
    assert rig.telemetry.value(names.REQUESTS_WAITING) == 2
    events = collect(rig)
    ends = [request for request, of_request in events.items() if isinstance(of_request[-1], Finished)]
    assert ends == requests
    for request, prompt in zip(requests, prompts, strict=True):
        assert tokens_of(events[request]) == expected(prompt)
    rig.check_idle()


def test_waiting_requests_start_in_the_order_of_submission() -> None:
    """A small one behind a large one waits too: otherwise the large one might never start."""
    rig = make_rig(capacity_blocks=16)
    running, large, small = (submit(rig, prompt_tokens(seed, n)) for seed, n in ((7, 700), (8, 700), (9, 70)))
    order = list(collect(rig))
    assert order == [running, large, small]
    rig.check_idle()


def test_old_documents_are_evicted_and_recent_ones_stay() -> None:
    rig = make_rig(capacity_blocks=64)
    documents = [prompt_tokens(seed, 1100) for seed in range(10, 16)]
    for document in documents:
        rig.answer(document)
        statistics = rig.store.statistics()
        assert statistics.used_bytes <= statistics.capacity_bytes
        rig.engine.check_integrity()
    assert rig.telemetry.value(names.EVICTED_SEGMENTS, tier="device") > 0
    assert rig.answer(documents[-1])[1].statistics.cached_tokens_total == 17 * 64
    assert rig.answer(documents[-2])[1].statistics.cached_tokens_total == 17 * 64
    tokens, finished = rig.answer(documents[0])
    assert finished.statistics.cached_tokens_total == 0
    assert tokens == expected(documents[0])
    rig.check_idle()


def test_end_of_a_document_goes_before_its_beginning() -> None:
    rig = make_rig(capacity_blocks=64)
    document = prompt_tokens(20, 49 * 64 + 1)
    rig.answer(document, max_new_tokens=1)
    rig.answer(prompt_tokens(21, 1100))
    finished = rig.answer(document, max_new_tokens=1)[1]
    assert finished.statistics.cached_tokens_total in {17 * 64, 33 * 64}
    rig.check_idle()


def test_reuse_is_given_up_where_the_reused_segment_takes_the_room() -> None:
    """One shared block of a full segment pins all 16; the request would not fit beside them."""
    rig = make_rig(capacity_blocks=32)
    document = prompt_tokens(22, 17 * 64)
    rig.answer(document)
    other = document[:128] + prompt_tokens(23, 18 * 64 - 128)
    tokens, finished = rig.answer(other)
    assert finished.statistics.cached_tokens_total == 64
    assert tokens == expected(other)
    rig.check_idle()


def test_room_pinned_by_a_stranger_fails_the_request_with_the_sum() -> None:
    rig = make_rig(capacity_blocks=32)
    (stranger,) = rig.segments.open([16])
    request = submit(rig, prompt_tokens(24, 1100))
    (event,) = rig.engine.step()
    assert isinstance(event, Failed)
    assert event.request == request
    assert isinstance(event.error, TierFullError)
    assert event.error.needed_bytes == 18 * LAYOUT.block_bytes
    assert event.error.free_bytes == 16 * LAYOUT.block_bytes
    assert "device.kv_bytes" in str(event.error)
    assert rig.telemetry.value(names.REQUESTS, reason="TIER_FULL") == 1
    with pytest.raises(TierFullError):
        rig.answer(prompt_tokens(24, 1100))
    rig.segments.unpin(stranger)
    rig.answer(prompt_tokens(24, 1100))
    rig.check_idle()


@pytest.mark.parametrize(("prompt", "answer"), [(600, 4), (10, 600), (2000, 4), (1025, 1)])
def test_request_larger_than_the_cap_is_refused_with_a_cap_that_works(prompt: int, answer: int) -> None:
    rig = make_rig(capacity_blocks=8)
    with pytest.raises(TierFullError) as caught:
        submit(rig, prompt_tokens(25, prompt), max_new_tokens=answer)
    message = str(caught.value)
    assert f"{prompt:,} prompt tokens + {answer:,} answer tokens" in message
    assert describe_size(caught.value.needed_bytes) in message
    enough_bytes = parse_size(message.split("at least ")[1].split(",", maxsplit=1)[0])
    other = make_rig(capacity_blocks=enough_bytes // LAYOUT.block_bytes)
    assert other.store.statistics().capacity_bytes <= enough_bytes
    tokens, _ = other.answer(prompt_tokens(25, prompt), max_new_tokens=answer)
    assert len(tokens) == answer
    rig.check_idle()
    other.check_idle()


def test_answer_whose_length_nobody_asked_for_is_cut_to_the_room() -> None:
    rig = make_rig(capacity_blocks=20)
    sampling = SamplingParameters(max_new_tokens=8000, ignore_eos=True)
    with pytest.raises(TierFullError):
        rig.engine.submit(Request(prompt=(1, 2, 3), sampling=sampling))
    cut = rig.engine.submit(Request(prompt=(1, 2, 3), sampling=sampling, may_be_cut=True))
    (finished,) = rig.run().values()
    assert finished.request == cut
    assert finished.statistics.generated_tokens == rig.pool.capacity.blocks * 64 - 3 + 1
    rig.check_idle()


def test_prompt_and_answer_longer_than_the_context_are_refused() -> None:
    rig = make_rig()
    with pytest.raises(ContextLengthError) as caught:
        submit(rig, prompt_tokens(26, 8190), max_new_tokens=3)
    assert caught.value.needed_tokens == 8193
    assert caught.value.limit_tokens == 8192
    assert "lower max_new_tokens to 2" in str(caught.value)
    rig.check_idle()


def test_request_waits_for_seals_that_are_under_way() -> None:
    """What is being sealed cannot be evicted yet, but will be."""
    rig = make_rig(store=FakeStore(LAYOUT.slab, capacity_blocks=2 * 12, latency_polls=9))
    prompts = [prompt_tokens(seed, 700) for seed in (28, 29)]
    for prompt in prompts:
        assert rig.answer(prompt)[0] == expected(prompt)
    while not rig.segments.is_settled:
        rig.engine.step()
    rig.check_idle()


def test_thousand_short_requests_leave_the_store_as_it_was() -> None:
    rig = make_rig(capacity_blocks=32)
    prompts = [prompt_tokens(seed, 66 + seed % 5) for seed in range(20)]
    submitted = set()
    finished: dict[RequestId, Finished] = {}
    for number in range(1000):
        request = submit(rig, prompts[number * 7 % 20], max_new_tokens=1 + number % 2)
        submitted.add(request)
        if number % 3 == 0:
            finished |= {event.request: event for event in rig.engine.step() if isinstance(event, Finished)}
    finished |= rig.run()
    assert len(submitted) == 1000
    assert set(finished) == submitted
    assert rig.telemetry.value(names.REQUESTS, reason="length") == 1000
    assert rig.telemetry.value(names.REQUESTS_IN_FLIGHT) == 0
    rig.check_idle()


@pytest.mark.parametrize("broken", range(1, 9))
def test_failed_move_costs_reuse_and_nothing_else(broken: int) -> None:
    """A prompt of 1,200 tokens seals sinks, one full segment and a rest; in two layers each."""
    rig = make_rig(store=FaultyStore(tiny_store(64), broken_moves=[broken]))
    prompt = prompt_tokens(27, 1200)
    first, _ = rig.answer(prompt)
    assert first == expected(prompt)
    assert rig.telemetry.value(names.FAILED_SEALS, tier="device") == (broken <= 6)
    tokens, finished = rig.answer(prompt)
    assert tokens == first
    assert finished.statistics.cached_tokens_total == {1: 0, 2: 0, 3: 64, 4: 64, 5: 1088, 6: 1088}.get(broken, 1152)
    rig.check_idle()
