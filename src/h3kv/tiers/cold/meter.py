"""What the cold store reports about itself."""

from __future__ import annotations

from h3kv.core.ports import Telemetry
from h3kv.core.types import Tier
from h3kv.telemetry import names
from h3kv.tiers.cold.commit import Commits

_TIER = Tier.NVME.value


class Meter:
    """Turns totals into counters.

    Args:
        telemetry: where they go.
        backend: of the engine that runs.
    """

    def __init__(self, telemetry: Telemetry, *, backend: str) -> None:
        self._telemetry = telemetry
        self._written_bytes = 0
        self._read_bytes = 0
        self._areas_taken = 0
        self._is_degraded = False
        telemetry.gauge(names.IO_BACKEND, 1, tier=_TIER, backend=backend)
        telemetry.gauge(names.STORE_DEGRADED, 0, tier=_TIER)

    def update(self, commits: Commits, *, read_bytes: int) -> None:
        """Report what was written and read since the last call, and whether writing came to its end."""
        if commits.written_bytes > self._written_bytes:
            self._telemetry.count(names.WRITTEN_BYTES, commits.written_bytes - self._written_bytes, tier=_TIER)
            self._written_bytes = commits.written_bytes
        if read_bytes > self._read_bytes:
            self._telemetry.count(names.READ_BYTES, read_bytes - self._read_bytes, tier=_TIER)
            self._read_bytes = read_bytes
        if commits.areas_taken > self._areas_taken:
            self._telemetry.count(names.STORE_AREAS_TAKEN, commits.areas_taken - self._areas_taken, tier=_TIER)
            self._areas_taken = commits.areas_taken
        if commits.broken is not None and not self._is_degraded:
            self._is_degraded = True
            self._telemetry.gauge(names.STORE_DEGRADED, 1, tier=_TIER)
            self._telemetry.count(names.IO_ERRORS, tier=_TIER, kind="write")

    def count_corrupt(self, slabs: int = 1) -> None:
        """Slabs or headers that did not match their checksums."""
        if slabs:
            self._telemetry.count(names.CORRUPT_SLABS, slabs, tier=_TIER)

    def count_read_error(self) -> None:
        """A read that the device refused."""
        self._telemetry.count(names.IO_ERRORS, tier=_TIER, kind="read")

    def count_refusal(self) -> None:
        """A reservation over the write budget."""
        self._telemetry.count(names.WRITE_BUDGET_REFUSALS, tier=_TIER)
