"""The cheapest candidate that keeps the loss."""

from __future__ import annotations

import dataclasses
import math

import pytest

from h3kv.core.errors import ConfigError
from h3kv.quality.choice import Candidate, LossLimit, acceptable, failures, near_misses

LIMIT = LossLimit(perplexity_change=0.005, top1=0.98, passkey=1.0)
GOOD = Candidate(
    "good",
    is_exact=False,
    bytes_share=0.2,
    perplexity_change=0.001,
    perplexity_se=0.001,
    top1=0.99,
    passkey=1.0,
)
EXACT = dataclasses.replace(GOOD, name="exact", is_exact=True, bytes_share=0.4)


def names(candidates: list[Candidate]) -> list[str]:
    return [candidate.name for candidate in candidates]


@pytest.mark.parametrize(
    ("limit", "field"),
    [
        (LossLimit(perplexity_change=-1.0), "perplexity"),
        (LossLimit(perplexity_change=math.nan), "perplexity"),
        (LossLimit(top1=2.0), "top1"),
        (LossLimit(passkey=-0.1), "passkey"),
    ],
)
def test_losses_that_nothing_can_keep_are_refused(limit: LossLimit, field: str) -> None:
    LIMIT.check()
    with pytest.raises(ConfigError) as refused:
        limit.check()
    assert refused.value.field == field


def test_what_keeps_the_loss_misses_nothing() -> None:
    assert failures(GOOD, LIMIT) == []


def test_each_part_of_the_loss_is_looked_at() -> None:
    assert "perplexity" in failures(dataclasses.replace(GOOD, perplexity_change=0.006), LIMIT)[0]
    assert "top-1" in failures(dataclasses.replace(GOOD, top1=0.979), LIMIT)[0]
    assert "passkeys" in failures(dataclasses.replace(GOOD, passkey=0.98), LIMIT)[0]
    assert len(failures(dataclasses.replace(GOOD, perplexity_change=1.0, top1=0.0, passkey=0.0), LIMIT)) == 3


def test_a_standard_error_is_kept_as_distance() -> None:
    assert failures(dataclasses.replace(GOOD, perplexity_change=0.0045, perplexity_se=0.001), LIMIT) != []


def test_a_fall_of_perplexity_is_no_loss() -> None:
    assert failures(dataclasses.replace(GOOD, perplexity_change=-0.02), LIMIT) == []


def test_what_is_not_a_number_is_not_kept() -> None:
    assert failures(dataclasses.replace(GOOD, perplexity_change=float("nan")), LIMIT) != []
    assert failures(dataclasses.replace(GOOD, top1=float("nan")), LIMIT) != []


def test_the_fewest_bytes_come_first() -> None:
    cheap = dataclasses.replace(GOOD, name="cheap", bytes_share=0.1)
    bad = dataclasses.replace(GOOD, name="bad", bytes_share=0.05, top1=0.9)
    assert names(acceptable([EXACT, GOOD, bad, cheap], LIMIT)) == ["cheap", "good", "exact"]


def test_of_equal_bytes_exact_comes_first() -> None:
    equal = dataclasses.replace(EXACT, bytes_share=GOOD.bytes_share)
    assert names(acceptable([GOOD, equal], LIMIT)) == ["exact", "good"]


def test_nothing_may_be_acceptable() -> None:
    assert acceptable([dataclasses.replace(GOOD, top1=0.5)], LIMIT) == []


def test_near_misses_are_the_dearest_below_the_first_that_holds() -> None:
    missing = [
        dataclasses.replace(GOOD, name=f"at{share}", bytes_share=share, top1=0.97) for share in (0.1, 0.15, 0.19, 0.3)
    ]
    assert near_misses([GOOD, EXACT, *missing], LIMIT) == ["at0.19", "at0.15"]
    assert near_misses([EXACT, *missing], LIMIT, count=1) == ["at0.3"]


def test_exact_candidates_are_no_near_misses() -> None:
    assert near_misses([dataclasses.replace(EXACT, top1=0.1)], LIMIT) == []
