"""Who helps with attention: processes of `ann_offload`, which come and go at a socket, and take units in shared memory.

engine's thread    attends, hands out units                       looks at totals between steps
crew's thread      lets processes in, and buries those that ended, also while the engine is idle
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final

from h3kv.attention.crew import CrewEvent, CrewHub, CrewJoined
from h3kv.attention.offload import OffloadStatistics, ScanStatistics, SpreadAttention
from h3kv.core.errors import ConfigError
from h3kv.core.ports import Telemetry
from h3kv.core.units import NS_PER_MS
from h3kv.memory.region import Region
from h3kv.memory.work_area import WorkArea, WorkGeometry
from h3kv.telemetry import names, spans
from h3kv.telemetry.event_log import log_event

_Totals = OffloadStatistics | ScanStatistics

SLICE_NS: Final = 100 * NS_PER_MS
"""How long the crew's thread waits before it looks whether it must end, or whether late helpers let go."""
INTERVAL_NS: Final = 100 * NS_PER_MS
"""Between two looks at totals: they are counted where no Python runs."""
MAILBOX: Final = "work"
"""Label of the requests for help."""

_log = logging.getLogger(__name__)


class Crew:
    """Helpers of one owner of sequences, from `start` to `close`.

    Args:
        region: of `work`, mapped for longer than this lives.
        socket_path: where helpers come.
        group: that may open the socket too; None: the owner alone.
        on_failure: called by the crew's thread when it broke.

    Raises:
        AddressInUseError: another process has helpers there.
        ConfigError: the socket cannot be made as it is wanted.
        StoreError: the folder is missing or closed to us.
        StoreFormatError: the region was made by another version.
    """

    def __init__(
        self, region: Region, socket_path: Path, *, group: int | None, on_failure: Callable[[BaseException], None]
    ) -> None:
        mode = 0o600 if group is None else 0o660
        with contextlib.ExitStack() as stack:
            # To open the area is to take it from whoever uses it: nobody does who could still hold the claim.
            claim = CrewHub.claim(socket_path, mode=mode)
            claimed = stack.enter_context(contextlib.ExitStack())
            claimed.callback(os.close, claim)
            self._area = WorkArea.open(region.slots, WorkGeometry.fitting(region.geometry.data_bytes))
            stack.callback(self._area.close)
            self.spread = SpreadAttention(self._area)
            claimed.pop_all()
            self._hub = CrewHub(socket_path, self.spread, mode=mode, claim=claim)
            stack.callback(self._hub.close)
            if group is not None:
                _share([socket_path, self._hub.locks_path], group)
            stack.pop_all()
        self._on_failure = on_failure
        self._processes = 0
        self._seen: OffloadStatistics = self.spread.statistics()
        self._next_look_ns = 0
        self._ends = threading.Event()
        self._thread = threading.Thread(target=self._serve, name="crew")

    def start(self) -> None:
        """Begin to let processes in."""
        self._thread.start()

    def look(self, telemetry: Telemetry, now_ns: int) -> None:
        """Count what became of units since the last look, now and then. For one thread."""
        if now_ns < self._next_look_ns:
            return
        self._next_look_ns = now_ns + INTERVAL_NS
        seen, self._seen = self._seen, self.spread.statistics()
        _count_units(telemetry, names.ATTEND_UNITS, seen, self._seen)
        _count_units(telemetry, names.SCAN_UNITS, seen.scanning, self._seen.scanning)
        telemetry.gauge(names.OFFLOAD_WORKERS, self._processes)
        telemetry.gauge(names.MAILBOX_DEPTH, self._area.mailbox.depth, mailbox=MAILBOX)

    def stop(self) -> None:
        """Let nobody in any more. Those that help go on. Calling it again does nothing."""
        self._ends.set()
        if self._thread.ident is not None:
            self._thread.join()

    def check_integrity(self) -> None:
        """Assert that nothing is held by helpers that have gone. After `stop`; nobody attends."""
        self._hub.check_integrity()
        if not self._hub.may_be_written:
            self.spread.check_integrity()

    def close(self) -> None:
        """Show all helpers out and let go of the region. Nobody attends any more. Calling it again does nothing."""
        self.stop()
        self._hub.close()
        self.spread.close()
        self._area.close()

    def _serve(self) -> None:
        try:
            while not self._ends.is_set():
                for event in self._hub.poll(SLICE_NS):
                    self._note(event)
        except BaseException as error:  # noqa: BLE001  (whatever it was, nobody buries the dead any more)
            self._on_failure(error)

    def _note(self, event: CrewEvent) -> None:
        has_joined = isinstance(event, CrewJoined)
        self._processes += 1 if has_joined else -1
        name = "crew_joined" if has_joined else "crew_gone"
        log_event(_log, name, {spans.PEER: f"ann_offload:{event.crew}", spans.UNITS: len(event.helpers)})


def _count_units(telemetry: Telemetry, name: str, seen: _Totals, now: _Totals) -> None:
    """Count what became of units between two looks at totals."""
    helped, late = now.units_helped - seen.units_helped, now.units_revoked - seen.units_revoked
    telemetry.count(name, helped, by="worker")
    telemetry.count(name, late, by="self_late")
    telemetry.count(name, now.units - seen.units - helped - late, by="self")


@contextlib.contextmanager
def open_crew(
    region: Region,
    socket_path: Path,
    *,
    group: int | None,
    on_failure: Callable[[BaseException], None],
    is_sound: Callable[[], bool],
) -> Iterator[Crew]:
    """A crew that lets processes in until the end.

    Args:
        region, socket_path, group, on_failure: see `Crew`.
        is_sound: whether nothing broke, so that integrity is checked at the end.
    """
    crew = Crew(region, socket_path, group=group, on_failure=on_failure)
    try:
        crew.start()
        yield crew
        crew.stop()
        if is_sound():
            crew.check_integrity()
    finally:
        crew.close()


def _share(paths: list[Path], group: int) -> None:
    try:
        for path in paths:
            made = path.stat()
            # What another user made stays as it is.
            if made.st_gid != group and made.st_uid == os.getuid():
                os.chown(path, -1, group)
    except OSError as error:
        raise ConfigError(
            f"{paths[0]} cannot be given to group {group} ({error.strerror}): name a group of this user",
            field="socket_group",
        ) from error
