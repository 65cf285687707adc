"""Pages of segments on NVMe: taken, kept, read ahead."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import pytest

from h3kv.attention.retrieval import MISSING
from h3kv.core.errors import ConfigError
from h3kv.core.limits import DIRECT_IO_BYTES
from h3kv.core.types import Encoding, SegmentId
from h3kv.engine.page_slots import unit_bytes
from h3kv.telemetry import names
from h3kv.testing.page_rig import PageRig, layout_of, wanted


@pytest.fixture
def rig() -> Iterator[PageRig]:
    rig = PageRig()
    yield rig
    rig.close()


def test_a_page_is_read_once_and_found_afterwards(rig: PageRig) -> None:
    lane = rig.lane()
    pages = [(1, 0, 3), (1, 1, 0), (3, 0, 15)]
    rig.take(lane, 0, pages)
    assert len(rig.store.started) == 3
    rig.take(lane, 0, pages)
    assert len(rig.store.started) == 3
    counts = rig.cache.statistics().units
    assert (counts.hits, counts.misses) == (3, 3)


def test_the_same_page_of_another_layer_is_another_page(rig: PageRig) -> None:
    lane = rig.lane()
    for layer in range(3):
        rig.take(lane, layer, [(1, 0, 0)])
    assert len(rig.store.started) == 3


def test_neighbours_are_read_at_once(rig: PageRig) -> None:
    rig.take(rig.lane(), 0, [(2, 0, block) for block in (4, 5, 6, 9)])
    assert [(read.offset // DIRECT_IO_BYTES, read.size // DIRECT_IO_BYTES) for read in rig.store.started] == [
        (4, 3),
        (9, 1),
    ]


def test_small_pages_that_lie_in_one_unit_are_read_together() -> None:
    rig = PageRig(layout=layout_of(Encoding.INT4))
    assert rig.layout.slab.page.size_bytes == DIRECT_IO_BYTES // 2
    lane = rig.lane()
    rig.take(lane, 1, [(1, 0, 6), (1, 0, 7), (1, 1, 1)])
    assert [read.size for read in rig.store.started] == [DIRECT_IO_BYTES, DIRECT_IO_BYTES]
    rig.take(lane, 1, [(1, 1, 0)])
    assert len(rig.store.started) == 2
    rig.close()


def test_pages_larger_than_4_kib_are_units() -> None:
    rig = PageRig(layout=layout_of(head_dim=128))
    assert unit_bytes(rig.layout.slab) == 2 * DIRECT_IO_BYTES
    rig.take(rig.lane(), 2, [(1, 1, block) for block in range(16)])
    assert len(rig.store.started) == 2, "rows of 64 KiB at most"
    rig.close()


def test_slow_reads_are_waited_for() -> None:
    rig = PageRig(latency_polls=7)
    rig.take(rig.lane(), 0, [(1, 0, 0), (2, 0, 0)])
    waits = rig.cache.statistics().waits.statistics()
    assert (waits.pages, waits.waited) == (2, 2)
    assert waits.p99_ns >= waits.p50_ns > 0
    assert rig.cache.statistics().stall_ns > 0
    rig.close()


def test_the_page_given_back_longest_ago_makes_room(rig: PageRig) -> None:
    lane = rig.lane()
    everything = list(itertools.product(range(1, 5), range(2), range(16)))
    first, others = everything[: rig.units // 2], everything[rig.units // 2 : rig.units + 1]
    rig.take(lane, 0, first)
    rig.take(lane, 0, others[:-1])
    rig.take(lane, 0, first)
    rig.take(lane, 0, others[-1:])
    before = rig.cache.statistics().units
    rig.take(lane, 0, first)
    assert rig.cache.statistics().units.misses == before.misses, "what was taken again stays"


def test_taken_pages_are_never_overwritten(rig: PageRig) -> None:
    holder, other = rig.lane(), rig.lane()
    kept = [(1, 0, block) for block in range(8)]
    addresses_N = holder.take(0, wanted(kept))
    for segment, head in itertools.product(range(2, 5), range(2)):
        rig.take(other, 0, [(segment, head, block) for block in range(16)])
    rig.check(0, kept, addresses_N)
    holder.give_back()


def test_more_than_fits_with_two_lanes_waits_for_what_is_read_ahead() -> None:
    rig = PageRig(host_slots=1)
    lane = rig.lane()
    lane.expect(1, wanted([(1, 0, block) for block in range(16)]))
    everything = list(itertools.product(range(1, 5), range(2), range(16)))
    rig.store.latency_polls = 5
    rig.take(lane, 2, everything[-rig.units :])
    rig.close()


def test_the_pages_that_a_layer_took_last_are_read_ahead_when_they_are_gone() -> None:
    rig = PageRig(host_slots=1)
    lane, other = rig.lane(), rig.lane()
    pages = [(1, 0, block) for block in range(0, 8, 2)]
    rig.take(lane, 1, pages)
    for segment, head in itertools.product(range(2, 5), range(2)):
        rig.take(other, 2, [(segment, head, block) for block in range(16)])
    rig.take(lane, 0, [(1, 1, 0)])
    ahead = [read for read in rig.store.started if read.is_ahead]
    assert [read.offset // DIRECT_IO_BYTES for read in ahead] == [0, 2, 4, 6]
    rig.cache.drain()
    rig.take(lane, 1, pages)
    counts = rig.cache.statistics().units
    assert (counts.read_ahead, counts.useful, counts.late) == (4, 4, 0)
    rig.close()


def test_a_guess_is_read_ahead_and_decides_nothing(rig: PageRig) -> None:
    lane = rig.lane()
    lane.expect(1, wanted([(1, 0, 0), (1, 0, 2)]))
    rig.cache.drain()
    rig.take(lane, 1, [(1, 0, 2), (1, 0, 4)])
    counts = rig.cache.statistics().units
    assert (counts.read_ahead, counts.useful, counts.misses) == (2, 1, 1)


def test_a_page_that_is_still_on_its_way_is_late_and_not_read_twice(rig: PageRig) -> None:
    lane = rig.lane()
    rig.store.latency_polls = 4
    lane.expect(1, wanted([(1, 0, 0)]))
    rig.take(lane, 1, [(1, 0, 0)])
    counts = rig.cache.statistics().units
    assert (counts.late, counts.useful, counts.misses) == (1, 0, 0)
    assert len(rig.store.started) == 1


def test_a_guess_that_nobody_took_is_wasted(rig: PageRig) -> None:
    lane = rig.lane()
    lane.expect(1, wanted([(1, 0, 0)]))
    rig.cache.drain()
    rig.cache.forget(SegmentId(1))
    assert rig.cache.statistics().units.wasted == 1


def test_guesses_are_of_use_only_where_the_cache_holds_some_steps(rig: PageRig) -> None:
    lane = rig.lane()
    assert not lane.reads_ahead, "nothing is known of steps yet"
    for layer in (0, 1, 2, 0):
        rig.take(lane, layer, [(1, 0, block) for block in range(2)])
    assert lane.reads_ahead
    for layer in (1, 2, 0):
        rig.take(lane, layer, [(1, 0, block) for block in range(16)])
    assert not lane.reads_ahead


def test_nothing_is_read_ahead_where_that_is_off() -> None:
    rig = PageRig(reads_ahead=False)
    rig.lane().expect(1, wanted([(1, 0, 0)]))
    assert not rig.store.started
    rig.close()


def test_reading_ahead_is_bounded_by_what_the_gap_carries(rig: PageRig) -> None:
    lane = rig.lane()
    rig.store.latency_polls = 3
    for block in range(12):
        rig.take(lane, 0, [(1, 0, block)])
        rig.clock.advance(20_000)
    speed = rig.cache.statistics().bytes_per_s
    assert speed is not None
    lane.expect(1, wanted([(2, head, block) for head in range(2) for block in range(16)]))
    ahead = sum(read.size for read in rig.store.started if read.is_ahead)
    assert 0 < ahead <= speed * 25e-6 < 32 * DIRECT_IO_BYTES


def test_best_effort_waits_for_what_matters_and_does_without_the_rest(rig: PageRig) -> None:
    lane = rig.lane(patience_ns=50_000)
    there, slow = (1, 0, 0), (2, 0, 0)
    rig.take(lane, 0, [there])
    rig.store.latency_polls = 1000
    addresses_N = lane.take(0, wanted([there, slow], unimportant=[slow]))
    assert addresses_N[1] == MISSING
    rig.check(0, [there], addresses_N[:1])
    lane.give_back()
    addresses_N = lane.take(0, wanted([slow]))
    assert addresses_N[0] == MISSING, "patience ends"
    lane.give_back()
    assert rig.cache.statistics().absent == 2
    rig.store.latency_polls = 1
    rig.cache.drain()
    rig.take(lane, 0, [slow])


def test_a_segment_that_is_forgotten_is_read_again(rig: PageRig) -> None:
    lane = rig.lane()
    rig.take(lane, 0, [(1, 0, 0), (2, 0, 0)])
    rig.cache.forget(SegmentId(1))
    rig.take(lane, 0, [(1, 0, 0), (2, 0, 0)])
    assert rig.cache.statistics().units.misses == 3


def test_a_budget_that_cannot_be_held_is_refused_with_the_sum(rig: PageRig) -> None:
    rig.cache.check_budget(budget_tokens=rig.units // 4 * 16)
    with pytest.raises(ConfigError, match=r"2 KV heads x 4096 / 16 clusters x 2 = .*raise host.kv_bytes"):
        rig.cache.check_budget(budget_tokens=4096)


def test_totals_are_reported_once(rig: PageRig) -> None:
    lane = rig.lane()
    rig.take(lane, 0, [(1, 0, 0)])
    rig.take(lane, 0, [(1, 0, 0)])
    rig.cache.report()
    rig.cache.report()
    assert rig.telemetry.value(names.PAGE_CACHE_TAKEN, outcome="ready") == 1
    assert rig.telemetry.value(names.PAGE_CACHE_TAKEN, outcome="missed") == 1
    assert rig.telemetry.value(names.PAGE_CACHE_CAPACITY) == rig.cache.capacity_bytes
