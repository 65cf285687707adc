"""A clock that tests move by hand."""

from __future__ import annotations


class ManualClock:
    """Satisfies `Clock`.

    Args:
        step_ns: what each reading adds to the time, so that intervals are neither zero nor left to chance.
    """

    def __init__(self, *, step_ns: int = 0) -> None:
        self._now_ns = 0
        self._step_ns = step_ns

    def now_ns(self) -> int:
        """Monotonic nanoseconds."""
        self._now_ns += self._step_ns
        return self._now_ns

    def advance(self, duration_ns: int) -> None:
        """Let time pass."""
        assert duration_ns >= 0, "a monotonic clock does not go back"
        self._now_ns += duration_ns
