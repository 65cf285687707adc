"""How long pages were waited for: a histogram of bounded size."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final

import numpy as np

_PER_OCTAVE: Final = 8
"""Steps of a factor of two: a quantile is within 9 % of the true one."""

_OCTAVES: Final = 44
"""Up to some hours."""


@dataclass(frozen=True, slots=True)
class WaitStatistics:
    """Waits of single pages in nanoseconds; 0 for one that was there."""

    pages: int
    waited: int
    """Pages that were not there at once."""
    mean_ns: float
    sd_ns: float
    p50_ns: float
    p99_ns: float
    largest_ns: int


class PageWaits:
    """Adds up waits."""

    def __init__(self) -> None:
        self._counts = [0] * (_PER_OCTAVE * _OCTAVES)
        self._pages = 0
        self._total_ns = 0
        self._total_of_squares = 0.0
        self._largest_ns = 0

    def add(self, wait_ns: int, pages: int) -> None:
        """So many pages were waited for so long."""
        self._pages += pages
        if wait_ns <= 0 or pages == 0:
            return
        self._counts[min(int(_PER_OCTAVE * math.log2(wait_ns)), len(self._counts) - 1)] += pages
        self._total_ns += wait_ns * pages
        self._total_of_squares += float(wait_ns) ** 2 * pages
        self._largest_ns = max(self._largest_ns, wait_ns)

    def copy(self) -> PageWaits:
        """What was added so far."""
        copied = PageWaits()
        copied._counts = list(self._counts)
        copied._pages, copied._largest_ns = self._pages, self._largest_ns
        copied._total_ns, copied._total_of_squares = self._total_ns, self._total_of_squares
        return copied

    def __sub__(self, before: PageWaits) -> PageWaits:
        """What was added since an earlier copy. The largest wait is that of all of them."""
        since = self.copy()
        since._counts = [now - then for now, then in zip(self._counts, before._counts, strict=True)]
        since._pages -= before._pages
        since._total_ns -= before._total_ns
        since._total_of_squares -= before._total_of_squares
        return since

    def statistics(self) -> WaitStatistics:
        """Of all waits that were added."""
        pages = max(self._pages, 1)
        mean_ns = self._total_ns / pages
        return WaitStatistics(
            pages=self._pages,
            waited=sum(self._counts),
            mean_ns=mean_ns,
            sd_ns=math.sqrt(max(self._total_of_squares / pages - mean_ns**2, 0.0)),
            p50_ns=self._quantile(0.5),
            p99_ns=self._quantile(0.99),
            largest_ns=self._largest_ns,
        )

    def _quantile(self, share: float) -> float:
        """The middle of the step that holds it."""
        rank = math.ceil(share * self._pages) - (self._pages - sum(self._counts))
        if rank <= 0:
            return 0.0
        step = int(np.searchsorted(np.cumsum(self._counts), rank))
        return min(math.exp2((step + 0.5) / _PER_OCTAVE), float(self._largest_ns))
