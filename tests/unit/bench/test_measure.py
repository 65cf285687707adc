"""Turns, medians and the flat object of numbers."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from h3kv.bench.measure import Rounds
from h3kv.bench.results import Results


def test_contestants_take_turns_and_none_is_always_first() -> None:
    order: list[str] = []

    def contestant(name: str) -> float:
        order.append(name)
        return float(len(order))

    rounds = Rounds.run({name: lambda name=name: contestant(name) for name in "ab"}, repetitions=3)
    assert order == ["a", "b", "b", "a", "a", "b"]
    assert rounds.values == {"a": [1.0, 4.0, 5.0], "b": [2.0, 3.0, 6.0]}


def test_ratios_are_taken_inside_a_repetition() -> None:
    rounds = Rounds({"ours": [1.0, 10.0, 100.0], "theirs": [2.0, 20.0, 200.0]})
    assert rounds.median("ours") == 10.0
    assert rounds.ratio("ours", "theirs") == 0.5


def test_results_are_one_flat_object(tmp_path: Path) -> None:
    results = Results()
    results.put("decode.8k.ms", 12.5)
    results.put("exact.4k.tokens_equal", 256)
    results.write(tmp_path / "results.json")
    assert json.loads((tmp_path / "results.json").read_text()) == {"decode.8k.ms": 12.5, "exact.4k.tokens_equal": 256}


def test_a_metric_is_measured_once() -> None:
    results = Results()
    results.put("a", 1.0)
    with pytest.raises(AssertionError, match="twice"):
        results.put("a", 2.0)
