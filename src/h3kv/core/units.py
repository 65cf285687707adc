"""Sizes and durations as people write them, exact in both directions.

A size is a whole number of bytes, a duration a whole number of nanoseconds. Text that stands for a fraction of either
is refused instead of rounded.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from fractions import Fraction
from typing import Final

SIZE_UNITS: Final = {
    "TiB": 1 << 40,
    "GiB": 1 << 30,
    "MiB": 1 << 20,
    "KiB": 1 << 10,
    "TB": 10**12,
    "GB": 10**9,
    "MB": 10**6,
    "KB": 10**3,
    "B": 1,
}
"""Bytes per unit. `format_size` writes the binary ones only."""

NS_PER_MS: Final = 1_000_000
NS_PER_S: Final = 1_000_000_000

DURATION_UNITS: Final = {"h": 3_600 * 10**9, "min": 60 * 10**9, "s": 10**9, "ms": 10**6, "us": 10**3, "ns": 1}
"""Nanoseconds per unit, largest first."""

TOKENS_UNIT: Final = "tokens"

_QUANTITY = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]+)\s*", re.ASCII)


@dataclass(frozen=True, slots=True)
class TokenCount:
    """A cap on KV given in tokens: the bytes that they take of a given model in bf16, whatever is kept of them."""

    count: int


def parse_size(text: str | int) -> int:
    """Bytes that `text` stands for: `"4GiB"`, `"1.5 MiB"`, `"100MB"`; an integer is bytes already.

    Raises:
        ValueError: not a size; the message states the rule.
    """
    if isinstance(text, int):
        if isinstance(text, bool) or text < 0:
            raise ValueError("a size in bytes is a whole number from 0")
        return text
    rule = f"a size is a number and a unit ({', '.join(SIZE_UNITS)}) that make whole bytes, such as 4GiB"
    return _parse(text, SIZE_UNITS, rule)


def parse_cap(text: str | int) -> int | TokenCount:
    """A cap on KV: a size as `parse_size` reads it, or tokens, `"2048tokens"`.

    Raises:
        ValueError: neither; the message states the rule.
    """
    if isinstance(text, str) and text.strip().endswith(TOKENS_UNIT):
        count = text.strip().removesuffix(TOKENS_UNIT).strip()
        if not (count.isascii() and count.isdecimal()):
            raise ValueError("a cap in tokens is a whole number of them, such as 2048tokens")
        return TokenCount(int(count))
    try:
        return parse_size(text)
    except ValueError as error:
        raise ValueError(f"{error}, or a number of tokens, such as 2048tokens") from error


def parse_duration(text: str) -> int:
    """Nanoseconds that `text` stands for: `"250ms"`, `"1.5 s"`, `"2h"`.

    Raises:
        ValueError: not a duration; the message states the rule.
    """
    rule = f"a duration is a number and a unit ({', '.join(DURATION_UNITS)}) that make whole nanoseconds, such as 250ms"
    return _parse(text, DURATION_UNITS, rule)


def format_size(size_bytes: int) -> str:
    """Shortest exact text that `parse_size` reads back, in binary units: `"4GiB"`, `"1000B"`."""
    return _format(size_bytes, {name: size for name, size in SIZE_UNITS.items() if name == "B" or "i" in name})


def format_cap(cap: int | TokenCount) -> str:
    """Text that `parse_cap` reads back: `"4GiB"`, `"2048tokens"`."""
    return f"{cap.count}{TOKENS_UNIT}" if isinstance(cap, TokenCount) else format_size(cap)


def format_duration(duration_ns: int) -> str:
    """Shortest exact text that `parse_duration` reads back: `"250ms"`, `"90s"`."""
    return _format(duration_ns, DURATION_UNITS)


def describe_size(size_bytes: int) -> str:
    """Size for human eyes, rounded to three digits: `"3.91 GiB"`. Not for reading back."""
    for name in ("TiB", "GiB", "MiB", "KiB"):
        if size_bytes >= SIZE_UNITS[name]:
            value = size_bytes / SIZE_UNITS[name]
            return f"{value:.{2 if value < 10 else 1 if value < 100 else 0}f} {name}"
    return f"{size_bytes} B"


def _parse(text: str, units: dict[str, int], rule: str) -> int:
    found = _QUANTITY.fullmatch(text)
    if found is None or found[2] not in units:
        raise ValueError(rule)
    amount = Fraction(found[1]) * units[found[2]]
    if amount.denominator != 1:
        raise ValueError(rule)
    return amount.numerator


def _format(amount: int, units: dict[str, int]) -> str:
    for name, size in units.items():
        if amount >= size and amount % size == 0:
            return f"{amount // size}{name}"
    return f"{amount}{list(units)[-1]}"
