"""`h3 quality` and `h3 calibrate quality`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table

from h3kv.bench.results import Results
from h3kv.composition import apply_runtime
from h3kv.config import CONFIG_FILE, Settings
from h3kv.core.types import Encoding
from h3kv.quality import suite
from h3kv.quality.calibration import Calibration, Verdict, calibrate
from h3kv.quality.choice import LossLimit
from h3kv.quality.documents import read_documents
from h3kv.quality.measuring import FULL, QUICK
from h3kv.quality.plots import check_writable
from h3kv.quality.settings_file import write_settings
from h3kv.quality.variants import Variant, retrieval
from h3kv.quality.weights import load_rounded


@dataclass(frozen=True, slots=True)
class QualityRequest:
    """What the flags of `h3 quality` said."""

    texts: Sequence[Path]
    variants: Sequence[str]
    """Only those of these names; none: all."""
    quick: bool
    plot: Path | None
    json: Path | None


def measure_quality(settings: Settings, request: QualityRequest) -> None:
    """Measure, show tables on stderr, write what was asked for.

    Raises:
        H3Error: the first thing that stands in the way.
    """
    console = _start(settings)
    results = Results()
    # A path that cannot be written is found now, not after minutes.
    if request.json is not None:
        results.write(request.json)
    if request.plot is not None:
        check_writable(request.plot)
    suite.run(
        results,
        model=settings.model.source,
        texts=request.texts,
        default=variant_of(settings),
        named=request.variants,
        quick=request.quick,
        plot=request.plot,
        console=console,
        progress=console.print,
    )
    if request.json is not None:
        results.write(request.json)


def variant_of(settings: Settings) -> Variant | None:
    """The default that the settings choose; None where they keep plain numbers, which is what all is compared with."""
    attention = settings.attention
    encoding = Encoding(attention.encoding)
    if attention.mode == "exact":
        return None if encoding is Encoding.RAW else Variant("default", encoding)
    return retrieval(
        encoding,
        attention.budget_tokens,
        dense_layers=attention.dense_layers,
        shortlist_share=attention.shortlist_share,
        name="default",
    )


def calibrate_quality(
    settings: Settings, limit: LossLimit, *, texts: Sequence[Path], quick: bool, file: Path | None, dry_run: bool
) -> None:
    """Choose encoding, budget and dense layers, and write them to the file of settings.

    Raises:
        H3Error: the first thing that stands in the way; the file is as it was.
    """
    limit.check()
    console = _start(settings)
    documents = read_documents(texts)
    model = load_rounded(settings.model.source)
    sizes = QUICK if quick else FULL
    found = calibrate(model, documents, limit=limit, sizes=sizes, progress=console.print)
    console.print(verdict_table("calibration text", found.calibrated))
    if found.verified:
        console.print(verdict_table("verification text", found.verified))
    console.print(explain(found), highlight=False)
    if not dry_run:
        target = file or Path(CONFIG_FILE)
        write_settings(target, found.chosen)
        console.print(f"written to {target}", highlight=False)


def explain(found: Calibration) -> str:
    """The choice in a sentence or two."""
    chosen = found.chosen
    name = " ".join(part for part in (chosen.encoding.value, chosen.mode, chosen.details) if part)
    if chosen.retrieval is not None:
        share = next(verdict.candidate.bytes_share for verdict in found.verified if verdict.variant == chosen)
        return f"chosen: {name}, which reads {share:.1%} of the plain bytes per cold token and keeps the loss."
    return f"nothing that reads less than exact attention keeps the loss on both texts. chosen: {name}."


def verdict_table(title: str, verdicts: Sequence[Verdict]) -> Table:
    """What was measured, fewest bytes first, and what each misses."""
    table = Table("variant", "bytes", "perplexity", "top-1", "passkey", "misses", title=title, title_justify="left")
    for verdict in sorted(verdicts, key=lambda verdict: verdict.candidate.bytes_share):
        candidate = verdict.candidate
        table.add_row(
            candidate.name,
            f"{candidate.bytes_share:.1%}",
            f"{candidate.perplexity_change:+.3%} ± {candidate.perplexity_se:.3%}",
            f"{candidate.top1:.4f}",
            f"{candidate.passkey:.3f}",
            "; ".join(verdict.misses),
        )
    return table


def _start(settings: Settings) -> Console:
    """Set threads and instructions; messages go to stderr."""
    apply_runtime(settings.runtime)
    return Console(stderr=True, highlight=False)
