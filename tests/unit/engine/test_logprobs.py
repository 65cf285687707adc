import math

import pytest
import torch

from h3kv.engine.logprobs import token_logprobs


@pytest.mark.parametrize("scale", [0.1, 5.0, 300.0])
def test_they_are_the_logarithm_of_the_softmax(scale: float) -> None:
    logits_V = torch.randn(49_152, generator=torch.Generator().manual_seed(2)) * scale
    expected_V = logits_V.double() - logits_V.double().logsumexp(0)
    found = token_logprobs(logits_V, 17, 20)
    assert found.logprob == pytest.approx(float(expected_V[17]), abs=1e-9)
    best = expected_V.topk(20)
    assert [token for token, _ in found.top] == best.indices.tolist()
    assert [logprob for _, logprob in found.top] == pytest.approx(best.values.tolist(), abs=1e-9)
    assert max(logprob for _, logprob in found.top) <= 0


def test_equals_stand_in_order_of_their_numbers() -> None:
    logits_V = torch.tensor([1.0, 2.0, 0.0, 2.0, 1.0, 2.0])
    assert [token for token, _ in token_logprobs(logits_V, 0, 4).top] == [1, 3, 5, 0]
    assert [token for token, _ in token_logprobs(torch.zeros(50_000), 0, 3).top] == [0, 1, 2]


def test_none_beside_the_token_itself() -> None:
    found = token_logprobs(torch.zeros(4), 2, 0)
    assert found.top == ()
    assert found.logprob == pytest.approx(-math.log(4))


def test_impossible_tokens_are_not_named() -> None:
    logits_V = torch.full((30,), -math.inf)
    logits_V[[4, 9]] = torch.tensor([0.0, 1.0])
    assert [token for token, _ in token_logprobs(logits_V, 9, 20).top] == [9, 4]


def test_more_than_the_vocabulary_gives_all_of_it() -> None:
    assert len(token_logprobs(torch.zeros(3), 0, 20).top) == 3
