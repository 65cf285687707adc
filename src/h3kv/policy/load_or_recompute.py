"""Whether the end of a known prefix is read from the cold store or computed again: whichever was measured to be faster.

    mounts      H   H | C0      C1      C2        H in memory, C in the cold store alone
    kept             0       1       2       3    of the run of C at the end
    time        all computed ...    C2 computed   all read

A token that is computed costs more the deeper it lies, one that is read costs the same anywhere. So the least time
mostly lies at one of the ends; between them where a segment takes much reading for few tokens, such as one used in
part.
"""

from __future__ import annotations

import enum
import itertools
import statistics
from collections.abc import Sequence
from dataclasses import dataclass


class Choice(enum.StrEnum):
    """What became of the end of a prefix."""

    LOAD = "load"
    RECOMPUTE = "recompute"


@dataclass(frozen=True, slots=True)
class Line:
    """`base + slope * x`, neither of them below 0."""

    base: float
    slope: float


@dataclass(frozen=True, slots=True)
class PrefillSpeed:
    """Nanoseconds in which a prompt's token is computed: `x` is its position."""

    ns_per_token: Line

    def ns(self, start: int, tokens: int) -> float:
        """Time of so many tokens from a position on."""
        middle = start + tokens / 2
        return tokens * (self.ns_per_token.base + self.ns_per_token.slope * middle)


@dataclass(frozen=True, slots=True)
class ReadSpeed:
    """Nanoseconds in which a byte of the cold store is read: `x` is reads per byte, so that the slope is a read's own
    time beside its bytes.
    """

    ns_per_byte: Line

    def ns(self, reads: int, size_bytes: int) -> float:
        """Time of so many reads of so many bytes together."""
        return size_bytes * self.ns_per_byte.base + reads * self.ns_per_byte.slope


@dataclass(frozen=True, slots=True)
class ColdMount:
    """A segment in the cold store alone, as part of a prefix."""

    tokens: int
    """That the prefix uses of it."""
    reads: int
    """In which all of it is read: one for each layer."""
    size_bytes: int
    """Of these."""


def mounts_to_keep(
    start: int, mounts: Sequence[ColdMount], *, prefill: PrefillSpeed | None, reading: ReadSpeed | None
) -> int:
    """How many of these mounts to read, the first ones; the tokens of the others are computed.

    Args:
        start: tokens of the prefix before the first of them.
        mounts: the run at the prefix's end.
        prefill: as measured; None: not yet, and everything is read.
        reading: as measured; None: not yet, and everything is read.

    Cost: O(mounts).
    """
    if prefill is None or reading is None:
        return len(mounts)
    ends = list(itertools.accumulate((mount.tokens for mount in mounts), initial=start))
    # From the last one back: what is computed if so many are kept, less what is not read then.
    saved_ns, best_ns, kept = 0.0, 0.0, len(mounts)
    for at in reversed(range(len(mounts))):
        mount = mounts[at]
        saved_ns += reading.ns(mount.reads, mount.size_bytes) - prefill.ns(ends[at], mount.tokens)
        if saved_ns > best_ns:
            best_ns, kept = saved_ns, at
    return kept


def fit_line(points: Sequence[tuple[float, float]], *, spread_min: float) -> Line | None:
    """The line that most pairs of points agree on: a few that lie far off do not move it.

    Args:
        points: `(x, y)`, y from 0.
        spread_min: two points whose x are nearer than that say nothing about the slope; more than 0.

    Returns:
        None without points. Level where no two lie apart.

    Cost: O(n^2) for n points.
    Source: Theil 1950, Sen 1968: the median of slopes.
    """
    if not points:
        return None
    slopes = [
        (other_y - y) / (other_x - x)
        for (x, y), (other_x, other_y) in itertools.combinations(points, 2)
        if abs(other_x - x) >= spread_min
    ]
    slope = max(statistics.median(slopes), 0.0) if slopes else 0.0
    base = statistics.median(y - slope * x for x, y in points)
    if base >= 0:
        return Line(base, slope)
    # Through the origin instead: a line that begins below it would call the first tokens free.
    through = [y / x for x, y in points if x > 0]
    return Line(0.0, statistics.median(through) if through else 0.0)
