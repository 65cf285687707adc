"""Checks of what callers ask for. They pass what clients sent, so that types are checked too."""

from __future__ import annotations

import math
from typing import Final

from h3kv.core.errors import RequestError

SHOWN_CHARACTERS: Final = 200
"""Of a refused value: messages travel in the trailers of a call, which have a bound."""


def require(fulfilled: bool, field: str, value: object, rule: str) -> None:
    """Refuse a value against its rule.

    Raises:
        RequestError: it is; the message begins with the field.
    """
    if not fulfilled:
        raise RequestError(f"{field} = {shown(value)}: {rule}")


def shown(value: object) -> str:
    """A value as messages show it: its beginning, if it is long."""
    text = repr(value)
    return text if len(text) <= SHOWN_CHARACTERS else f"{text[:SHOWN_CHARACTERS]}..."


def is_int(value: object, *, least: int, most: int | None = None) -> bool:
    """Whether a value is a whole number in a range."""
    if not isinstance(value, int) or isinstance(value, bool):
        return False
    return value >= least and (most is None or value <= most)


def is_number(value: object, *, least: float = -math.inf, most: float = math.inf) -> bool:
    """Whether a value is a finite number in a range."""
    if not isinstance(value, int | float) or isinstance(value, bool):
        return False
    return math.isfinite(value) and least <= value <= most


def are_stops(stops: object, *, most: int) -> bool:
    """Whether a value is a tuple of up to so many texts, none empty."""
    return isinstance(stops, tuple) and len(stops) <= most and all(isinstance(stop, str) and stop for stop in stops)


def are_tokens(tokens: object) -> bool:
    """Whether a value is a tuple of token numbers of some vocabulary."""
    return isinstance(tokens, tuple) and all(is_int(token, least=0) for token in tokens)


def are_biases(biases: object, *, most: float) -> bool:
    """Whether a value is a tuple of tokens, each once, with a number from minus `most` to `most`."""
    if not isinstance(biases, tuple) or not all(isinstance(pair, tuple) and len(pair) == 2 for pair in biases):
        return False
    are_sound = all(is_int(token, least=0) and is_number(bias, least=-most, most=most) for token, bias in biases)
    return are_sound and len({token for token, _ in biases}) == len(biases)


def lie_between(tokens: tuple[int, ...], least: int, most: int) -> bool:
    """Whether all are whole numbers in a range: in one pass of C over a long prompt."""
    return set(map(type, tokens)) == {int} and least <= min(tokens) and max(tokens) <= most
