"""Quality against bytes in the terminal: a table, and a plot of characters."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Final

from rich.console import Console
from rich.table import Table

from h3kv.quality.answers import DROPPED
from h3kv.quality.measuring import Measurement, Point
from h3kv.quality.tasks import Kind
from h3kv.quality.variants import REFERENCE

PLOT_COLUMNS: Final = 60
PLOT_ROWS: Final = 14
KL_LEAST: Final = 1e-7
"""Lower end of the plot: codecs cost more."""


def show(console: Console, measurement: Measurement) -> None:
    """Print everything."""
    console.print(point_table(measurement.points))
    console.print(answer_table(measurement))
    console.print("\n".join(plot_lines(measurement.points)), markup=False, highlight=False)


def point_table(points: Sequence[Point]) -> Table:
    """One row for each variant."""
    table = Table(title="against full attention over plain numbers", title_justify="left")
    table.add_column("variant")
    table.add_column("setting")
    for heading in ("bytes", "in pages", "perplexity", "se", "mean KL", "top-1", "recall", "passkey"):
        table.add_column(heading, justify="right")
    for point in points:
        variant, fidelity, reading = point.variant, point.fidelity, point.reading
        table.add_row(
            variant.name,
            " ".join(part for part in (variant.encoding.value, variant.mode, variant.details) if part),
            f"{point.bytes_share:.1%}",
            _share(reading.page_share),
            f"{fidelity.perplexity_change:+.3%}",
            f"{fidelity.perplexity_se:.3%}",
            f"{fidelity.mean_kl:.1e}",
            f"{fidelity.top1:.4f}",
            _share(reading.recall),
            _share(point.kept.get(Kind.PASSKEY)),
        )
    return table


def answer_table(measurement: Measurement) -> Table:
    """Right answers, kind by kind; first those of full attention, last those without the cold context."""
    answers = measurement.answers
    names = [REFERENCE.name, *(point.variant.name for point in measurement.points), DROPPED]
    table = Table("right answers", *(f"{kind.value} of {answers.trials(kind)}" for kind in Kind))
    for name in names:
        table.add_row(name, *(str(answers.found(kind, name)) for kind in Kind))
    return table


def plot_lines(points: Sequence[Point]) -> list[str]:
    """Mean KL, on a logarithmic scale, over the share of bytes read; a letter for each variant."""
    heights = [math.log10(max(point.fidelity.mean_kl, KL_LEAST)) for point in points]
    low, high = math.floor(min(heights)), math.ceil(max(heights)) or 0
    high = max(high, low + 1)
    widest = max(point.bytes_share for point in points)
    grid = [[" "] * PLOT_COLUMNS for _ in range(PLOT_ROWS)]
    for letter, point, height in zip(_letters(len(points)), points, heights, strict=True):
        column = round(point.bytes_share / widest * (PLOT_COLUMNS - 1))
        row = round((high - height) / (high - low) * (PLOT_ROWS - 1))
        grid[row][column] = letter
    lines = ["mean KL"]
    for row, cells in enumerate(grid):
        height = high - row * (high - low) / (PLOT_ROWS - 1)
        lines.append(f"{10**height:8.0e} |{''.join(cells)}")
    lines.append(f"{'':9}+{'-' * PLOT_COLUMNS}")
    right = f"{widest:.0%}"
    lines.append(f"{'':10}0 %{right:>{PLOT_COLUMNS - 3}}  of the cold tokens' bytes")
    lines.append(
        f"{'':10}" + "  ".join(f"{a} {p.variant.name}" for a, p in zip(_letters(len(points)), points, strict=True))
    )
    return lines


def _letters(count: int) -> list[str]:
    return [chr(ord("A") + index) for index in range(count)]


def _share(value: float | None) -> str:
    return "" if value is None else f"{value:.1%}"
