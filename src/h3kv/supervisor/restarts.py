"""When a process that ended is started again."""

from __future__ import annotations

from dataclasses import dataclass

from h3kv.core.units import NS_PER_MS, NS_PER_S


@dataclass(frozen=True, slots=True)
class RestartConfig:
    """Pauses between an end and the next start."""

    first_ns: int = 250 * NS_PER_MS
    longest_ns: int = 30 * NS_PER_S
    steady_ns: int = 60 * NS_PER_S
    """A process that served for so long has paid for its crashes: the next pause is the first one again."""


@dataclass(slots=True)
class Restarts:
    """Of one process."""

    config: RestartConfig
    count: int = 0
    """Since the node began."""
    _pause_ns: int = 0

    def pause_ns(self, served_ns: int) -> int:
        """How long to wait now that it ended after serving for so long: doubling from the first to the longest."""
        self.count += 1
        is_steady = served_ns >= self.config.steady_ns
        doubled_ns = self.config.first_ns if is_steady else max(2 * self._pause_ns, self.config.first_ns)
        self._pause_ns = min(doubled_ns, self.config.longest_ns)
        return self._pause_ns
