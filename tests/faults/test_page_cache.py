"""Pages that come late, damaged or not at all, and segments that go while their pages are used or read."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import pytest

from h3kv.attention.retrieval import MISSING
from h3kv.core.errors import SlabCorruptError, SlabUnavailableError, TierBrokenError, TierFullError
from h3kv.core.types import SegmentId, SlabKey, Tier
from h3kv.testing.interrupting import InterruptAt
from h3kv.testing.page_rig import PageRig, wanted


@pytest.fixture
def rig() -> Iterator[PageRig]:
    rig = PageRig()
    yield rig
    rig.close()


def _key(segment: int, layer: int) -> SlabKey:
    return SlabKey(SegmentId(segment), layer)


def _damage(rig: PageRig, segment: int, layer: int) -> None:
    key = _key(segment, layer)
    rig.store.broken[rig.handles[key]] = SlabCorruptError("flipped", key=key)


def _break(rig: PageRig, segment: int, layer: int) -> None:
    rig.store.broken[rig.handles[_key(segment, layer)]] = TierBrokenError("EIO", tier=Tier.NVME)


def test_a_damaged_page_names_its_slab_and_is_never_given(rig: PageRig) -> None:
    lane = rig.lane()
    _damage(rig, 2, 0)
    for _ in range(2):
        with pytest.raises(SlabCorruptError) as caught:
            lane.take(0, wanted([(1, 0, 0), (2, 0, 0)]))
        assert caught.value.key == _key(2, 0)
    rig.take(lane, 0, [(1, 0, 0)])
    assert len(rig.store.started) == 3, "what came well is kept"


def test_a_page_that_cannot_be_read_is_unavailable_and_read_anew_the_next_time(rig: PageRig) -> None:
    lane = rig.lane()
    _break(rig, 1, 1)
    with pytest.raises(SlabUnavailableError, match="EIO") as caught:
        lane.take(1, wanted([(1, 0, 0), (3, 0, 0)]))
    assert caught.value.key == _key(1, 1)
    rig.store.broken.clear()
    rig.take(lane, 1, [(1, 0, 0), (3, 0, 0)])


def test_a_failure_while_nobody_waited_is_tried_again(rig: PageRig) -> None:
    lane = rig.lane()
    _break(rig, 1, 1)
    lane.expect(1, wanted([(1, 0, 0)]))
    rig.cache.drain()
    rig.store.broken.clear()
    rig.take(lane, 1, [(1, 0, 0)])


def test_a_late_page_whose_reading_ahead_fails_is_read_again(rig: PageRig) -> None:
    lane = rig.lane()
    rig.store.latency_polls = 3
    rig.store.broken_reads[1] = TierBrokenError("EIO", tier=Tier.NVME)
    lane.expect(1, wanted([(1, 0, 0)]))
    rig.take(lane, 1, [(1, 0, 0)])
    assert [read.is_ahead for read in rig.store.started] == [True, False]


def test_a_page_that_does_not_come_in_time_is_unavailable_and_may_come_later(rig: PageRig) -> None:
    lane = rig.lane()
    rig.store.latency_polls = 10_000
    with pytest.raises(SlabUnavailableError, match="did not come within"):
        lane.take(0, wanted([(1, 0, 0)]))
    rig.store.latency_polls = 1
    rig.take(lane, 0, [(1, 0, 0)])
    assert len(rig.store.started) == 1


def test_a_cache_smaller_than_what_a_layer_wants_says_so() -> None:
    rig = PageRig(host_slots=1)
    everything = list(itertools.product(range(1, 5), range(2), range(16)))
    assert len(everything) > rig.units
    with pytest.raises(TierFullError, match=r"raise host\.kv_bytes, or lower the retrieval budget"):
        rig.lane().take(0, wanted(everything))
    rig.take(rig.lane(), 0, everything[: rig.units])
    rig.close()


def test_a_segment_forgotten_while_it_is_read_leaves_no_page_behind(rig: PageRig) -> None:
    lane = rig.lane()
    rig.store.latency_polls = 5
    lane.expect(1, wanted([(1, 0, 0), (2, 0, 0)]))
    rig.cache.forget(SegmentId(1))
    rig.cache.drain()
    rig.take(lane, 1, [(2, 0, 0)])
    counts = rig.cache.statistics().units
    assert (counts.useful + counts.late, counts.wasted, counts.misses) == (1, 1, 0)
    rig.take(lane, 1, [(1, 0, 0)])
    assert rig.cache.statistics().units.misses == 1


def test_pages_of_a_forgotten_segment_stay_readable_until_they_are_given_back(rig: PageRig) -> None:
    holder, other = rig.lane(), rig.lane()
    addresses_N = holder.take(0, wanted([(1, 0, 0)]))
    rig.cache.forget(SegmentId(1))
    for segment, head in itertools.product(range(2, 5), range(2)):
        rig.take(other, 0, [(segment, head, block) for block in range(16)])
    rig.check(0, [(1, 0, 0)], addresses_N)
    holder.give_back()
    rig.cache.check_integrity()


def test_slots_are_handed_out_again_only_after_the_read_into_them_ended() -> None:
    rig = PageRig(host_slots=1)
    lane = rig.lane()
    rig.store.latency_polls = 8
    lane.expect(1, wanted([(1, 0, block) for block in range(16)]))
    rig.cache.forget(SegmentId(1))
    everything = list(itertools.product(range(2, 5), range(2), range(16)))
    rig.take(lane, 2, everything[: rig.units])
    rig.close()


def test_a_segment_that_is_gone_is_unavailable_and_others_are_still_read(rig: PageRig) -> None:
    lane = rig.lane()
    rig.take(lane, 0, [(1, 0, 0), (2, 0, 0)])
    rig.lose(1)
    with pytest.raises(SlabUnavailableError) as caught:
        lane.take(0, wanted([(1, 0, 5)]))
    assert caught.value.key == _key(1, 0)
    rig.take(lane, 0, [(2, 0, 9)])


def test_a_slab_that_left_does_not_stop_reads_of_its_neighbours(rig: PageRig) -> None:
    lane = rig.lane()
    rig.take(lane, 0, [(1, 0, 0), (2, 0, 0)])
    rig.lose(1)
    rig.take(lane, 0, [(2, 0, 9), (3, 0, 0)])


def test_a_wrapped_slab_is_computed_again(rig: PageRig) -> None:
    rig.store.wrapped.add(rig.handles[_key(1, 0)])
    with pytest.raises(SlabUnavailableError, match="compressed as a whole"):
        rig.lane().take(0, wanted([(1, 0, 0)]))


def test_best_effort_does_without_what_fails_but_not_with_damage(rig: PageRig) -> None:
    lane = rig.lane(patience_ns=100_000)
    _break(rig, 1, 0)
    addresses_N = lane.take(0, wanted([(1, 0, 0), (2, 0, 0)]))
    assert addresses_N[0] == MISSING
    rig.check(0, [(2, 0, 0)], addresses_N[1:])
    lane.give_back()
    _damage(rig, 3, 0)
    with pytest.raises(SlabCorruptError):
        lane.take(0, wanted([(3, 0, 0)]))


def test_a_guess_about_a_segment_that_is_gone_harms_nobody(rig: PageRig) -> None:
    lane = rig.lane()
    guess = wanted([(1, 0, 0), (2, 0, 0)])
    rig.lose(1)
    lane.expect(1, guess)
    rig.take(lane, 1, [(2, 0, 0)])


PAGE_MODULES = ("h3kv.engine.page_lane", "h3kv.engine.page_cache", "h3kv.engine.page_slots", "h3kv.engine.interrupts")


@pytest.mark.slow
@pytest.mark.parametrize("is_there", [False, True], ids=["read", "found"])
def test_an_interrupt_at_any_line_leaves_no_page_pinned_once_it_is_given_back(is_there: bool) -> None:
    pages = [(1, 0, 0), (2, 1, 5)]
    for line in itertools.count(1):
        rig = PageRig(segments=2, host_slots=1)
        lane = rig.lane()
        if is_there:
            rig.take(lane, 0, pages)
        interrupt = InterruptAt(line, PAGE_MODULES)
        try:
            with interrupt:
                lane.take(0, wanted(pages))
                lane.expect(1, wanted(pages))
                lane.give_back()
        except KeyboardInterrupt:
            lane.give_back()
        assert rig.cache.statistics().units.pinned == 0
        rig.close()
        if not interrupt.came:
            break


def test_whoever_was_interrupted_before_giving_back_takes_again(rig: PageRig) -> None:
    lane = rig.lane()
    with pytest.raises(KeyboardInterrupt), InterruptAt(1, PAGE_MODULES):
        lane.give_back()
    lane.take(0, wanted([(1, 0, 0)]))
    with pytest.raises(KeyboardInterrupt), InterruptAt(1, PAGE_MODULES):
        lane.give_back()
    assert rig.cache.statistics().units.pinned == 1
    rig.take(lane, 1, [(2, 0, 0)])
    assert rig.cache.statistics().units.pinned == 0
