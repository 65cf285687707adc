"""What is read, what is computed, and what is believed of measurements."""

from __future__ import annotations

import itertools

import pytest

from h3kv.policy.load_or_recompute import (
    ColdMount,
    Line,
    PrefillSpeed,
    ReadSpeed,
    fit_line,
    mounts_to_keep,
)

MS = 1_000_000.0
FULL = ColdMount(tokens=1024, reads=30, size_bytes=30 << 20)
"""A segment of 30 layers of 1 MiB."""


def prefill(ms_per_token: float, *, per_position: float = 0.0) -> PrefillSpeed:
    return PrefillSpeed(Line(ms_per_token * MS, per_position))


def reading(ms_per_mib: float, *, ms_per_read: float = 0.0) -> ReadSpeed:
    return ReadSpeed(Line(ms_per_mib * MS / (1 << 20), ms_per_read * MS))


def test_a_fast_disk_is_read_and_a_slow_one_is_not() -> None:
    mounts = [FULL] * 4
    assert mounts_to_keep(64, mounts, prefill=prefill(1.0), reading=reading(1.0)) == 4
    assert mounts_to_keep(64, mounts, prefill=prefill(1.0), reading=reading(100.0)) == 0


def test_where_nothing_was_measured_all_is_read() -> None:
    assert mounts_to_keep(64, [FULL] * 2, prefill=None, reading=reading(1e6)) == 2
    assert mounts_to_keep(64, [FULL] * 2, prefill=prefill(1e-6), reading=None) == 2
    assert mounts_to_keep(64, [], prefill=prefill(1.0), reading=reading(1.0)) == 0


def test_of_equal_times_reading_is_chosen() -> None:
    even = ColdMount(tokens=64, reads=2, size_bytes=1 << 16)
    speeds = {"prefill": PrefillSpeed(Line(1024.0, 0.0)), "reading": ReadSpeed(Line(1.0, 0.0))}
    assert mounts_to_keep(0, [even] * 3, **speeds) == 3


def test_deep_tokens_are_worth_reading_where_shallow_ones_are_not() -> None:
    speeds = {"prefill": prefill(0.1, per_position=100.0), "reading": reading(10.0)}
    assert mounts_to_keep(0, [FULL], **speeds) == 0
    assert mounts_to_keep(32_768, [FULL], **speeds) == 1


def test_a_segment_that_is_used_in_part_is_computed_and_the_others_are_read() -> None:
    part = ColdMount(tokens=64, reads=30, size_bytes=30 << 20)
    assert mounts_to_keep(64, [FULL, FULL, part], prefill=prefill(1.0), reading=reading(10.0)) == 2


def test_many_small_reads_cost_more_than_their_bytes() -> None:
    small = ColdMount(tokens=64, reads=30, size_bytes=30 << 16)
    speeds = {"prefill": prefill(1.0)}
    assert mounts_to_keep(0, [small], reading=reading(1.0), **speeds) == 1
    assert mounts_to_keep(0, [small], reading=reading(1.0, ms_per_read=3.0), **speeds) == 0


def test_time_of_prefill_is_the_sum_over_its_tokens() -> None:
    speed = prefill(2.0, per_position=3.0)
    tokens = sum(2.0 * MS + 3.0 * (position + 0.5) for position in range(100, 150))
    assert speed.ns(100, 50) == pytest.approx(tokens)


def test_a_line_is_found_through_odd_points() -> None:
    points = [(float(x), 5.0 + 2.0 * x) for x in range(0, 2_000, 100)]
    points[3], points[11], points[17] = (300.0, 1e9), (1100.0, 0.0), (1700.0, 7e7)
    line = fit_line(points, spread_min=100.0)
    assert line is not None
    assert (line.base, line.slope) == (pytest.approx(5.0, abs=1e-6), pytest.approx(2.0))


def test_points_at_one_place_give_a_level_line() -> None:
    assert fit_line([(7.0, 3.0), (7.5, 4.0), (7.1, 100.0)], spread_min=1.0) == Line(4.0, 0.0)
    assert fit_line([], spread_min=1.0) is None


@pytest.mark.parametrize("values", [(9.0, 5.0, 1.0), (0.0, 0.0, 9.0), (0.0, 50.0, 100.0), (0.0, 0.0, 0.0)])
def test_no_part_of_a_line_lies_below_zero(values: tuple[float, ...]) -> None:
    line = fit_line(list(zip(itertools.count(100.0, 100.0), values, strict=False)), spread_min=1.0)
    assert line is not None
    assert line.base >= 0
    assert line.slope >= 0
