"""What is expected of layers, how much of it is kept, and how far the time carries."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from h3kv.engine.page_slots import KEY_DTYPE
from h3kv.engine.page_waits import PageWaits
from h3kv.engine.predictor import AHEAD_LAYERS, GROUP_LAYERS, GROUP_STATE_BYTES, LAYER_UNITS_MAX, Pace, Predictor


def _keys(*units: int) -> NDArray[np.void]:
    return np.array([(7, unit, 0, 0) for unit in units], dtype=KEY_DTYPE)


def test_the_nearest_layers_come_first_and_the_last_is_followed_by_the_first() -> None:
    predictor = Predictor(8)
    for layer in range(8):
        predictor.note(layer, _keys(layer), uses=0)
    assert [layer for layer, _ in predictor.ahead(6, kept_since=1)] == [7, 0, 1, 2]
    assert len(list(predictor.ahead(0, kept_since=1))) == AHEAD_LAYERS


def test_a_guess_comes_before_what_was_taken_last() -> None:
    predictor = Predictor(2)
    predictor.note(1, _keys(1, 2), uses=0)
    predictor.expect(1, _keys(9))
    [(layer, keys_N)] = predictor.ahead(0, kept_since=1)
    assert layer == 1
    assert keys_N["unit"].tolist() == [9, 1, 2]
    assert set(keys_N["segment"].tolist()) == {7}
    assert set(keys_N["layer"].tolist()) == {1}


def test_what_was_dealt_with_is_not_looked_at_again() -> None:
    predictor = Predictor(2)
    predictor.note(1, _keys(1, 2, 3), uses=0)
    predictor.drop(1, 2)
    assert [keys_N["unit"].tolist() for _, keys_N in predictor.ahead(0, kept_since=1)] == [[3]]
    predictor.drop(1, 1)
    assert not list(predictor.ahead(0, kept_since=1))


def test_a_group_of_layers_keeps_32_kib_at_most() -> None:
    predictor = Predictor(GROUP_LAYERS)
    for layer in range(GROUP_LAYERS):
        predictor.note(layer, _keys(*range(3 * LAYER_UNITS_MAX)), uses=0)
        predictor.expect(layer, _keys(*range(LAYER_UNITS_MAX // 2)))
    assert predictor.state_bytes == GROUP_STATE_BYTES == 32 << 10


def test_pace_is_what_was_measured() -> None:
    pace = Pace(2, first_bytes=100)
    assert pace.carries_bytes(0) == 100
    pace.note_gap(0, 1000)
    assert pace.carries_bytes(0) == 100, "without a speed nothing is known"
    pace.note_speed(4000, 2000)
    assert pace.carries_bytes(0) == 2000
    assert pace.carries_bytes(1) == 100
    pace.note_gap(0, 2000)
    assert pace.carries_bytes(0) == 2400
    pace.note_speed(10, 10_000)
    assert pace.carries_bytes(0) == 2400, "a small read says nothing about speed"


def test_waits_of_nothing_are_zeros() -> None:
    statistics = PageWaits().statistics()
    assert (statistics.pages, statistics.p50_ns, statistics.p99_ns, statistics.sd_ns) == (0, 0.0, 0.0, 0.0)


def test_quantiles_of_waits_are_within_a_step() -> None:
    waits = PageWaits()
    waits.add(0, 40)
    for wait_ns in range(1, 61):
        waits.add(wait_ns * 10_000, 1)
    statistics = waits.statistics()
    assert (statistics.pages, statistics.waited, statistics.largest_ns) == (100, 60, 600_000)
    assert abs(statistics.p50_ns / 100_000 - 1) < 0.1
    assert abs(statistics.p99_ns / 590_000 - 1) < 0.1
    exact = np.array([0] * 40 + [10_000 * step for step in range(1, 61)])
    assert abs(statistics.mean_ns / exact.mean() - 1) < 1e-9
    assert abs(statistics.sd_ns / exact.std() - 1) < 1e-9


def test_waits_since_a_copy_leave_out_what_came_before() -> None:
    waits = PageWaits()
    waits.add(5_000_000, 3)
    before = waits.copy()
    waits.add(10_000, 2)
    since = (waits - before).statistics()
    assert (since.pages, since.waited, since.mean_ns) == (2, 2, 10_000)
    assert before.statistics().pages == 3


def test_what_was_taken_is_looked_at_only_when_it_may_be_gone() -> None:
    predictor = Predictor(2)
    predictor.note(1, _keys(1, 2), uses=7)
    assert not predictor.expects(0, kept_since=7)
    assert not list(predictor.ahead(0, kept_since=7))
    predictor.expect(1, _keys(9))
    assert predictor.expects(0, kept_since=7)
    assert [keys_N["unit"].tolist() for _, keys_N in predictor.ahead(0, kept_since=7)] == [[9]]
    assert [keys_N["unit"].tolist() for _, keys_N in predictor.ahead(0, kept_since=8)] == [[9, 1, 2]]
    predictor.note(1, _keys(3), uses=9)
    assert not predictor.expects(0, kept_since=9), "guesses are of one step"
