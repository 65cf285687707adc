"""The engine over a tiny decoder, from prompt to tokens."""

from collections.abc import Iterator

import pytest
import torch

from h3kv.attention.torch_pages import TorchPages
from h3kv.core.types import Tier
from h3kv.engine.events import Finished, PrefillProgress, TokenGenerated
from h3kv.engine.request import Request, RequestId, SamplingParameters
from h3kv.engine.stopping import FinishReason
from h3kv.telemetry import names
from h3kv.testing.contiguous_cache import ContiguousCache
from h3kv.testing.engines import CONFIG, LAYOUT, make_rig, one_thread, prompt_tokens, tiny_decoder, tiny_store
from h3kv.testing.fake_store import FakeStore
from h3kv.testing.hooked_model import HookedModel

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("single_thread")]


@pytest.fixture
def single_thread() -> Iterator[None]:
    with one_thread():
        yield


def greedy_oracle(prompt: list[int], count: int) -> list[int]:
    """Tokens by the plainest way: one sequence, one tensor per layer, no pages, no chunks."""
    decoder, cache = tiny_decoder(), ContiguousCache(CONFIG.layers)
    tokens: list[int] = []
    chunk = prompt
    for _ in range(count):
        logits_1V = decoder.forward(torch.tensor(chunk), cache, logits="last")
        tokens.append(int(logits_1V[0].argmax()))
        chunk = tokens[-1:]
    return tokens


@pytest.mark.parametrize("prompt_length", [1, 63, 64, 65, 128, 300, 1200])
def test_answers_equal_the_plainest_decoder(prompt_length: int) -> None:
    rig = make_rig()
    prompt = prompt_tokens(prompt_length, prompt_length)
    tokens, finished = rig.answer(prompt, max_new_tokens=12)
    assert tokens == greedy_oracle(prompt, 12)
    assert finished.reason is FinishReason.LENGTH
    assert finished.statistics.prompt_tokens == prompt_length
    assert finished.statistics.generated_tokens == 12
    assert finished.statistics.cached_tokens == {Tier.DEVICE: 0}
    rig.check_idle()


@pytest.mark.parametrize("prompt_length", [1, 64, 700])
def test_plain_torch_attention_serves_as_well(prompt_length: int) -> None:
    store = tiny_store(64)
    rig = make_rig(store=store, page_kernels=TorchPages(store.arena, LAYOUT.slab.page))
    prompt = prompt_tokens(prompt_length, prompt_length)
    for _ in range(2):
        assert rig.answer(prompt, max_new_tokens=8)[0] == greedy_oracle(prompt, 8)
    rig.check_idle()


def test_events_come_in_order_and_progress_counts_up() -> None:
    rig = make_rig(chunk_tokens=128)
    request = Request(prompt=tuple(prompt_tokens(1, 300)), sampling=SamplingParameters(max_new_tokens=3))
    events = list(rig.engine.generate(request))
    progress = [event for event in events if isinstance(event, PrefillProgress)]
    assert [event.done_tokens for event in progress] == [128, 256, 300]
    assert all(event.prompt_tokens == 300 and event.cached_tokens == 0 for event in progress)
    kinds = [type(event) for event in events]
    assert kinds == [PrefillProgress] * 3 + [TokenGenerated] * 3 + [Finished]
    rig.check_idle()


def test_second_question_prefills_only_the_question() -> None:
    rig = make_rig()
    document = prompt_tokens(2, 640)
    first, second = document + prompt_tokens(3, 20), document + prompt_tokens(4, 30)
    rig.answer(first)
    computed = rig.telemetry.value(names.PREFILL_TOKENS)
    tokens, finished = rig.answer(second)
    assert finished.statistics.cached_tokens == {Tier.DEVICE: 640}
    assert rig.telemetry.value(names.PREFILL_TOKENS) - computed == 30
    assert rig.telemetry.value(names.PREFIX_HIT_TOKENS, tier="device") == 640
    assert tokens == greedy_oracle(second, 4)
    rig.check_idle()


def test_same_prompt_with_and_without_a_hit_gives_equal_logits_and_tokens() -> None:
    """The last chunk is cut alike in both runs, so even the rounding is the same."""
    prompt = prompt_tokens(5, 256 + 10)
    cold, warm = LoggingModel(), LoggingModel()
    cold_rig, warm_rig = make_rig(model=cold), make_rig(model=warm)
    warm_rig.answer(prompt)
    warm.logits.clear()
    expected, _ = cold_rig.answer(prompt, max_new_tokens=8)
    tokens, finished = warm_rig.answer(prompt, max_new_tokens=8)
    assert finished.statistics.cached_tokens_total == 256
    assert tokens == expected
    assert all(torch.equal(a, b) for a, b in zip(warm.logits, cold.logits, strict=True))
    cold_rig.check_idle()
    warm_rig.check_idle()


