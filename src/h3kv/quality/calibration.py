"""`h3 calibrate quality`: the cheapest way to keep and read KV that loses no more than is allowed.

calibration portion    exact encodings and budgets -> dense layers for those that nearly hold -> those that hold
verification portion   the cheapest of those, and the cheapest exact one                      -> the choice
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from h3kv.bench.measure import Progress
from h3kv.core.types import Encoding
from h3kv.models.loader import LoadedModel
from h3kv.quality.choice import Candidate, LossLimit, acceptable, failures, near_misses
from h3kv.quality.documents import Portion, take_portion
from h3kv.quality.measuring import Measurement, Point, Sizes, measure
from h3kv.quality.tasks import Kind
from h3kv.quality.variants import REFERENCE, Variant, exact, retrieval

BUDGETS: Final = ((256, 1.0), (512, 1.0), (512, 0.5), (1024, 0.5), (1536, 0.5))
"""Tokens, and the share of the clusters whose keys are looked at. At 8K with 64 dimensions they read 14 to 20 % of the
cold tokens' bf16 bytes: looking at all keys takes 17 %, and half of that buys a thousand tokens."""

DENSE_COUNTS: Final = (1, 2)
"""How many layers read everything in the second round: those in which retrieval caught least."""

EXACT: Final = (exact(Encoding.INT8), exact(Encoding.K8V4), exact(Encoding.INT4))

VERIFIED_MAX: Final = 3
"""Choices that are tried on other text: the more there are, the likelier one holds by luck."""

SEED: Final = 5


@dataclass(frozen=True, slots=True)
class Verdict:
    """A variant, and what it misses."""

    variant: Variant
    candidate: Candidate
    misses: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Calibration:
    """The choice and the way to it."""

    chosen: Variant
    calibrated: tuple[Verdict, ...]
    """On the text to choose by."""
    verified: tuple[Verdict, ...]
    """On text that the search has not seen. Empty where nothing held before."""
    measurements: tuple[Measurement, ...]


def calibrate(
    model: LoadedModel, documents: Sequence[str], *, limit: LossLimit, sizes: Sizes, progress: Progress
) -> Calibration:
    """Measure, choose, verify.

    Args:
        model: as `load_rounded` gives it.
        documents: of the text.
        limit: of the loss.
        sizes: of each run.
        progress: hears of what was done.

    Raises:
        ConfigError: as `measure`.
    """
    text = take_portion(model.tokenizer, documents, Portion.CALIBRATION)
    first = [*EXACT, *(retrieval(Encoding.K8V4, budget, shortlist_share=share) for budget, share in BUDGETS)]
    runs = [measure(model, first, text, sizes=sizes, seed=SEED, progress=progress)]
    verdicts = _judge(runs[0], limit)
    near = near_misses([verdict.candidate for verdict in verdicts], limit)
    caught = runs[0].recall[Encoding.K8V4]
    widest = sorted(caught, key=lambda layer: (caught[layer], layer))
    second = [_denser(_variant(verdicts, name), widest[:count]) for name in near for count in DENSE_COUNTS]
    if second:
        progress(f"{', '.join(near)} nearly hold: measured again with dense layers")
        runs.append(measure(model, second, text, sizes=sizes, seed=SEED, progress=progress))
        verdicts += _judge(runs[1], limit)
    holding = acceptable([verdict.candidate for verdict in verdicts], limit)
    tried = [_variant(verdicts, one.name) for one in _worth_verifying(holding)]
    verified: list[Verdict] = []
    if tried:
        other = take_portion(model.tokenizer, documents, Portion.VERIFICATION)
        runs.append(measure(model, tried, other, sizes=sizes, seed=SEED + 1, progress=progress))
        verified = _judge(runs[-1], limit)
    kept = acceptable([verdict.candidate for verdict in verified], limit)
    chosen = _variant(verified, kept[0].name) if kept else REFERENCE
    return Calibration(chosen, tuple(verdicts), tuple(verified), tuple(runs))


def _worth_verifying(holding: Sequence[Candidate]) -> list[Candidate]:
    """The cheapest ones, and with them the cheapest exact one, behind which nothing is worth a look."""
    exact_at = next((at for at, one in enumerate(holding) if one.is_exact), len(holding))
    return [*holding[: min(exact_at, VERIFIED_MAX)], *holding[exact_at : exact_at + 1]]


def _judge(measurement: Measurement, limit: LossLimit) -> list[Verdict]:
    candidates = [candidate_of(point) for point in measurement.points]
    return [
        Verdict(point.variant, candidate, tuple(failures(candidate, limit)))
        for point, candidate in zip(measurement.points, candidates, strict=True)
    ]


def candidate_of(point: Point) -> Candidate:
    """What a choice is made by. Where full attention finds no passkey, none is known to be kept."""
    fidelity, passkey = point.fidelity, point.kept.get(Kind.PASSKEY)
    return Candidate(
        point.variant.name,
        is_exact=point.variant.retrieval is None,
        bytes_share=point.bytes_share,
        perplexity_change=fidelity.perplexity_change,
        perplexity_se=fidelity.perplexity_se,
        top1=fidelity.top1,
        passkey=0.0 if passkey is None else passkey,
    )


def _variant(verdicts: Sequence[Verdict], name: str) -> Variant:
    return next(verdict.variant for verdict in verdicts if verdict.variant.name == name)


def _denser(variant: Variant, layers: Sequence[int]) -> Variant:
    setting = variant.retrieval
    assert setting is not None
    return retrieval(
        variant.encoding,
        setting.budget_tokens,
        dense_layers=tuple(sorted(layers)),
        shortlist_share=setting.shortlist_share,
    )
