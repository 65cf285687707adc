"""`h3 quality`: fewer bits and fewer tokens against full attention, by their bytes."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Final

from rich.console import Console

from h3kv.bench.measure import Progress
from h3kv.bench.results import Results
from h3kv.core.errors import ConfigError
from h3kv.core.types import Encoding
from h3kv.quality.documents import Portion, read_documents, take_portion
from h3kv.quality.measuring import FULL, QUICK, Measurement, Point, dropped_share, measure
from h3kv.quality.plots import write_plot
from h3kv.quality.tables import show
from h3kv.quality.tasks import Kind
from h3kv.quality.variants import REFERENCE, Variant, exact, retrieval
from h3kv.quality.weights import load_rounded

SEED: Final = 11

DENSE_LAYERS: Final = (0, 20)
"""Of the embedded model: where retrieval catches least of the attention."""

DEFAULT: Final = retrieval(Encoding.K8V4, 1280, dense_layers=DENSE_LAYERS, shortlist_share=0.5, name="default")
"""For the embedded model, by experiments on the first portion; measured where the settings say nothing else."""

VARIANTS: Final = (
    exact(Encoding.INT8),
    exact(Encoding.K8V4),
    exact(Encoding.INT4),
    retrieval(Encoding.K8V4, 1024, dense_layers=DENSE_LAYERS, shortlist_share=0.5, name="bytes20"),
    retrieval(Encoding.K8V4, 0, name="budget0"),
    retrieval(Encoding.K8V4, 384, name="budget384"),
    retrieval(Encoding.K8V4, 1024, shortlist_share=0.5, name="shortlist50"),
)
"""`bytes20` reads a fifth of the cold tokens' plain bytes at most. `budget0` reads no cluster: its estimate alone."""

QUICK_VARIANTS: Final = (exact(Encoding.INT8), exact(Encoding.K8V4), exact(Encoding.INT4), VARIANTS[3])


def run(
    results: Results,
    *,
    model: str,
    texts: Sequence[Path],
    default: Variant | None,
    named: Sequence[str] = (),
    quick: bool,
    plot: Path | None,
    console: Console,
    progress: Progress,
) -> None:
    """Measure on the portion of the text that no calibration sees; show tables.

    Args:
        results: receives `quality.*`.
        model: folder, file or package; its weights are rounded to bf16 and run in fp32.
        texts: files; none: the default text.
        default: what the settings in force choose; None: what was calibrated for the embedded model.
        named: only variants of these names; none: all of them.
        quick: less of everything.
        plot: a PNG to write; None: none.
        console: for tables and the plot in the terminal.
        progress: hears of what was done.

    Raises:
        ConfigError: a text is missing or too short, a variant is unknown, or the plot cannot be written.
    """
    variants = choose_variants([*(QUICK_VARIANTS if quick else VARIANTS), default or DEFAULT], named)
    documents = read_documents(texts)
    loaded = load_rounded(model)
    measurement = measure(
        loaded,
        variants,
        take_portion(loaded.tokenizer, documents, Portion.UNSEEN),
        sizes=QUICK if quick else FULL,
        seed=SEED,
        progress=progress,
    )
    put(results, measurement)
    show(console, measurement)
    if plot is not None:
        write_plot(measurement, plot)
        progress(f"the plot is in {plot}")


def choose_variants(variants: Sequence[Variant], named: Sequence[str]) -> list[Variant]:
    """Those of these names; all where none is named.

    Raises:
        ConfigError: there is no variant of a name.
    """
    known = [variant.name for variant in variants]
    for name in named:
        if name not in known:
            raise ConfigError(
                f"there is no variant {name!r}: choose among {', '.join(known)}; --quick measures fewer",
                field="variant",
            )
    return [variant for variant in variants if not named or variant.name in named]


def put(results: Results, measurement: Measurement) -> None:
    """All figures under `quality.`; one that could not be measured is left out."""
    answers = measurement.answers
    results.put("quality.scored_tokens", measurement.scored_tokens)
    results.put("quality.documents", measurement.documents)
    results.put("quality.reference.perplexity", _reference_perplexity(measurement.points[0]))
    for kind in Kind:
        results.put(f"quality.reference.{kind.value}", answers.found(kind, REFERENCE.name))
        results.put(f"quality.reference.{kind.value}_trials", answers.trials(kind))
    _put_known(results, "quality.dropped.passkey", dropped_share(answers))
    for point in measurement.points:
        _put_point(results, f"quality.{point.variant.name}", point)
    shares = {point.variant.name: point.bytes_share for point in measurement.points}
    if {"default", Encoding.K8V4.value} <= set(shares):
        results.put("quality.default.bytes_fraction", shares["default"] / shares[Encoding.K8V4.value])


def _put_point(results: Results, prefix: str, point: Point) -> None:
    fidelity, reading = point.fidelity, point.reading
    results.put(f"{prefix}.perplexity_change", abs(fidelity.perplexity_change))
    results.put(f"{prefix}.perplexity_change_signed", fidelity.perplexity_change)
    results.put(f"{prefix}.perplexity_se", fidelity.perplexity_se)
    results.put(f"{prefix}.mean_kl", fidelity.mean_kl)
    results.put(f"{prefix}.top1", fidelity.top1)
    for kind, kept in point.kept.items():
        _put_known(results, f"{prefix}.{kind.value}", kept)
    results.put(f"{prefix}.bytes_share", point.bytes_share)
    _put_known(results, f"{prefix}.page_bytes_share", reading.page_share)
    _put_known(results, f"{prefix}.recall", reading.recall)


def _put_known(results: Results, name: str, value: float | None) -> None:
    if value is not None:
        results.put(name, value)


def _reference_perplexity(point: Point) -> float:
    return point.fidelity.perplexity / (1 + point.fidelity.perplexity_change)
