"""The machine's clock."""

from __future__ import annotations

import time


class MonotonicClock:
    """Satisfies `Clock`. Never goes back, whatever happens to the time of day."""

    def now_ns(self) -> int:
        """Monotonic nanoseconds."""
        return time.monotonic_ns()
