from h3kv.core.types import SegmentId
from h3kv.policy.eviction import Candidate, order_evictions


def candidate(segment: int, *, used: int, parent: int | None = None, pins: int = 0) -> Candidate:
    return Candidate(
        segment=SegmentId(segment), parent=None if parent is None else SegmentId(parent), last_used=used, pins=pins
    )


def test_least_recently_used_goes_first() -> None:
    candidates = [candidate(1, used=5), candidate(2, used=3), candidate(3, used=4)]
    assert list(order_evictions(candidates)) == [2, 3, 1]


def test_a_document_loses_its_end_before_its_beginning() -> None:
    candidates = [candidate(1, used=1), candidate(2, used=2, parent=1), candidate(3, used=3, parent=2)]
    assert list(order_evictions(candidates)) == [3, 2, 1]


def test_a_beginning_that_two_share_outlives_both() -> None:
    candidates = [
        candidate(1, used=1),
        candidate(2, used=9, parent=1),
        candidate(3, used=2, parent=1),
        candidate(4, used=5),
    ]
    assert list(order_evictions(candidates)) == [3, 4, 2, 1]


def test_pinned_segments_and_all_before_them_stay() -> None:
    candidates = [
        candidate(1, used=1),
        candidate(2, used=2, parent=1),
        candidate(3, used=3, parent=2, pins=1),
        candidate(4, used=4, parent=2),
        candidate(5, used=5, parent=3),
    ]
    assert list(order_evictions(candidates)) == [4, 5]


def test_segment_whose_parent_is_gone_is_a_root() -> None:
    assert list(order_evictions([candidate(7, used=1, parent=3)])) == [7]


def test_equal_ticks_let_the_younger_segment_go_first() -> None:
    assert list(order_evictions([candidate(1, used=1), candidate(2, used=1)])) == [2, 1]


def test_nothing_to_evict_is_an_empty_order() -> None:
    assert list(order_evictions([])) == []
