"""The flat object of metric names and numbers, and its table."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

from rich.console import Console
from rich.table import Table

from h3kv.core.errors import ConfigError


class Results:
    """Metrics in the order in which they were measured."""

    def __init__(self) -> None:
        self._metrics: dict[str, float] = {}

    def put(self, name: str, value: float) -> None:
        """Record one number. A name is used once."""
        assert name not in self._metrics, f"{name} was measured twice"
        self._metrics[name] = value

    @property
    def metrics(self) -> Mapping[str, float]:
        """All metrics."""
        return self._metrics

    def show(self, console: Console) -> None:
        """Print a table."""
        table = Table("metric", "value")
        for name, value in self._metrics.items():
            table.add_row(name, f"{value:.4g}")
        console.print(table)

    def write(self, path: Path) -> None:
        """Write one JSON object of names and numbers.

        Raises:
            ConfigError: the file cannot be written.
        """
        try:
            path.write_text(json.dumps(self._metrics, indent=2) + "\n", encoding="utf-8")
        except OSError as error:
            raise ConfigError(f"cannot write {path}: {error.strerror}; choose another --json", field="json") from error
