"""Reads JSON that a client sent."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import NoReturn

from h3kv.core.errors import RequestError


def read_json(text: str, *, field: str, depth_max: int) -> object:
    """The value that a text spells.

    Args:
        text: of any origin.
        field: whose text it is, for messages.
        depth_max: arrays and objects within one another.

    Raises:
        RequestError: it is no JSON, too deep, or has characters that UTF-8 cannot write.
    """
    try:
        value: object = json.loads(text, parse_constant=_refuse)
        # Half a surrogate pair can be spelled in JSON, and in no text for a tokenizer.
        json.dumps(value, ensure_ascii=False).encode()
    except RecursionError as error:
        raise _too_deep(field, depth_max) from error
    except ValueError as error:
        raise RequestError(f"{field}: not valid JSON ({error}); correct it") from error
    level: list[dict[str, object] | list[object]] = [value] if isinstance(value, dict | list) else []
    for _ in range(depth_max):
        level = [child for part in level for child in _parts(part) if isinstance(child, dict | list)]
    if level:
        raise _too_deep(field, depth_max)
    return value


def _parts(value: dict[str, object] | list[object]) -> Iterable[object]:
    return value.values() if isinstance(value, dict) else value


def _too_deep(field: str, depth_max: int) -> RequestError:
    return RequestError(f"{field}: nested more than {depth_max} deep; make it flatter")


def _refuse(name: str) -> NoReturn:
    raise ValueError(f"{name} is no number of JSON")
