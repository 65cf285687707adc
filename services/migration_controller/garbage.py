"""Searches for garbage at moments when nobody waits for a decision.

The tables hold hundreds of thousands of small objects. A search that Python begins by itself, in the middle of a turn,
looks at all of them now and then: tens of milliseconds.
"""

from __future__ import annotations

import gc
from typing import Final

from h3kv.core.ports import Clock
from h3kv.core.units import NS_PER_S

YOUNG: Final = 1
"""Generations up to this one hold what was made since the last search but one."""
FULL_NS: Final = 600 * NS_PER_S
"""Between two searches through everything. What they find are cycles that outlived a turn, which is little."""


class GarbageBreaks:
    """For a whole process, from its making to `restore`: searches happen in `take` alone."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._full_ns = clock.now_ns()
        # What was made so far lives as long as the process: searches need not look at it.
        gc.collect()
        gc.freeze()
        gc.disable()

    def take(self) -> None:
        """Search now. Cost: a fraction of a millisecond; all ten minutes, O(segments)."""
        now_ns = self._clock.now_ns()
        if now_ns - self._full_ns >= FULL_NS:
            self._full_ns = now_ns
            gc.collect()
        else:
            gc.collect(YOUNG)

    def restore(self) -> None:
        """Let Python search by itself again."""
        gc.enable()
        gc.unfreeze()
