"""Keeps the node directory in step with what owners say, on a thread of its own: its server may be slow or gone."""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Iterable
from typing import Final

from h3kv.core.types import BlockKey, SegmentId, Tier
from h3kv.core.units import NS_PER_S
from h3kv.directory.controller_view import ControllerView, OwnerReport, void_entries, with_entries, with_report
from h3kv.directory.entries import DirectoryEntry
from h3kv.directory.node_directory import NodeDirectory
from h3kv.policy.migration_state import Owner, SegmentReported
from h3kv.rpc.reports import ReportedSegment
from h3kv.telemetry import spans
from h3kv.telemetry.event_log import log_event
from services.migration_controller.view import Change

HEARTBEAT_NS: Final = 5 * NS_PER_S
"""A third of the shortest lease of an owner."""
CHANGES_WAITING_MAX: Final = 1_024
"""Further ones are dropped: entries are hints, and owners say them again."""
FASTEST: Final = (Tier.DEVICE, Tier.HOST, Tier.NVME)

_log = logging.getLogger(__name__)


class DirectoryKeeper:
    """Publishes for the processes of this node that report; runs from `start` to `stop`.

    Args:
        directory: closed by `stop`. Called by this object's thread alone.
        node: name of this machine, which goes before the names of owners: a server may be shared.
    """

    def __init__(self, directory: NodeDirectory, *, node: str) -> None:
        self._directory = directory
        self._prefix = f"{node}."
        self._changes: queue.Queue[Change | Owner | None] = queue.Queue(CHANGES_WAITING_MAX)
        self._owners: dict[str, Owner] = {}
        """Processes that are there, by their names in the directory."""
        self._before: tuple[DirectoryEntry, ...] = ()
        """What earlier lives of the controller left, until owners have spoken."""
        self._dropped = 0
        self._thread = threading.Thread(target=self._run, name="directory", daemon=True)

    def start(self) -> None:
        """Read what is there, then keep it in step."""
        self._thread.start()

    def changed(self, change: Change) -> None:
        """An owner said something. Never waits."""
        self._put(change)

    def left(self, owners: Iterable[Owner]) -> None:
        """Processes are gone. Never waits."""
        for owner in owners:
            self._put(owner)

    def stop(self, *, timeout_ns: int) -> None:
        """End after what waits. What is published stays until its lease ends: the owners are still there."""
        try:
            self._changes.put(None, timeout=timeout_ns / NS_PER_S)
        except queue.Full:
            log_event(_log, "directory_stuck", level=logging.WARNING)
        self._thread.join(timeout_ns / NS_PER_S)

    def _put(self, change: Change | Owner) -> None:
        try:
            self._changes.put_nowait(change)
        except queue.Full:
            self._dropped += 1
            if self._dropped == 1:
                log_event(_log, "directory_slow", level=logging.WARNING)

    def _run(self) -> None:
        self._before = self._expected()
        heartbeat_ns = time.monotonic_ns() + HEARTBEAT_NS
        while True:
            left_ns = max(0, heartbeat_ns - time.monotonic_ns())
            try:
                change = self._changes.get(timeout=left_ns / NS_PER_S)
            except queue.Empty:
                self._beat()
                heartbeat_ns = time.monotonic_ns() + HEARTBEAT_NS
                continue
            if change is None:
                break
            try:
                self._follow(change)
            except Exception as error:  # noqa: BLE001  (a name or a mistake of ours: what others say is published still)
                log_event(_log, "directory_failed", error=error, level=logging.ERROR)
        self._directory.close()

    def _expected(self) -> tuple[DirectoryEntry, ...]:
        """Entries of this node that lie there already: whom to expect."""
        entries = tuple(each for each in self._directory.entries() if each.owner.name.startswith(self._prefix))
        for owner in with_entries(ControllerView(), entries).awaited:
            log_event(_log, "process_expected", {spans.PEER: owner.name.removeprefix(self._prefix)})
        return entries

    def _follow(self, change: Change | Owner) -> None:
        if isinstance(change, Owner):
            owner = self._named(change)
            self._owners.pop(owner.name, None)
            self._directory.leave(owner)
            return
        owner = self._named(change.owner)
        if self._owners.get(owner.name) != owner:
            self._directory.join(owner)
            self._owners[owner.name] = owner
        self._directory.withdraw([_entry(owner, each) for each in change.gone])
        self._directory.publish([_entry(owner, each) for each in change.said])
        self._withdraw_void(owner, change.said)

    def _withdraw_void(self, owner: Owner, said: tuple[ReportedSegment, ...]) -> None:
        """Take back what an earlier life of this controller published and its owner does not say."""
        earlier = tuple(each for each in self._before if each.owner.name == owner.name)
        if not earlier:
            return
        self._before = tuple(each for each in self._before if each.owner.name != owner.name)
        segments = tuple(
            SegmentReported(owner, each.segment, each.generation, each.size_bytes, each.tiers) for each in said
        )
        view, _ = with_report(ControllerView(), OwnerReport(owner, segments))
        kept: set[BlockKey] = {each.key for each in said}
        self._directory.withdraw([each for each in void_entries(view, earlier) if each.key not in kept])

    def _beat(self) -> None:
        for owner in self._owners.values():
            self._directory.heartbeat(owner)
        self._directory.sweep()

    def _named(self, owner: Owner) -> Owner:
        return owner._replace(name=f"{self._prefix}{owner.name}")


def _entry(owner: Owner, segment: ReportedSegment) -> DirectoryEntry:
    tier = next(each for each in FASTEST if each in segment.tiers)
    return DirectoryEntry(segment.key, tier, owner, SegmentId(segment.segment), segment.generation, index=0)
