import math

import pytest
import torch

from h3kv.core.errors import NumericsError
from h3kv.engine.request import SamplingParameters
from h3kv.engine.sampling import Sampler, largest, nucleus

LOGITS_V = torch.tensor([1.0, 3.0, 2.0, 3.0, -math.inf, 0.0])


def draws(logits_V: torch.Tensor, count: int = 400, **parameters: float | int | None) -> list[int]:
    sampler = Sampler(SamplingParameters(**{"temperature": 1.0, **parameters}))
    return [sampler.choose(logits_V) for _ in range(count)]


def test_greedy_takes_the_first_of_equal_maxima() -> None:
    assert Sampler(SamplingParameters()).choose(LOGITS_V) == 1
    assert Sampler(SamplingParameters()).choose(torch.zeros(50_000)) == 0


def test_one_candidate_is_the_first_of_equal_maxima() -> None:
    assert set(draws(LOGITS_V, top_k=1)) == {1}
    assert set(draws(LOGITS_V, top_p=1e-6)) == {1}


def test_equal_seeds_give_equal_tokens_and_others_do_not() -> None:
    logits_V = torch.randn(1000, generator=torch.Generator().manual_seed(1))
    assert draws(logits_V, seed=5) == draws(logits_V, seed=5)
    assert draws(logits_V, seed=5) != draws(logits_V, seed=6)


def test_draws_do_not_depend_on_other_generators() -> None:
    torch.manual_seed(1)
    first = draws(LOGITS_V, seed=5)
    torch.manual_seed(2)
    torch.rand(3)
    assert draws(LOGITS_V, seed=5) == first


def test_impossible_tokens_are_never_drawn() -> None:
    assert 4 not in draws(LOGITS_V, temperature=100.0)


def test_frequencies_follow_the_probabilities() -> None:
    logits_V = torch.tensor([0.1, 0.6, 0.3]).log()
    drawn = draws(logits_V, count=4000)
    for token, probability in enumerate([0.1, 0.6, 0.3]):
        assert abs(drawn.count(token) / 4000 - probability) < 0.03


def test_temperature_sharpens() -> None:
    logits_V = torch.tensor([0.0, 1.0])
    cold, hot = draws(logits_V, temperature=0.1).count(0), draws(logits_V, temperature=10.0).count(0)
    assert cold < 5
    assert hot > 150


@pytest.mark.parametrize(
    ("parameters", "allowed"),
    [
        ({"top_k": 1}, {1}),
        ({"top_k": 2}, {1, 3}),
        ({"top_k": 3}, {1, 2, 3}),
        ({"top_k": 100}, {0, 1, 2, 3, 5}),
        # Probabilities: 0.0541, 0.3995, 0.1470, 0.3995, 0, 0.0199... of tokens 0, 1, 2, 3, 4, 5.
        ({"top_p": 0.35}, {1}),
        ({"top_p": 0.45}, {1, 3}),
        ({"top_p": 0.85}, {1, 2, 3}),
        ({"min_p": 1.0}, {1, 3}),
        ({"min_p": 0.3}, {1, 2, 3}),
        ({"top_k": 3, "min_p": 0.5}, {1, 3}),
    ],
)
def test_only_candidates_are_drawn(parameters: dict[str, float | int], allowed: set[int]) -> None:
    assert set(draws(LOGITS_V, **parameters)) == allowed


def test_ties_at_the_limit_of_top_k_are_cut_by_number() -> None:
    assert set(draws(torch.zeros(100), top_k=3)) == {0, 1, 2}


def test_flat_distribution_sorts_all_of_a_large_vocabulary() -> None:
    drawn = draws(torch.zeros(5000), top_p=0.5, count=30)
    assert max(drawn) < 2500
    assert max(drawn) > 1024
    kept = nucleus(torch.full((5000,), 1 / 5000, dtype=torch.float64), 0.5)
    assert abs(len(kept) - 2500) <= 1
    assert kept.tolist() == list(range(len(kept)))


def test_largest_are_in_order_with_equal_ones_by_place() -> None:
    values = torch.tensor([1.0, 3.0, 2.0, 3.0, 2.0])
    assert [largest(values, count).tolist() for count in (1, 3, 4, 9)] == [
        [1],
        [1, 3, 2],
        [1, 3, 2, 4],
        [1, 3, 2, 4, 0],
    ]


def test_scores_are_not_modified() -> None:
    logits_V = LOGITS_V.clone()
    draws(logits_V, top_k=2, top_p=0.5, min_p=0.1)
    assert torch.equal(logits_V, LOGITS_V)


@pytest.mark.parametrize("score", [math.nan, math.inf])
@pytest.mark.parametrize(
    "parameters",
    [
        SamplingParameters(),
        SamplingParameters(temperature=1.0),
        SamplingParameters(temperature=1.0, top_k=3, min_p=0.1),
    ],
)
def test_scores_that_are_no_numbers_are_an_error(parameters: SamplingParameters, score: float) -> None:
    logits_V = torch.zeros(20)
    logits_V[7] = score
    with pytest.raises(NumericsError, match="token 7"):
        Sampler(parameters).choose(logits_V)


def test_minus_infinity_only_rules_a_token_out() -> None:
    logits_V = torch.full((20,), -math.inf)
    logits_V[3] = 0.5
    assert Sampler(SamplingParameters(temperature=1.0)).choose(logits_V) == 3