@pytest.mark.parametrize("chunk_tokens", [64, 192, 1024])
def test_other_chunks_change_logits_by_less_than_a_ten_thousandth(chunk_tokens: int) -> None:
    prompt = prompt_tokens(6, 700)
    base, other = LoggingModel(), LoggingModel()
    base_rig, other_rig = make_rig(model=base, chunk_tokens=128), make_rig(model=other, chunk_tokens=chunk_tokens)
    expected, _ = base_rig.answer(prompt, max_new_tokens=8)
    tokens, _ = other_rig.answer(prompt, max_new_tokens=8)
    assert tokens == expected
    for a, b in zip(base.logits, other.logits, strict=True):
        torch.testing.assert_close(a, b, atol=1e-4, rtol=0)
    base_rig.check_idle()
    other_rig.check_idle()


class LoggingModel(HookedModel):
    """The tiny decoder; keeps the logits that the engine saw."""

    def __init__(self) -> None:
        self.logits: list[torch.Tensor] = []
        super().__init__(tiny_decoder(), after=self.logits.append)


def test_whole_prompt_cached_still_computes_its_last_token() -> None:
    rig = make_rig()
    prompt = prompt_tokens(7, 256)
    first, _ = rig.answer(prompt)
    again, finished = rig.answer(prompt)
    assert again == first
    assert finished.statistics.cached_tokens_total == 192
    rig.check_idle()


def test_next_turn_reuses_the_answer_of_the_last_one() -> None:
    rig = make_rig()
    prompt = prompt_tokens(8, 100)
    tokens, _ = rig.answer(prompt, max_new_tokens=100)
    turn = prompt + tokens + prompt_tokens(9, 10)
    continued, finished = rig.answer(turn)
    assert finished.statistics.cached_tokens_total == 192
    assert continued == greedy_oracle(turn, 4)
    rig.check_idle()


@pytest.mark.parametrize("shared", [64, 128, 5 * 64, 17 * 64, 20 * 64])
def test_divergence_inside_a_segment_reuses_the_blocks_before_it(shared: int) -> None:
    rig = make_rig()
    document = prompt_tokens(10, 24 * 64)
    rig.answer(document)
    other = document[:shared] + prompt_tokens(11, 200)
    tokens, finished = rig.answer(other)
    assert finished.statistics.cached_tokens_total == shared
    assert tokens == greedy_oracle(other, 4)
    third = other[: shared + 128] + prompt_tokens(12, 70)
    tokens, finished = rig.answer(third)
    assert finished.statistics.cached_tokens_total == shared + 128
    assert tokens == greedy_oracle(third, 4)
    rig.check_idle()


def test_two_running_sequences_share_a_prefix() -> None:
    rig = make_rig()
    document = prompt_tokens(13, 1200)
    rig.answer(document)
    used = rig.store.statistics().used_bytes
    sampling = SamplingParameters(max_new_tokens=6, ignore_eos=True)
    prompts = [document[:1152] + prompt_tokens(seed, 40) for seed in (14, 15)]
    requests = [rig.engine.submit(Request(prompt=tuple(prompt), sampling=sampling)) for prompt in prompts]
    answers: dict[int, list[int]] = {request: [] for request in requests}
    while rig.engine.has_work:
        for event in rig.engine.step():
            if isinstance(event, TokenGenerated):
                answers[event.request].append(event.token)
        rig.engine.check_integrity()
        assert rig.store.statistics().used_bytes <= used + 2 * 32 * 1024
    for request, prompt in zip(requests, prompts, strict=True):
        assert answers[request] == greedy_oracle(prompt, 6)
    rig.check_idle()


def test_running_answers_take_their_tokens_together() -> None:
    rig = make_rig()
    sampling = SamplingParameters(max_new_tokens=20, ignore_eos=True)
    requests = [
        rig.engine.submit(Request(prompt=tuple(prompt_tokens(seed, 64)), sampling=sampling)) for seed in (16, 17)
    ]
    steps: list[list[RequestId]] = []
    while rig.engine.has_work:
        steps.append([event.request for event in rig.engine.step() if isinstance(event, TokenGenerated)])
    first_of_second = next(place for place, step in enumerate(steps) if requests[1] in step)
    last_of_first = max(place for place, step in enumerate(steps) if requests[0] in step)
    assert last_of_first > first_of_second
    assert all(step == requests for step in steps[first_of_second + 1 : last_of_first + 1])
    rig.check_idle()


