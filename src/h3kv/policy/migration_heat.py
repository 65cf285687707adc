"""How warm a segment is: how often it was used, each use counting half after every half-life.

Touches that follow one another closely are one use, however long it lasts: a long answer makes no segment warmer than a
short one. With the uses at t_1 < ... < t_n, each taken at its last touch:

    heat = log2(sum of 2^(t_i / half_life))

Of two segments the one with the greater heat has more decayed uses, now and at any later time at which neither was
touched. So nothing has to be updated as time goes by.
"""

from __future__ import annotations

import math


def first_heat(now_ns: int, half_life_ns: int) -> float:
    """Heat of a segment with one use, now."""
    return now_ns / half_life_ns


def prolong_use(heat: float, passed_ns: int, half_life_ns: int) -> float:
    """Heat when the newest use goes on: as if no time had passed since its last touch."""
    return heat + passed_ns / half_life_ns


def add_use(heat: float, now_ns: int, half_life_ns: int) -> float:
    """Heat with one use more, now."""
    age = now_ns / half_life_ns
    high, low = max(heat, age), min(heat, age)
    return high + math.log2(1.0 + 2.0 ** (low - high))


def is_hotter(heat: float, other: float, margin: float) -> bool:
    """Whether it has at least `margin` times the decayed uses of the other."""
    return heat - other >= math.log2(margin)
