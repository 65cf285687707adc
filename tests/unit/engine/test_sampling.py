import math
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch

from h3kv.core.errors import NumericsError, RequestError
from h3kv.engine.ranking import largest, nucleus
from h3kv.engine.request import SamplingParameters
from h3kv.engine.sampling import Sampler, check_score

LOGITS_V = torch.tensor([1.0, 3.0, 2.0, 3.0, -math.inf, 0.0])


def sampler(prompt: tuple[int, ...] = (), **parameters: object) -> Sampler:
    return Sampler(SamplingParameters(**parameters), prompt=prompt)


def draws(logits_V: torch.Tensor, count: int = 400, **parameters: object) -> list[int]:
    drawing = sampler(**{"temperature": 1.0, **parameters})
    return [drawing.choose(logits_V).token for _ in range(count)]


class Only:
    """A grammar of one token at a time, in a given order."""

    def __init__(self, *tokens: int) -> None:
        self.tokens = tokens

    def matcher(self) -> "Only":
        return Only(*self.tokens)

    def restrict(self, scores_V: torch.Tensor) -> None:
        kept = scores_V[self.tokens[0]].clone()
        scores_V.fill_(-math.inf)
        scores_V[self.tokens[0]] = kept

    def accept(self, token: int) -> None:
        assert token == self.tokens[0]
        self.tokens = self.tokens[1:]


@contextmanager
def threads(count: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    yield
    torch.set_num_threads(before)


def test_greedy_takes_the_first_of_equal_maxima() -> None:
    assert sampler().choose(LOGITS_V).token == 1
    assert sampler().choose(torch.zeros(50_000)).token == 0


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


@pytest.mark.parametrize("size", [1000, 1024, 1025, 8192, 9000, 70_000])
@pytest.mark.parametrize("top_p", [0.01, 0.5, 0.999999])
def test_nucleus_is_the_same_however_many_values_are_looked_at_first(size: int, top_p: float) -> None:
    probabilities = torch.rand(size, generator=torch.Generator().manual_seed(size), dtype=torch.float64)
    probabilities = (probabilities * 20).round().softmax(0)
    order = probabilities.sort(descending=True, stable=True)
    before = order.values.cumsum(0) - order.values
    assert nucleus(probabilities, top_p).tolist() == order.indices[before < top_p].tolist()


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
        SamplingParameters(frequency_penalty=1.0, logit_bias=((7, -100.0),), logprobs=1),
    ],
)
def test_scores_that_are_no_numbers_are_an_error(parameters: SamplingParameters, score: float) -> None:
    logits_V = torch.zeros(20)
    logits_V[7] = score
    with pytest.raises(NumericsError, match="token 7"):
        Sampler(parameters, prompt=()).choose(logits_V)


def test_minus_infinity_only_rules_a_token_out() -> None:
    logits_V = torch.full((20,), -math.inf)
    logits_V[3] = 0.5
    assert sampler(temperature=1.0).choose(logits_V).token == 3


@pytest.mark.parametrize("score", [math.nan, math.inf, -math.inf])
def test_largest_score_of_a_row_is_checked_alone(score: float) -> None:
    check_score(3, -1e30)
    with pytest.raises(NumericsError, match="token 3"):
        check_score(3, score)


@pytest.mark.parametrize(
    ("parameters", "is_greedy"),
    [
        ({}, True),
        ({"seed": 5, "top_k": 3, "top_p": 0.5, "stop": ("a",)}, True),
        ({"temperature": 0.1}, False),
        ({"logprobs": 0}, False),
        ({"logit_bias": ((1, 1.0),)}, False),
        ({"presence_penalty": 0.1}, False),
        ({"frequency_penalty": -0.1}, False),
        ({"repetition_penalty": 1.1}, False),
        ({"grammar": Only(1)}, False),
    ],
)
def test_sampler_is_greedy_where_the_first_maximum_is_all(parameters: dict[str, object], is_greedy: bool) -> None:
    assert sampler(**parameters).is_greedy is is_greedy


def test_bias_makes_a_token_certain_or_rules_it_out() -> None:
    assert set(draws(LOGITS_V, logit_bias=((5, 100.0),))) == {5}
    assert {1, 3}.isdisjoint(draws(LOGITS_V, logit_bias=((1, -100.0), (3, -100.0))))


def test_repeated_tokens_lose_their_place() -> None:
    assert draws(LOGITS_V, count=5, temperature=0.0, frequency_penalty=2.0) == [1, 3, 2, 0, 1]
    # The prompt counts for repetition alone.
    assert sampler((1,), presence_penalty=2.0, frequency_penalty=2.0).choose(LOGITS_V).token == 1
    assert sampler((1,), repetition_penalty=1.1).choose(LOGITS_V).token == 3


def test_logprobs_are_of_the_models_own_scores() -> None:
    changed = sampler(temperature=2.0, top_k=1, logit_bias=((0, 100.0),), logprobs=2, grammar=Only(0, 0))
    choice = changed.choose(LOGITS_V)
    expected_V = LOGITS_V.double().log_softmax(0)
    assert choice.token == 0
    assert choice.logprobs is not None
    assert choice.logprobs.logprob == pytest.approx(float(expected_V[0]), abs=1e-12)
    assert [token for token, _ in choice.logprobs.top] == [1, 3]
    assert sampler(frequency_penalty=1.0).choose(LOGITS_V).logprobs is None


def test_grammar_decides_what_may_come_with_and_without_temperature() -> None:
    for temperature in (0.0, 1.0, 100.0):
        constrained = sampler(temperature=temperature, grammar=Only(5, 0, 2))
        assert [constrained.choose(LOGITS_V).token for _ in range(3)] == [5, 0, 2]


def test_grammar_that_allows_only_impossible_tokens_is_an_error_of_the_request() -> None:
    for temperature in (0.0, 1.0):
        with pytest.raises(RequestError, match="response_format: the model rules out every token"):
            sampler(temperature=temperature, grammar=Only(4)).choose(LOGITS_V)


def test_neither_threads_nor_other_requests_change_a_choice() -> None:
    rows = torch.randn(6, 49_152, generator=torch.Generator().manual_seed(3)) * 4
    parameters = {"temperature": 0.8, "seed": 9, "top_p": 0.95, "frequency_penalty": 0.5, "logprobs": 20}
    with threads(1):
        alone = sampler((5, 6), repetition_penalty=1.2, **parameters)
        expected = [alone.choose(row_V) for row_V in rows]
    with threads(2):
        among, other = sampler((5, 6), repetition_penalty=1.2, **parameters), sampler(temperature=1.0)
        found = []
        for row_V in rows:
            other.choose(row_V)
            found.append(among.choose(row_V))
    assert found == expected