def test_tenants_do_not_share() -> None:
    rig = make_rig()
    prompt = prompt_tokens(18, 300)
    expected, _ = rig.answer(prompt, tenant=b"a")
    tokens, finished = rig.answer(prompt, tenant=b"b")
    assert finished.statistics.cached_tokens_total == 0
    assert tokens == expected
    assert rig.answer(prompt, tenant=b"a")[1].statistics.cached_tokens_total == 256
    rig.check_idle()


def test_full_segments_are_shared_while_their_sequence_still_runs() -> None:
    rig = make_rig(chunk_tokens=64)
    document = prompt_tokens(19, 1200)
    sampling = SamplingParameters(max_new_tokens=50, ignore_eos=True)
    rig.engine.submit(Request(prompt=tuple(document), sampling=sampling))
    while rig.segments.statistics().sealed < 2:
        rig.engine.step()
    tokens, finished = rig.answer(document)
    # It waits for the rest of the prompt besides, which is shared as soon as it is read.
    assert finished.statistics.cached_tokens_total == 18 * 64
    assert tokens == greedy_oracle(document, 4)
    rig.run()
    rig.check_idle()


def test_two_segments_with_equal_blocks_are_both_used() -> None:
    """Two sequences compute the same document at once; a third continues the longer one."""
    rig = make_rig()
    document = prompt_tokens(20, 20 * 64)
    sampling = SamplingParameters(max_new_tokens=1)
    for length in (9 * 64 + 1, 20 * 64):
        rig.engine.submit(Request(prompt=tuple(document[:length]), sampling=sampling))
    rig.run()
    third = document[: 18 * 64] + prompt_tokens(21, 10)
    tokens, finished = rig.answer(third)
    assert finished.statistics.cached_tokens_total == 18 * 64
    assert tokens == greedy_oracle(third, 4)
    rig.check_idle()


def test_store_that_completes_moves_late_serves_the_same_tokens() -> None:
    rig = make_rig(store=FakeStore(LAYOUT.slab, capacity_blocks=256, latency_polls=3))
    prompt = prompt_tokens(22, 1300)
    expected = greedy_oracle(prompt, 4)
    assert rig.answer(prompt)[0] == expected
    while not rig.segments.is_settled:
        rig.engine.step()
    tokens, finished = rig.answer(prompt)
    assert tokens == expected
    assert finished.statistics.cached_tokens_total == 20 * 64
    while not rig.segments.is_settled:
        rig.engine.step()
    rig.check_idle()


def test_times_come_from_the_clock() -> None:
    rig = make_rig(chunk_tokens=64)
    _, finished = rig.answer(prompt_tokens(23, 130), max_new_tokens=4)
    statistics = finished.statistics
    # The clock moves one millisecond at each reading: a chunk of two layers reads it before and after each step.
    assert statistics.prefill_ns == 9_000_000
    assert statistics.time_to_first_token_ns is not None
    assert statistics.time_to_first_token_ns > statistics.waiting_ns + statistics.prefill_ns
    # Beginning, scores and end of the token of all answers: the first gap begins behind its beginning.
    assert statistics.inter_token_ns == (2_000_000, 3_000_000, 3_000_000)
    assert statistics.waiting_ns == 1_000_000
    first_token = rig.telemetry.distribution(names.TTFT)
    assert first_token is not None
    assert first_token.count == 1
    between = rig.telemetry.distribution(names.ITL)
    assert between is not None
    assert between.count == 3
    rig.check_idle()


def test_metrics_follow_requests() -> None:
    rig = make_rig(capacity_blocks=64)
    assert rig.telemetry.value(names.TIER_CAPACITY, tier="device") == 64 * 32 * 1024
    request = Request(
        prompt=tuple(prompt_tokens(24, 100)), sampling=SamplingParameters(max_new_tokens=5, ignore_eos=True)
    )
    rig.engine.submit(request)
    assert rig.telemetry.value(names.REQUESTS_WAITING) == 1
    rig.engine.step()
    assert rig.telemetry.value(names.REQUESTS_WAITING) == 0
    assert rig.telemetry.value(names.REQUESTS_IN_FLIGHT) == 1
    assert rig.telemetry.value(names.TIER_PINNED, tier="device") == 2 * 32 * 1024
    rig.run()
    assert rig.telemetry.value(names.REQUESTS_IN_FLIGHT) == 0
    assert rig.telemetry.value(names.TIER_PINNED, tier="device") == 0
    assert rig.telemetry.value(names.TIER_USED, tier="device") == 32 * 1024
    assert rig.telemetry.value(names.SEGMENTS_CACHED) == 1
    assert rig.telemetry.value(names.REQUESTS, reason="length") == 1
    assert rig.telemetry.value(names.PREFILL_TOKENS) == 100
    assert rig.telemetry.value(names.DECODE_TOKENS) == 5
    rig.check_idle()
