"""Reads JSON files of a model folder."""

from __future__ import annotations

import json
from pathlib import Path

from h3kv.core.errors import ModelCorruptError


def read_json(path: Path) -> dict[str, object]:
    """The object that a JSON file holds.

    Raises:
        ModelCorruptError: it is not JSON, or not an object.
    """
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ModelCorruptError(f"{path} is not complete JSON ({error}); fetch it again", path=str(path)) from error
    if not isinstance(content, dict):
        raise ModelCorruptError(f"{path} does not hold a JSON object; fetch it again", path=str(path))
    return content


def read_optional_json(path: Path) -> dict[str, object]:
    """As `read_json`; empty when there is no such file."""
    return read_json(path) if path.is_file() else {}
