"""Helping threads and what they need: the regions, a place in the crew. It needs no model, and no torch.

    regions mapped --> work area attached --> crew joined --> threads help
         ^                                        ^               |
         |                                        +---------------+  the owner of the sequences ended, or buried us
         +--------------------------------------------------------+  other regions are served now

While the owner of the regions is away, the regions stay mapped and threads go on.
"""

from __future__ import annotations

import contextlib
import enum
import functools
import logging
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from h3kv.attention.crew import CrewClient
from h3kv.attention.helping import NO_WORK, AttentionHelper, HelperStatistics, TracedHelp
from h3kv.attention.offload import Helper
from h3kv.core.errors import H3Error, NotRegisteredError, StoreFormatError
from h3kv.core.types import Tier
from h3kv.core.units import NS_PER_MS, NS_PER_S
from h3kv.memory.region_client import Outcome, RegionClient
from h3kv.memory.work_area import PURPOSE, WorkArea
from h3kv.telemetry import spans
from h3kv.telemetry.event_log import log_event
from h3kv.telemetry.trace_context import unpack_context
from h3kv.telemetry.tracing import Tracer

SLICE_NS: Final = 50 * NS_PER_MS
"""How long a thread helps before it looks whether it must end."""
CONNECT_NS: Final = 500 * NS_PER_MS
"""For each attempt to find a peer."""
PAUSE_NS_MAX: Final = NS_PER_S
"""Between two attempts that fail: the pause doubles up to here."""

_log = logging.getLogger(__name__)


class Phase(enum.Enum):
    """How a worker stands."""

    STARTING = "starting"
    """It waits for regions, or for somebody to help."""
    SERVING = "serving"
    DRAINED = "drained"


@dataclass(frozen=True, slots=True)
class WorkerConfig:
    """Where a worker finds its work."""

    regions: Path
    """Socket of the owner of the regions."""
    crew: Path
    """Socket of the owner of the sequences."""
    threads: int
    spin_ns: int
    """How long a thread looks for work before it sleeps."""
    name: str


