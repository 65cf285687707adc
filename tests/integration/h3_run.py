"""What the tests of `h3 run` share: one call of the command, and its JSON."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from typer.testing import CliRunner, Result

from h3kv.cli.app import app


def written(folder: Path, text: str) -> Path:
    """A document of this text."""
    file = folder / "document.txt"
    file.write_text(text, encoding="utf-8")
    return file


def invoke(model: Path, document: Path, *flags: str) -> Result:
    """One run that answers with 8 tokens at most."""
    common = ["--model", str(model), "--document", str(document), "--max-new-tokens", "8"]
    return CliRunner().invoke(app, ["run", *common, *flags])


def fields(result: Result) -> dict[str, Any]:
    """The JSON object of a run that went well."""
    assert result.exit_code == 0, result.stderr
    found: dict[str, Any] = json.loads(result.stdout)
    return found
