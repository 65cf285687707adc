"""What comes to the loop, from any thread."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, TypeAlias

from h3kv.core.units import NS_PER_S
from h3kv.rpc.command_messages import MoveOutcome
from h3kv.rpc.reports import NumberedReport, ProcessName
from services.migration_controller.peers import Answer

REPORTS_WAITING_MAX: Final = 256
"""Reports that wait for the loop; streams that bring more are read later."""
TAKEN_MAX: Final = 256
"""Things that one turn takes in, and"""
SEGMENTS_MAX: Final = 4_000
"""segments that its reports name: a turn must not take long. One report may name more."""


@dataclass(frozen=True, slots=True)
class StreamOpened:
    """A process reports from now on."""

    process: ProcessName


@dataclass(frozen=True, slots=True)
class StreamClosed:
    """One of its streams ended."""

    process: ProcessName


@dataclass(frozen=True, slots=True)
class ReportArrived:
    """A report came over a stream."""

    sent: NumberedReport
    received_ns: int


@dataclass(frozen=True, slots=True)
class Question:
    """Something to be called between two turns, where nothing changes."""

    ask: Callable[[], None]


Item: TypeAlias = StreamOpened | StreamClosed | ReportArrived | Answer | MoveOutcome | Question


class Inbox:
    """In order of arrival. Only reports are bounded: of all else there is as much as streams, commands and calls."""

    def __init__(self) -> None:
        self._items: queue.SimpleQueue[Item | None] = queue.SimpleQueue()
        self._report_room = threading.Semaphore(REPORTS_WAITING_MAX)

    @property
    def is_empty(self) -> bool:
        """Whether nothing waits at this moment."""
        return self._items.empty()

    def put(self, item: Item) -> None:
        """Hand something in. Never waits."""
        self._items.put(item)

    def put_report(self, arrived: ReportArrived, *, timeout_ns: int) -> bool:
        """Hand a report in once there is room. Returns whether there was within that time."""
        if not self._report_room.acquire(timeout=timeout_ns / NS_PER_S):
            return False
        self._items.put(arrived)
        return True

    def wake(self) -> None:
        """Make `take` return."""
        self._items.put(None)

    def take(self, timeout_ns: int) -> list[Item]:
        """What is there, as soon as something is; nothing when the time is over."""
        items: list[Item] = []
        segments = 0
        try:
            item = self._items.get(timeout=max(0, timeout_ns) / NS_PER_S)
            while True:
                if item is not None:
                    items.append(item)
                    if isinstance(item, ReportArrived):
                        self._report_room.release()
                        segments += len(item.sent.report.segments)
                if len(items) >= TAKEN_MAX or segments >= SEGMENTS_MAX:
                    break
                item = self._items.get_nowait()
        except queue.Empty:
            pass
        return items
