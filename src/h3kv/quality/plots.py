"""Quality against bytes as a picture."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from h3kv.core.errors import ConfigError
from h3kv.quality.measuring import Measurement, Point

KL_LEAST: Final = 1e-7
MARKERS: Final = {"exact": "s", "retrieval": "o"}


def check_writable(file: Path) -> None:
    """Make the file, empty where it is new, before minutes of measuring. Raises ConfigError: it cannot be written."""
    with _named(file), file.open("ab"):
        pass


def write_plot(measurement: Measurement, file: Path) -> None:
    """Write a PNG: mean KL, and the change of perplexity with two standard errors, over the bytes read per cold token.

    Raises:
        ConfigError: the file cannot be written.
    """
    # Here, since few commands draw and all of them start.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 4.5), layout="constrained")
    FigureCanvasAgg(figure)
    divergence, change = figure.subplots(1, 2)
    for color, encoding in enumerate(dict.fromkeys(point.variant.encoding for point in measurement.points)):
        for mode, marker in MARKERS.items():
            points = _of(measurement, encoding.value, mode)
            if not points:
                continue
            style = {"color": f"C{color}", "marker": marker, "linestyle": "-" if mode == "retrieval" else "none"}
            shares = [100 * point.bytes_share for point in points]
            label = f"{encoding.value}, {mode}"
            divergence.plot(shares, [max(p.fidelity.mean_kl, KL_LEAST) for p in points], label=label, **style)
            changes = [100 * point.fidelity.perplexity_change for point in points]
            errors = [200 * point.fidelity.perplexity_se for point in points]
            change.errorbar(shares, changes, yerr=errors, label=label, capsize=3, **style)
            for share, point in zip(shares, points, strict=True):
                divergence.annotate(point.variant.name, (share, max(point.fidelity.mean_kl, KL_LEAST)), fontsize=7)
    divergence.set(yscale="log", xlabel="bytes read, % of the cold tokens' plain bytes", ylabel="mean KL, nats")
    change.axhline(0, color="0.7", linewidth=1)
    change.set(xlabel="bytes read, % of the cold tokens' plain bytes", ylabel="change of perplexity, %")
    divergence.legend()
    with _named(file):
        figure.savefig(file, dpi=150, format="png")


@contextlib.contextmanager
def _named(file: Path) -> Iterator[None]:
    """Errors of the system as errors of the flag."""
    try:
        yield
    except OSError as error:
        raise ConfigError(f"cannot write {file}: {error.strerror}; choose another --plot", field="plot") from error


def _of(measurement: Measurement, encoding: str, mode: str) -> list[Point]:
    """Points of one encoding and mode, fewest bytes first."""
    points = [p for p in measurement.points if (p.variant.encoding.value, p.variant.mode) == (encoding, mode)]
    return sorted(points, key=lambda point: point.bytes_share)
