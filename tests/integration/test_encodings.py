"""Sequences on encoded pages: what is kept, moved, shared and retrieved gives the answers of a resident cache."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from h3kv.core.errors import ConfigError, TierFullError
from h3kv.core.retrieval import RetrievalSetting
from h3kv.core.types import Encoding, Tier
from h3kv.core.units import NS_PER_S
from h3kv.engine.cold_reads import WRAPPED
from h3kv.engine.events import TokenGenerated
from h3kv.engine.request import Request, SamplingParameters
from h3kv.engine.segment import Segment
from h3kv.telemetry import names
from h3kv.testing import tiered_rig as testing_rig
from h3kv.testing.engines import Rig, layout_of, make_rig, one_thread, prompt_tokens
from h3kv.testing.tiered_rig import WINDOW_TOKENS, tiered_rig
from h3kv.tiers.host import RegionStore

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("single_thread")]

CODES = [Encoding.INT8, Encoding.K8V4, Encoding.INT4]
CLUSTERED = [Encoding.K8V4, Encoding.INT4]
RETRIEVAL = RetrievalSetting(budget_tokens=128)


@pytest.fixture
def single_thread() -> Iterator[None]:
    with one_thread():
        yield


def resident(encoding: Encoding, *, retrieval: RetrievalSetting | None = None) -> Rig:
    layout = layout_of(encoding)
    return make_rig(capacity_blocks=160, layout=layout, window_tokens=WINDOW_TOKENS, retrieval=retrieval)


@pytest.mark.parametrize("encoding", CODES)
@pytest.mark.parametrize("tokens", [64, 700, 2500])
def test_answer_over_three_tiers_equals_that_of_a_resident_cache(
    encoding: Encoding, tokens: int, tmp_path: Path
) -> None:
    prompt = prompt_tokens(1, tokens)
    expected, _ = resident(encoding).answer(prompt, max_new_tokens=150)
    with tiered_rig(tmp_path, layout=layout_of(encoding)) as rig:
        assert rig.answer(prompt, max_new_tokens=150)[0] == expected
        rig.engine.check_integrity()


@pytest.mark.parametrize("encoding", CODES)
def test_prefix_is_shared_up_to_its_last_whole_block_wherever_two_prompts_part(
    encoding: Encoding, tmp_path: Path
) -> None:
    first = prompt_tokens(2, 2300)
    with tiered_rig(tmp_path, layout=layout_of(encoding), host_blocks=96) as rig:
        rig.answer(first)
        for common in (100, 1100, 1500, 2200):
            prompt = first[:common] + prompt_tokens(common, 200)
            tokens, finished = rig.answer(prompt, max_new_tokens=80)
            assert sum(finished.statistics.cached_tokens.values()) == common // 64 * 64
            # Which values of k8v4 are read in 8 bits depends on where parts of the attention begin.
            assert tokens == resident(encoding).answer(prompt, max_new_tokens=80)[0] or encoding is Encoding.K8V4
            rig.engine.check_integrity()


@pytest.mark.parametrize("encoding", CODES)
def test_prompts_that_branch_again_and_again_share_all_that_they_have_in_common(
    encoding: Encoding, tmp_path: Path
) -> None:
    prompts, common = [prompt_tokens(2, 1200)], [0]
    for shared, tokens in [(400, 1900), (1300, 2500), (1800, 2100)]:
        prompts.append(prompts[-1][:shared] + prompt_tokens(shared, tokens - shared))
        common.append(shared // 64 * 64)
    expected = [resident(encoding).answer(prompt, max_new_tokens=30)[0] for prompt in prompts]
    for place, host_blocks in [(None, 256), (tmp_path, 96)]:
        with tiered_rig(place, layout=layout_of(encoding), host_blocks=host_blocks) as rig:
            for prompt, shared, answer in zip(prompts, common, expected, strict=True):
                tokens, finished = rig.answer(prompt, max_new_tokens=30)
                # Which values of k8v4 are read in 8 bits depends on where parts of the attention begin.
                assert tokens == answer or encoding is Encoding.K8V4
                assert sum(finished.statistics.cached_tokens.values()) == shared
                rig.engine.check_integrity()


@pytest.mark.parametrize("encoding", [Encoding.RAW, Encoding.INT4])
def test_answer_goes_on_where_only_a_part_of_what_leaves_the_window_found_room(
    encoding: Encoding, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A segment was filled, and moves at once; the next one finds no room yet. The neighbour gives way meanwhile."""
    prompt = prompt_tokens(6, 1600)
    expected, _ = resident(encoding).answer(prompt, max_new_tokens=20)
    # So that one chunk fills a whole segment.
    monkeypatch.setattr(testing_rig, "CHUNK_TOKENS", 1280)
    with tiered_rig(tmp_path, layout=layout_of(encoding), host_blocks=96, device_blocks=64) as rig:
        opened, refused = rig.segments.open, 0

        def open_some(sizes: Sequence[int], *, waits: bool = True) -> list[Segment]:
            nonlocal refused
            filled = [each for each in rig.segments.everywhere() if each.room_blocks == 16]
            if filled and refused < 1 and rig.pool.running > 1:
                refused += 1
                rig.pool.placer.settle(NS_PER_S)
                for segment in filled:
                    assert segment.cold_L is not None and segment.home_L is not None
                    assert isinstance(rig.pool.home, RegionStore)
                    slots = [rig.pool.home.view(handle) for handle in segment.home_L]
                    rig.segments.release_home(segment)
                    for slot in slots:
                        slot[:] = b"\xff" * len(slot)
                raise TierFullError("not now", tier=Tier.HOST, needed_bytes=1, free_bytes=0)
            return opened(sizes, waits=waits)

        monkeypatch.setattr(rig.segments, "open", open_some)
        tokens: list[int] = []
        long = rig.engine.submit(
            Request(prompt=tuple(prompt), sampling=SamplingParameters(max_new_tokens=20, ignore_eos=True))
        )
        rig.engine.submit(Request(prompt=(1, 2), sampling=SamplingParameters(max_new_tokens=300, ignore_eos=True)))
        while rig.engine.has_work:
            new = [event for event in rig.engine.step() if isinstance(event, TokenGenerated)]
            tokens += [event.token for event in new if event.request == long]
        assert refused == 1
        assert tokens == expected
        rig.engine.check_integrity()


