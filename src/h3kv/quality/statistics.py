"""How far a variant's predictions lie from the reference's.

Both predict the same tokens from the same ones, so all comparisons are paired. Neighbouring tokens are not independent:
sums are kept block by block, and standard errors are those of a mean over blocks of unequal size.

Shapes: T rows that predict a token each, V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class BlockScore:
    """Sums over one block of rows."""

    rows: int
    loss: float
    """-log p of the tokens that came, in nats."""
    reference_loss: float
    divergence: float
    """KL(reference || variant), in nats."""
    agreed: int
    """Rows whose likeliest token is the reference's."""


@dataclass(frozen=True, slots=True)
class Fidelity:
    """A variant against the reference, over all blocks."""

    rows: int
    perplexity: float
    perplexity_change: float
    """Relative to the reference's; negative where the variant finds the text likelier."""
    perplexity_se: float
    """Standard error of the change."""
    mean_kl: float
    top1: float


def log_probabilities(logits_TV: Tensor) -> Tensor:
    """Of every token, fp64: divergences of 1e-6 are differences of nearly equal numbers."""
    return torch.log_softmax(logits_TV.double(), dim=1)


def score(reference_TV: Tensor, variant_TV: Tensor, next_T: Tensor) -> BlockScore:
    """Compare the predictions of one block.

    Args:
        reference_TV: log-probabilities of the reference.
        variant_TV: of the variant.
        next_T: the tokens that came.
    """
    index_T1 = next_T[:, None]
    return BlockScore(
        rows=len(next_T),
        loss=-float(variant_TV.gather(1, index_T1).sum()),
        reference_loss=-float(reference_TV.gather(1, index_T1).sum()),
        divergence=float((reference_TV.exp() * (reference_TV - variant_TV)).sum()),
        agreed=int((reference_TV.argmax(1) == variant_TV.argmax(1)).sum()),
    )


def summarise(blocks: Sequence[BlockScore]) -> Fidelity:
    """All blocks together. At least two.

    The mean difference of losses over N rows is a ratio of sums over B blocks; its variance is
    B / (B - 1) x sum((d_b - n_b x mean)^2) / N^2. The change of perplexity is exp(mean) - 1.
    """
    rows = sum(block.rows for block in blocks)
    mean = math.fsum(block.loss - block.reference_loss for block in blocks) / rows
    residuals = math.fsum((block.loss - block.reference_loss - block.rows * mean) ** 2 for block in blocks)
    count = len(blocks)
    assert count > 1, "one block has no spread"
    error = math.sqrt(residuals * count / (count - 1)) / rows
    return Fidelity(
        rows=rows,
        perplexity=math.exp(math.fsum(block.loss for block in blocks) / rows),
        perplexity_change=math.expm1(mean),
        perplexity_se=math.exp(mean) * error,
        # Rounding leaves the divergence of equal predictions a few 1e-17 below zero.
        mean_kl=max(math.fsum(block.divergence for block in blocks) / rows, 0.0),
        top1=sum(block.agreed for block in blocks) / rows,
    )
