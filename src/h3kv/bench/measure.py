"""Medians and ratios of contestants that take turns.

Machines are shared and drift by the minute: every repetition runs each contestant once, every other one in reverse, and
ratios are taken inside a repetition before the median over repetitions.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import TypeVar

Progress = Callable[[str], None]
Contestant = TypeVar("Contestant")


def turns(contestants: Iterable[Contestant], repetition: int) -> list[Contestant]:
    """The contestants in their order of one repetition: who is first in one is last in the next."""
    ordered = list(contestants)
    return ordered[::-1] if repetition % 2 else ordered


def seconds_of(work: Callable[[], object]) -> float:
    """Wall-clock seconds of one call."""
    start_ns = time.perf_counter_ns()
    work()
    return (time.perf_counter_ns() - start_ns) / 1e9


@dataclass(slots=True)
class Rounds:
    """One value per contestant and repetition."""

    values: dict[str, list[float]] = field(default_factory=dict)

    @classmethod
    def run(cls, contestants: Mapping[str, Callable[[], float]], *, repetitions: int) -> Rounds:
        """Call every contestant once in each repetition; each gives its own figure."""
        rounds = cls()
        for repetition in range(repetitions):
            for name, contestant in turns(contestants.items(), repetition):
                rounds.add(name, contestant())
        return rounds

    def add(self, name: str, value: float) -> None:
        """Append one repetition's value."""
        self.values.setdefault(name, []).append(value)

    def median(self, name: str) -> float:
        """Median over the repetitions."""
        return statistics.median(self.values[name])

    def ratio(self, name: str, other: str) -> float:
        """Median of the ratios of two contestants, repetition by repetition."""
        pairs = zip(self.values[name], self.values[other], strict=True)
        return statistics.median(a / b for a, b in pairs)
