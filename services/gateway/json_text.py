"""JSON inside of JSON: calls, their arguments, schemas. Their numbers are finite, as those of bodies are."""

from __future__ import annotations

import json
from typing import Any, Final

from pydantic import TypeAdapter

_ANYTHING: Final[TypeAdapter[Any]] = TypeAdapter(Any)


def read_json(text: str) -> Any:
    """The value that a text is.

    Raises:
        ValueError: it is no JSON, nests too deeply, or has a number that is none.
    """
    value = _ANYTHING.validate_json(text)
    write_json(value)
    return value


def write_json(value: object) -> str:
    """A value as text. Raises ValueError where it has a number that is none."""
    return json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
