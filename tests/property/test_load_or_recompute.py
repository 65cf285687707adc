"""The choice against all others that could have been made."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from h3kv.policy.load_or_recompute import ColdMount, Line, PrefillSpeed, ReadSpeed, fit_line, mounts_to_keep

RATES = st.floats(0, 1e6)
MOUNTS = st.lists(
    st.builds(
        ColdMount,
        tokens=st.integers(1, 16).map(lambda blocks: 64 * blocks),
        reads=st.integers(1, 80),
        size_bytes=st.integers(1, 1 << 30),
    ),
    max_size=20,
)


def total_ns(start: int, mounts: list[ColdMount], kept: int, *, prefill: PrefillSpeed, reading: ReadSpeed) -> float:
    """Time of reading the first ones and computing the tokens of the others."""
    read = sum(reading.ns(mount.reads, mount.size_bytes) for mount in mounts[:kept])
    first = start + sum(mount.tokens for mount in mounts[:kept])
    return read + prefill.ns(first, sum(mount.tokens for mount in mounts[kept:]))


@given(start=st.integers(0, 1 << 17), mounts=MOUNTS, prefill=st.tuples(RATES, RATES), reading=st.tuples(RATES, RATES))
def test_no_other_number_of_mounts_takes_less_time(
    start: int, mounts: list[ColdMount], prefill: tuple[float, float], reading: tuple[float, float]
) -> None:
    speeds = {"prefill": PrefillSpeed(Line(*prefill)), "reading": ReadSpeed(Line(*reading))}
    kept = mounts_to_keep(start, mounts, **speeds)
    times = [total_ns(start, mounts, each, **speeds) for each in range(len(mounts) + 1)]
    assert times[kept] <= min(times) * (1 + 1e-9)


@given(
    line=st.tuples(st.floats(0, 1e3), st.floats(0, 1e3)),
    odd=st.lists(st.floats(0, 1e9), max_size=4),
    xs=st.lists(st.integers(0, 1 << 17), min_size=24, max_size=28, unique=True),
)
def test_a_few_odd_points_do_not_carry_the_line_away(
    line: tuple[float, float], odd: list[float], xs: list[int]
) -> None:
    base, slope = line
    points = [(float(x), base + slope * x) for x in xs]
    points[: len(odd)] = [(x, y) for (x, _), y in zip(points, odd, strict=False)]
    found = fit_line(points, spread_min=1.0)
    assert found is not None
    assert found.base >= 0
    assert found.slope >= 0
    at = sorted(xs)[len(xs) // 2]
    good = [base + slope * x for x in xs[len(odd) :]]
    assert min(good) - 1e-3 <= found.base + found.slope * at <= max(good) + 1e-3
