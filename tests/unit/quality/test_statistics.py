"""Paired figures against the plain formulas."""

from __future__ import annotations

import math

import pytest
import torch
from torch.nn import functional

from h3kv.quality.statistics import BlockScore, log_probabilities, score, summarise


def block(loss: float, reference_loss: float, *, rows: int = 2) -> BlockScore:
    return BlockScore(rows, loss, reference_loss, divergence=0.0, agreed=rows)


def test_a_block_is_scored_as_the_plain_formulas_say() -> None:
    generator = torch.Generator().manual_seed(0)
    reference_TV, variant_TV = (torch.randn(5, 11, generator=generator) for _ in range(2))
    next_T = torch.tensor([0, 3, 10, 3, 7])
    found = score(log_probabilities(reference_TV), log_probabilities(variant_TV), next_T)
    assert found.rows == 5
    assert found.loss == pytest.approx(float(functional.cross_entropy(variant_TV.double(), next_T, reduction="sum")))
    assert found.reference_loss == pytest.approx(
        float(functional.cross_entropy(reference_TV.double(), next_T, reduction="sum"))
    )
    divergence = functional.kl_div(
        variant_TV.double().log_softmax(1), reference_TV.double().softmax(1), reduction="sum"
    )
    assert found.divergence == pytest.approx(float(divergence))
    assert found.agreed == int((reference_TV.argmax(1) == variant_TV.argmax(1)).sum())


def test_equal_predictions_have_no_distance() -> None:
    logits_TV = log_probabilities(torch.randn(4, 9, generator=torch.Generator().manual_seed(1)))
    found = summarise([score(logits_TV, logits_TV, torch.tensor([1, 2, 3, 4]))] * 2)
    assert (found.perplexity_change, found.perplexity_se, found.mean_kl, found.top1) == (0.0, 0.0, 0.0, 1.0)


def test_the_change_of_perplexity_is_that_of_the_mean_losses() -> None:
    found = summarise([block(4.2, 4.0), block(6.0, 6.4)])
    assert found.rows == 4
    assert found.perplexity == pytest.approx(math.exp(10.2 / 4))
    assert found.perplexity_change == pytest.approx(math.exp(-0.2 / 4) - 1)


def test_the_standard_error_is_that_of_the_blocks_means() -> None:
    differences = [0.4, -0.2, 0.1, 0.3]
    found = summarise([block(1 + difference, 1.0) for difference in differences])
    # Of equal blocks it is the sample's deviation over the root of their number; two rows halve a block's mean.
    mean = sum(differences) / 4
    deviation = math.sqrt(sum((difference - mean) ** 2 for difference in differences) / 3)
    assert found.perplexity_se == pytest.approx(math.exp(mean / 2) * deviation / 2 / math.sqrt(4))


def test_more_rows_weigh_more() -> None:
    found = summarise([block(2.0, 1.0, rows=1), block(3.0, 3.0, rows=9)])
    assert found.perplexity_change == pytest.approx(math.expm1(0.1))