class OffloadWorker:
    """Helps from `start` to `stop`. All methods may be called from any thread.

    Args:
        config: where it finds its work.
        boot_token: 16 random bytes of this process.
        tracer: receives what was done for requests that are traced.
        on_failure: called by the worker's thread when it broke: nobody helps any more.
    """

    def __init__(
        self,
        config: WorkerConfig,
        *,
        boot_token: bytes,
        tracer: Tracer,
        on_failure: Callable[[BaseException], None],
    ) -> None:
        self.config = config
        self._on_failure = on_failure
        self._tracer = tracer
        self._client = RegionClient(config.regions, name=config.name, boot_token=boot_token)
        self._crew = CrewClient(config.crew)
        self._area: WorkArea | None = None
        self._lock = threading.Lock()
        self._helpers: list[AttentionHelper] = []
        self._before = NO_WORK
        """Of helpers that have ended."""
        self._is_idle = threading.Event()
        self._is_idle.set()
        self._ends = threading.Event()
        self._phase = Phase.STARTING
        self._thread = threading.Thread(target=self._run, name="ann-offload", daemon=True)

    def start(self) -> None:
        """Begin to look for work."""
        self._thread.start()

    @property
    def phase(self) -> Phase:
        """How it stands."""
        return self._phase

    def statistics(self) -> HelperStatistics:
        """Totals of all threads since the start."""
        with self._lock:
            return sum((helper.statistics() for helper in self._helpers), self._before)

    def mailbox_depth(self) -> tuple[int, int]:
        """Records that wait to be taken, and how many fit; zeros while there is no mailbox."""
        with self._lock:
            area = self._area
            return (0, 0) if area is None else (area.mailbox.depth, area.mailbox.geometry.entries)

    def drain(self, *, timeout_ns: int) -> int:
        """Take no more units. Returns how many were still under way after so long. Idempotent."""
        self._ends.set()
        self._is_idle.wait(timeout_ns / NS_PER_S)
        return self.statistics().in_flight

    def stop(self, *, timeout_ns: int) -> None:
        """Take no more units, and let go of the regions. Calling it again does nothing."""
        self.drain(timeout_ns=timeout_ns)
        if self._thread.ident is not None:
            self._thread.join(timeout_ns / NS_PER_S)

    def _run(self) -> None:
        pause_ns = SLICE_NS
        try:
            while not self._ends.is_set():
                try:
                    self._meet_owner()
                    helpers = self._crew.join(self.config.threads, timeout_ns=CONNECT_NS)
                    # Not before: whoever takes helpers has opened the area anew.
                    self._attach()
                    if not self._crew.wait_for_end(0):
                        self._help(helpers)
                    pause_ns = SLICE_NS
                except H3Error as error:
                    _log.debug("nothing to help with yet: %s", error)
                    self._ends.wait(pause_ns / NS_PER_S)
                    pause_ns = min(2 * pause_ns, PAUSE_NS_MAX)
                finally:
                    self._crew.leave()
        except BaseException as error:  # noqa: BLE001  (whatever it was, nobody helps any more)
            self._on_failure(error)
        finally:
            self._phase = Phase.DRAINED
            self._let_go()
            self._client.close()

    def _meet_owner(self) -> None:
        """Have the regions mapped that are served now. Raises H3Error."""
        if self._client.is_connected:
            return
        if self._client.connect(CONNECT_NS) is Outcome.UNMAP_FIRST:
            self._let_go()
            self._client.unmap()
            self._client.connect(CONNECT_NS)

    def _attach(self) -> None:
        region = self._client.regions.get(PURPOSE)
        if region is None:
            message = f"{self.config.regions} serves no region for {PURPOSE}: its process must be of this version"
            raise StoreFormatError(message, path=str(self.config.regions))
        area = WorkArea.attach(region.slots)
        with self._lock:
            self._area = area

    def _let_go(self) -> None:
        with self._lock:
            self._area = None

    def _help(self, helpers: tuple[Helper, ...]) -> None:
        """Until the owner of the sequences ends, or other regions are served, or it is time to end."""
        with self._helping(helpers) as threads:
            self._phase = Phase.SERVING
            log_event(_log, "helping", {spans.UNITS: len(helpers), spans.ADDRESS: str(self.config.crew)})
            while not self._ends.is_set() and not self._crew.wait_for_end(SLICE_NS):
                if not all(thread.is_alive() for thread in threads) or not self._keeps_regions():
                    break
        if not self._ends.is_set():
            self._phase = Phase.STARTING

    def _keeps_regions(self) -> bool:
        """Whether the regions that are mapped are still the node's; while nobody serves any, they are."""
        if self._client.is_connected:
            return True
        try:
            return self._client.connect(0) is not Outcome.UNMAP_FIRST
        except H3Error as error:
            _log.debug("the owner of the regions is away: %s", error)
            return True

    @contextlib.contextmanager
    def _helping(self, helpers: tuple[Helper, ...]) -> Iterator[list[threading.Thread]]:
        """Threads that help. They have ended when this ends."""
        assert self._area is not None
        ranges = [(region.address, region.address + region.size_bytes) for region in self._client.regions.values()]
        made = [AttentionHelper(self._area, each, ranges=ranges, spin_ns=self.config.spin_ns) for each in helpers]
        ended = threading.Event()
        serve = functools.partial(self._serve, ended=ended)
        threads = [threading.Thread(target=serve, args=(helper,), name="helper", daemon=True) for helper in made]
        with self._lock:
            self._helpers = made
        self._is_idle.clear()
        for thread in threads:
            thread.start()
        try:
            yield threads
        finally:
            ended.set()
            for thread in threads:
                thread.join()
            with self._lock:
                self._before = sum((helper.statistics() for helper in made), self._before)
                self._helpers = []
            self._is_idle.set()

    def _serve(self, helper: AttentionHelper, *, ended: threading.Event) -> None:
        try:
            while not ended.is_set() and not self._ends.is_set():
                traced = helper.serve(deadline_ns=time.monotonic_ns() + SLICE_NS)
                if traced is not None:
                    self._record(traced)
        except NotRegisteredError as error:
            _log.warning("%s", error)
        except BaseException as error:  # noqa: BLE001  (whatever it was, this thread helps no more)
            self._on_failure(error)

    def _record(self, traced: TracedHelp) -> None:
        self._tracer.record(
            spans.ATTEND,
            parent=unpack_context(traced.context),
            duration_ns=traced.end_ns - traced.start_ns,
            attributes={
                spans.UNITS: traced.units,
                spans.TIER_SOURCE: Tier.HOST,
                spans.SIZE_BYTES: traced.read_bytes,
            },
        )
