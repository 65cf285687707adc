"""Every measurement of a worker, under names that `h3kv.telemetry.names` declares."""

from __future__ import annotations

import threading
from typing import Final

from h3kv.attention.helping import NO_WORK, HelperStatistics
from h3kv.core.ports import Telemetry
from h3kv.core.units import NS_PER_MS, NS_PER_S
from h3kv.telemetry import names
from services.ann_offload.worker import OffloadWorker

PERIOD_NS: Final = 250 * NS_PER_MS
"""Between two looks at a worker's totals: they are counted where no Python runs."""


class MetricsPump:
    """Carries a worker's totals into a `Telemetry`, from `start` to `stop`."""

    def __init__(self, worker: OffloadWorker, telemetry: Telemetry) -> None:
        self._worker = worker
        self._telemetry = telemetry
        self._seen = NO_WORK
        self._ends = threading.Event()
        self._thread = threading.Thread(target=self._run, name="metrics", daemon=True)

    def start(self) -> None:
        """Begin."""
        self._thread.start()

    def stop(self) -> None:
        """Count what there is, and end. Calling it again does nothing."""
        self._ends.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._ends.wait(PERIOD_NS / NS_PER_S):
            self._count(self._worker.statistics())
        self._count(self._worker.statistics())

    def _count(self, now: HelperStatistics) -> None:
        seen, self._seen = self._seen, now
        self._telemetry.count(names.OFFLOAD_UNITS, now.units - seen.units, outcome="done")
        self._telemetry.count(names.OFFLOAD_UNITS, now.refused - seen.refused, outcome="refused")
        self._telemetry.count(names.OFFLOAD_READ_BYTES, now.read_bytes - seen.read_bytes)
        self._telemetry.count(names.OFFLOAD_BUSY, (now.busy_ns - seen.busy_ns) / NS_PER_S)
