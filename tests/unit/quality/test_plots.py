"""The picture, where it can be drawn."""

from __future__ import annotations

from pathlib import Path

import pytest

from h3kv.core.errors import ConfigError
from h3kv.core.types import Encoding
from h3kv.quality.answers import Answers
from h3kv.quality.measuring import Measurement, Point
from h3kv.quality.plots import write_plot
from h3kv.quality.reading import Reading
from h3kv.quality.statistics import Fidelity
from h3kv.quality.tables import plot_lines
from h3kv.quality.variants import Variant, exact, retrieval


def point(variant: Variant, share: float, mean_kl: float) -> Point:
    fidelity = Fidelity(100, 20.0, 0.01 * share, 0.002, mean_kl, 0.99)
    return Point(variant, fidelity, Reading(1.0, share, share), {})


POINTS = (
    point(exact(Encoding.INT8), 0.53, 0.0),
    point(exact(Encoding.K8V4), 0.41, 1e-4),
    point(retrieval(Encoding.K8V4, 128), 0.18, 2e-3),
    point(retrieval(Encoding.K8V4, 512), 0.2, 1e-3),
)


@pytest.mark.slow
def test_a_png_is_written(tmp_path: Path) -> None:
    file = tmp_path / "quality.png"
    write_plot(Measurement(POINTS, 100, 1, Answers(), {}), file)
    assert file.read_bytes().startswith(b"\x89PNG")
    with pytest.raises(ConfigError, match="--plot"):
        write_plot(Measurement(POINTS, 100, 1, Answers(), {}), tmp_path / "missing" / "quality.png")


def test_the_terminal_shows_every_point_where_it_lies() -> None:
    lines = plot_lines(POINTS)
    rows = {
        letter: next(at for at, line in enumerate(lines) if f"{letter}" in line.partition("|")[2]) for letter in "ABCD"
    }
    assert rows["C"] < rows["D"] < rows["B"] < rows["A"]
    columns = {letter: lines[rows[letter]].index(letter) for letter in "ABCD"}
    assert columns["C"] < columns["D"] < columns["B"] < columns["A"]


def test_one_point_alone_can_be_shown() -> None:
    assert any("A k8v4" in line for line in plot_lines(POINTS[1:2]))
