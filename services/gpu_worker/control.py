"""This process's part in the controller's loop: reports out, commands in."""

from __future__ import annotations

from collections.abc import Callable

from h3kv.core.ports import Clock
from h3kv.engine.pool import KvPool
from h3kv.node import Node
from h3kv.rpc.command_messages import MoveCommand
from h3kv.rpc.telemetry_reporter import TelemetryReporter
from h3kv.tiers.remote.link import NodeLink
from services.gpu_worker.command_watch import CommandWatch
from services.gpu_worker.metrics import Snapshot
from services.gpu_worker.moves import MoveExecutor
from services.gpu_worker.reporting import WorkerReports


class Control:
    """Commands come from `start` to `stop`; without a controller there are none, and nothing is reported.

    Args:
        pool: whose segments are reported and moved.
        link: to `nvme_io`, which passes commands on.
        reporter: to the controller; None: there is none.
        boot_token: of this process.
        clock: monotonic.
        on_failure: called by a thread that broke: no command is heard any more.
    """

    def __init__(
        self,
        pool: KvPool,
        link: NodeLink,
        *,
        reporter: TelemetryReporter | None,
        boot_token: bytes,
        clock: Clock,
        on_failure: Callable[[BaseException], None],
    ) -> None:
        self._clock = clock
        self._link = link
        self._executor = MoveExecutor(pool, boot_token=boot_token, now_ns=clock.now_ns)
        self._reports = None if reporter is None else WorkerReports(pool, reporter)
        self._post: Callable[[Callable[[Node], None]], None] = lambda _: None
        self._watch = CommandWatch(link, self._receive, on_failure=on_failure)

    def start(self, post: Callable[[Callable[[Node], None]], None]) -> None:
        """Take commands from now on.

        Args:
            post: has the engine's thread run a function between two steps.
        """
        self._post = post
        self._watch.start()

    def look(self, snapshot: Snapshot) -> None:
        """On the engine's thread, after each step and now and then without one."""
        ended = self._executor.take_ended()
        self._watch.tell(ended)
        if self._reports is not None:
            outcomes = [each.outcome for each in ended]
            self._reports.look(snapshot, outcomes, now_ns=self._clock.now_ns())
        self._link.note_pins(snapshot.home_pins)

    def stop(self) -> None:
        """Take no more commands. What is under way is left to the pool."""
        self._watch.stop()

    def _receive(self, command: MoveCommand, received_ns: int) -> None:
        self._post(lambda _: self._executor.begin(command, received_ns))