@pytest.mark.parametrize("encoding", CODES)
def test_prefix_is_found_by_the_next_process(encoding: Encoding, tmp_path: Path) -> None:
    first = prompt_tokens(3, 2300)
    with tiered_rig(tmp_path, layout=layout_of(encoding)) as rig:
        rig.answer(first)
    prompt = first[:1500] + prompt_tokens(4, 100)
    with tiered_rig(tmp_path, layout=layout_of(encoding)) as rig:
        tokens, finished = rig.answer(prompt)
        assert finished.statistics.cached_tokens[Tier.NVME] == 1500 // 64 * 64
        assert tokens == resident(encoding).answer(prompt)[0]


@pytest.mark.parametrize("encoding", CLUSTERED)
def test_retrieval_gives_the_same_answer_wherever_the_pages_lie(encoding: Encoding, tmp_path: Path) -> None:
    prompt = prompt_tokens(5, 3000)
    expected, _ = resident(encoding, retrieval=RETRIEVAL).answer(prompt, max_new_tokens=100)
    with tiered_rig(None, layout=layout_of(encoding), retrieval=RETRIEVAL, host_blocks=96) as rig:
        assert rig.answer(prompt, max_new_tokens=100)[0] == expected
    cold = {"layout": layout_of(encoding), "retrieval": RETRIEVAL, "host_blocks": 72, "page_cache_bytes": 1 << 18}
    with tiered_rig(tmp_path, **cold) as rig:
        assert rig.answer(prompt, max_new_tokens=100)[0] == expected
        assert rig.answer(prompt, max_new_tokens=100)[0] == expected, "also over a prefix that was found"
        rig.engine.check_integrity()
    with tiered_rig(tmp_path, **cold) as rig:
        assert rig.answer(prompt, max_new_tokens=100)[0] == expected, "also by the next process"


@pytest.mark.parametrize(("page_cache_bytes", "field"), [(0, "page_cache_bytes"), (1 << 16, "host.kv_bytes")])
def test_retrieval_without_room_for_single_pages_is_refused_at_once(
    page_cache_bytes: int, field: str, tmp_path: Path
) -> None:
    rig = tiered_rig(
        tmp_path,
        layout=layout_of(Encoding.K8V4),
        retrieval=RetrievalSetting(budget_tokens=4096),
        host_blocks=72,
        page_cache_bytes=page_cache_bytes,
    )
    with pytest.raises(ConfigError) as refused, rig:
        pass
    assert refused.value.field == field


def test_wrapped_segments_are_computed_again_once_under_retrieval(tmp_path: Path) -> None:
    # Keys that repeat, so that wrapping makes them smaller.
    prompt = [7] * 2000
    layout = layout_of(Encoding.K8V4)
    with tiered_rig(tmp_path, layout=layout, host_blocks=72, wrap="lz4") as rig:
        rig.answer(prompt)
    with tiered_rig(tmp_path, layout=layout, host_blocks=72, retrieval=RETRIEVAL, page_cache_bytes=1 << 18) as rig:
        found = [rig.answer(prompt)[1].statistics.cached_tokens_total for _ in range(3)]
        assert found[0] < 1984, "a clustered segment was computed again"
        assert found[1:] == [1984, 1984]
        assert rig.telemetry.value(names.LOST_SEGMENTS, reason=WRAPPED) == 1
        rig.engine.check_integrity()


def test_retrieval_with_the_whole_context_as_its_budget_is_exact() -> None:
    # In int4, which has no residues: tokens that retrieval chose are read without.
    prompt = prompt_tokens(6, 3000)
    expected, _ = resident(Encoding.INT4).answer(prompt, max_new_tokens=50)
    everything = RetrievalSetting(budget_tokens=4096)
    assert resident(Encoding.INT4, retrieval=everything).answer(prompt, max_new_tokens=50)[0] == expected


def test_what_was_answered_under_retrieval_is_not_shared() -> None:
    prompt = prompt_tokens(7, 2000)
    rig = resident(Encoding.K8V4, retrieval=RETRIEVAL)
    answer, _ = rig.answer(prompt, max_new_tokens=400)
    _, finished = rig.answer([*prompt, *answer, 1, 2])
    assert sum(finished.statistics.cached_tokens.values()) == 2000 // 64 * 64
    rig.check_idle()
