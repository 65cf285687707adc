"""Sequences on three tiers: every answer equals that of the same prompt with all KV on the device."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from h3kv.core.errors import ConfigError, TierFullError
from h3kv.core.types import Tier
from h3kv.engine.events import Failed, TokenGenerated
from h3kv.engine.request import Request, RequestId, SamplingParameters
from h3kv.telemetry import names
from h3kv.testing.engines import Rig, make_rig, one_thread, prompt_tokens, tiny_decoder
from h3kv.testing.hooked_model import HookedModel
from h3kv.testing.tiered_rig import tiered_rig

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("single_thread")]


@pytest.fixture
def single_thread() -> Iterator[None]:
    with one_thread():
        yield


def oracle(prompt: list[int], *, max_new_tokens: int = 4) -> list[int]:
    return make_rig(capacity_blocks=160).answer(prompt, max_new_tokens=max_new_tokens)[0]


def request(prompt: list[int], *, max_new_tokens: int = 4) -> Request:
    return Request(prompt=tuple(prompt), sampling=SamplingParameters(max_new_tokens=max_new_tokens, ignore_eos=True))


def answers(rig: Rig, requests: list[Request]) -> list[list[int]]:
    """Tokens of all requests, run side by side."""
    tokens: dict[RequestId, list[int]] = {rig.engine.submit(one): [] for one in requests}
    while rig.engine.has_work:
        for event in rig.engine.step():
            assert not isinstance(event, Failed), event
            if isinstance(event, TokenGenerated):
                tokens[event.request].append(event.token)
        rig.engine.check_integrity()
    return list(tokens.values())


def close_to_caps(rig: Rig) -> None:
    for statistics in rig.pool.statistics().values():
        assert statistics.used_bytes <= statistics.capacity_bytes


@pytest.mark.parametrize("tokens", [5, 64, 129, 700, 1500, 4000])
def test_answer_equals_that_of_a_resident_cache(tokens: int, tmp_path: Path) -> None:
    prompt = prompt_tokens(1, tokens)
    with tiered_rig(tmp_path) as rig:
        assert rig.answer(prompt)[0] == oracle(prompt)
        rig.engine.check_integrity()
        assert rig.pool.stream is not None
        assert (rig.pool.stream.bytes_fetched_total > 0) == (tokens >= 1500)
        close_to_caps(rig)


def test_answer_of_many_tokens_moves_on_through_the_tiers(tmp_path: Path) -> None:
    prompt = prompt_tokens(2, 1000)
    with tiered_rig(tmp_path) as rig:
        assert rig.answer(prompt, max_new_tokens=700)[0] == oracle(prompt, max_new_tokens=700)
        close_to_caps(rig)


@pytest.mark.parametrize("tokens", [300, 1500])
def test_device_without_native_kernels_attends_to_its_window_alone(tokens: int, tmp_path: Path) -> None:
    prompt = prompt_tokens(3, tokens)
    with tiered_rig(tmp_path, on_torch=True) as rig:
        assert rig.answer(prompt, max_new_tokens=150)[0] == oracle(prompt, max_new_tokens=150)


def test_host_alone_serves_what_fits(tmp_path: Path) -> None:
    prompt = prompt_tokens(4, 1500)
    with tiered_rig(None) as rig:
        assert rig.answer(prompt)[0] == oracle(prompt)
        assert set(rig.pool.statistics()) == {Tier.DEVICE, Tier.HOST}
        with pytest.raises(TierFullError, match="host"):
            rig.engine.submit(request(prompt_tokens(5, 4000)))
        rig.check_idle()


def test_request_longer_than_all_tiers_is_refused_before_it_starts(tmp_path: Path) -> None:
    with tiered_rig(tmp_path, units=2) as rig:
        with pytest.raises(TierFullError, match=r"raise nvme\.capacity"):
            rig.engine.submit(request(prompt_tokens(6, 4000)))
        assert not rig.engine.has_work


def test_sequences_take_turns_on_the_tiers(tmp_path: Path) -> None:
    prompts = [prompt_tokens(seed, tokens) for seed, tokens in ((10, 1500), (11, 900), (12, 70), (13, 1300))]
    with tiered_rig(tmp_path, units=16) as rig:
        got = answers(rig, [request(prompt, max_new_tokens=30) for prompt in prompts])
        assert got == [oracle(prompt, max_new_tokens=30) for prompt in prompts]
        close_to_caps(rig)


def test_pool_smaller_than_two_prompts_that_share_a_prefix_serves_both(tmp_path: Path) -> None:
    shared = prompt_tokens(20, 1200)
    prompts = [[*shared, *prompt_tokens(seed, 400)] for seed in (21, 22)]
    with tiered_rig(tmp_path, units=2) as rig:
        assert answers(rig, [request(prompt) for prompt in prompts]) == [oracle(prompt) for prompt in prompts]


@pytest.mark.parametrize("divergence", [0, 1, 63, 64, 65, 1000, 1024, 1088, 1500])
def test_shared_prefix_of_any_length_is_reused_up_to_its_last_whole_block(divergence: int, tmp_path: Path) -> None:
    first = prompt_tokens(30, 1600)
    second = [*first[:divergence], *prompt_tokens(31, 1600 - divergence)]
    second[divergence] = (first[divergence] + 1) % 256
    with tiered_rig(tmp_path) as rig:
        rig.answer(first)
        tokens, finished = rig.answer(second)
        assert tokens == oracle(second)
        assert finished.statistics.cached_tokens_total == divergence // 64 * 64
        rig.engine.check_integrity()


def test_prefix_is_found_after_a_restart(tmp_path: Path) -> None:
    prompt = prompt_tokens(40, 1700)
    with tiered_rig(tmp_path) as rig:
        expected = rig.answer(prompt, max_new_tokens=100)[0]
    with tiered_rig(tmp_path) as rig:
        tokens, finished = rig.answer(prompt, max_new_tokens=100)
        assert tokens == expected
        assert finished.statistics.cached_tokens[Tier.NVME] == 1664
        # The answer was kept too.
        longer = [*prompt, *tokens, *prompt_tokens(41, 10)]
        tokens, finished = rig.answer(longer)
        assert tokens == oracle(longer)
        assert finished.statistics.cached_tokens_total == 1792


def test_many_small_segments_are_read_through_the_fewest_staging_slots(tmp_path: Path) -> None:
    """Each turn leaves segments of one block; a batch of pages then needs a slab for each of its pages at once."""
    with tiered_rig(tmp_path) as rig:
        prompt = prompt_tokens(45, 1500)
        for turn in range(12):
            tokens, _ = rig.answer(prompt)
            prompt = [*prompt, *tokens, *prompt_tokens(46 + turn, 61)]
        assert rig.answer(prompt)[0] == oracle(prompt)
        assert rig.pool.stream is not None
        assert rig.pool.stream.bytes_fetched_total > 0
        for reason in ("SLAB_CORRUPT", "SLAB_UNAVAILABLE"):
            assert rig.telemetry.value(names.LOST_SEGMENTS, reason=reason) == 0


def test_segments_come_back_into_host_where_there_is_room(tmp_path: Path) -> None:
    prompt = prompt_tokens(42, 1100)
    with tiered_rig(tmp_path) as rig:
        expected = rig.answer(prompt)[0]
    with tiered_rig(tmp_path, host_blocks=96) as rig:
        assert rig.answer(prompt)[0] == expected
        moves = rig.telemetry.value(names.MOVES, source="nvme", target="host", reason="reuse")
        assert moves > 0
        durations = rig.telemetry.distribution(names.MOVE_DURATION, source="nvme", target="host")
        assert durations is not None
        assert durations.count == moves
        assert rig.pool.stream is not None
        assert rig.pool.stream.bytes_fetched_total == 0, "what comes back is read once"
        rig.engine.check_integrity()


@pytest.mark.parametrize("other", ["fingerprint", "tenant"])
def test_kv_of_another_model_or_tenant_is_a_miss(other: str, tmp_path: Path) -> None:
    prompt = prompt_tokens(43, 600)
    with tiered_rig(tmp_path) as rig:
        rig.answer(prompt)
    fingerprint = {} if other == "tenant" else {"fingerprint": bytes(32)}
    with tiered_rig(tmp_path, **fingerprint) as rig:
        tokens, finished = rig.answer(prompt, tenant=b"someone" if other == "tenant" else b"")
        assert tokens == oracle(prompt)
        assert finished.statistics.cached_tokens_total == 0


def test_cancelled_in_the_middle_of_a_promotion_gives_everything_back(tmp_path: Path) -> None:
    prompt = prompt_tokens(44, 1500)
    with tiered_rig(tmp_path) as rig:
        rig.answer(prompt)
    with tiered_rig(tmp_path, host_blocks=96) as rig:
        stream = rig.engine.generate(request(prompt))
        next(stream)
        stream.close()
        assert rig.segments.statistics().pins == 0
        rig.pool.placer.settle(10_000_000_000)
        rig.engine.check_integrity()
        assert rig.answer(prompt)[0] == oracle(prompt)


def test_three_times_the_cap_is_served_within_the_caps(tmp_path: Path) -> None:
    with tiered_rig(tmp_path, units=2) as rig:
        for seed in range(50, 57):
            prompt = prompt_tokens(seed, 1000)
            assert rig.answer(prompt)[0] == oracle(prompt)
            close_to_caps(rig)
            rig.engine.check_integrity()
        assert rig.telemetry.value(names.EVICTED_SEGMENTS, tier="nvme") > 0


def test_caps_below_one_running_sequence_are_refused_with_the_sum(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="below one unit"), tiered_rig(tmp_path, device_blocks=0):
        pass
    with pytest.raises(ConfigError, match="staging"), tiered_rig(tmp_path, host_blocks=40):
        pass


class Interrupted(HookedModel):
    """The tiny decoder, interrupted like by Ctrl-C in one of its calls."""

    def __init__(self, call: int) -> None:
        super().__init__(tiny_decoder(), before=lambda *_: self._count())
        self._left = call

    def _count(self) -> None:
        self._left -= 1
        if self._left == 0:
            raise KeyboardInterrupt


@pytest.mark.parametrize("call", [1, 3, 6, 9])
def test_interrupt_anywhere_leaves_the_store_intact(call: int, tmp_path: Path) -> None:
    prompt = prompt_tokens(60, 1500)
    with pytest.raises(KeyboardInterrupt), tiered_rig(tmp_path, model=Interrupted(call)) as rig:
        rig.answer(prompt)
    with tiered_rig(tmp_path) as rig:
        assert rig.answer(prompt)[0] == oracle(prompt)
        rig.engine.check_integrity()
