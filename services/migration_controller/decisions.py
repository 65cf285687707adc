"""The newest decisions, their reasons and how they ended: written by the loop, read by calls."""

from __future__ import annotations

import threading
from collections import Counter, OrderedDict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

from h3kv.core.types import BlockKey
from h3kv.policy.migration_state import Command, HoldReason
from h3kv.rpc.command_messages import MoveOutcome


@dataclass(frozen=True, slots=True)
class Decision:
    """One command and how it stands. Commands are numbered from 1 without gaps: that is its number."""

    command: Command
    key: BlockKey
    """Of the segment's first block."""
    made_ns: int
    outcome: MoveOutcome | None = None


class DecisionLog:
    """Keeps the newest; thread-safe.

    Args:
        kept_max: decisions that are kept.
    """

    def __init__(self, kept_max: int) -> None:
        self._kept_max = kept_max
        self._lock = threading.Lock()
        self._kept: OrderedDict[int, Decision] = OrderedDict()
        self._totals: Counter[str] = Counter()
        self._held: Counter[str] = Counter()

    def add(self, decisions: Iterable[Decision]) -> None:
        """Keep what a step decided."""
        with self._lock:
            for decision in decisions:
                self._kept[decision.command.id] = decision
                self._totals[decision.command.reason.value] += 1
            while len(self._kept) > self._kept_max:
                self._kept.popitem(last=False)

    def hold(self, held: Mapping[HoldReason, int]) -> None:
        """Count what a step did not decide."""
        with self._lock:
            self._held.update({reason.value: count for reason, count in held.items()})

    def answer(self, outcome: MoveOutcome) -> None:
        """Keep how a command stands, as far as it is still known."""
        with self._lock:
            known = self._kept.get(outcome.number)
            if known is not None:
                self._kept[outcome.number] = replace(known, outcome=outcome)

    def newest(self, count: int) -> list[Decision]:
        """The last ones, oldest first."""
        with self._lock:
            kept = list(self._kept.values())
        return kept[-count:]

    def after(self, number: int, count: int) -> list[Decision]:
        """The first ones above a number, oldest first."""
        with self._lock:
            return [each for each in self._kept.values() if each.command.id > number][:count]

    def totals(self) -> tuple[dict[str, int], dict[str, int]]:
        """Decisions, and what was not decided, by reason since the start."""
        with self._lock:
            return dict(self._totals), dict(self._held)

    def check_integrity(self) -> None:
        """Assert that bounds hold."""
        with self._lock:
            assert len(self._kept) <= self._kept_max
            assert list(self._kept) == sorted(self._kept)
