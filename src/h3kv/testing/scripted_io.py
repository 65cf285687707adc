"""An I/O engine over a kernel whose faults are written down beforehand; all else in it is what ships."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Literal

from h3kv import _native
from h3kv.tiers.io import DEADLINE_MS, IoEngine

FOREVER: Final = 2**64 - 1
"""As the count of a fault: it never heals."""

Effect = Literal["full", "short", "error", "torn", "repeat", "stale", "hold", "late", "flip"]


@dataclass(frozen=True, slots=True)
class IoFault:
    """What happens to some of the requests, counted from 0 as the kernel takes them. Remainders are requests, too.

    | effect | |
    |---|---|
    | `full` | refused `value` times before it is taken |
    | `short` | moves at most `value` bytes; 0 looks like the end of the file |
    | `error` | moves nothing, completes with errno `value` |
    | `torn` | moves half of the bytes, completes with errno `value` |
    | `repeat` | completes twice |
    | `stale` | a completion of an older generation comes first |
    | `hold` | completes only when it is cancelled |
    | `late` | as `hold`, but all bytes are moved before it completes |
    | `flip` | byte `value` of what was read, or of what lies in the file after a write, is inverted |
    """

    effect: Effect
    first: int = 0
    count: int = 1
    value: int = 0


def open_scripted_engine(
    files: Sequence[int], faults: Sequence[IoFault], *, depth: int = 4, deadline_ms: int = DEADLINE_MS
) -> IoEngine:
    """An engine whose kernel carries requests out one by one, as far as the faults let it."""
    script = [(fault.effect, fault.first, fault.count, fault.value) for fault in faults]
    return IoEngine(_native.IoEngine(files, depth, (), "script", 1, deadline_ms, script))
