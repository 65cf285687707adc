"""The controller's one thread: reports in, rules, commands out, ends of commands back in.

    inbox --events--> policy.migration.step --commands--> peers
      ^                                                     |
      +-------- answers of calls, moves that ended ---------+

A turn never waits for a process. The clock brings a turn too: at every tick, and when a peer may be tried again.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from h3kv.core.ports import Clock
from h3kv.core.units import NS_PER_S
from h3kv.policy.migration import step
from h3kv.policy.migration_config import MigrationConfig
from h3kv.policy.migration_state import (
    Command,
    CommandId,
    Event,
    HoldReason,
    MigrationState,
    MoveEnded,
    Plan,
)
from h3kv.rpc.call_context import CallContext, new_context
from h3kv.rpc.command_messages import MoveEnd, MoveOutcome
from h3kv.telemetry import spans
from h3kv.telemetry.event_log import log_event
from h3kv.telemetry.tracing import Tracer
from services.migration_controller.decisions import Decision, DecisionLog
from services.migration_controller.directory_keeper import DirectoryKeeper
from services.migration_controller.inbox import (
    Inbox,
    Item,
    Question,
    ReportArrived,
    StreamClosed,
    StreamOpened,
)
from services.migration_controller.metrics import ControllerMetrics
from services.migration_controller.peers import Answer, Executor, Order, Peer, executor_of
from services.migration_controller.view import NodeView, left

EXPIRED = "expired"
VOID = "void"
"""How a command ends whose segment, or its owner, is gone."""

_log = logging.getLogger(__name__)


@dataclass(slots=True)
class _Turn:
    """What one turn has gathered."""

    now_ns: int
    events: list[Event] = field(default_factory=list)
    arrived_ns: int | None = None
    """When the first of its reports came."""
    questions: list[Question] = field(default_factory=list)


class ControllerLoop:
    """Runs from `start` to `stop`. `turn` is the whole of it, for one thread.

    Args:
        clock: monotonic.
        config: thresholds.
        boot_token: of this controller.
        inbox: what comes in.
        view, decisions, peers, directory: what it works on. They stay the caller's.
        metrics, tracer: receive what happens.
        rest: called between two turns where nothing waits.
    """

    def __init__(
        self,
        clock: Clock,
        config: MigrationConfig,
        *,
        boot_token: bytes,
        inbox: Inbox,
        view: NodeView,
        decisions: DecisionLog,
        peers: dict[Executor, Peer],
        directory: DirectoryKeeper,
        metrics: ControllerMetrics,
        tracer: Tracer,
        rest: Callable[[], None],
    ) -> None:
        self._clock = clock
        self._boot_token = boot_token
        self._inbox = inbox
        self._view = view
        self._decisions = decisions
        self._peers = peers
        self._directory = directory
        self._metrics = metrics
        self._tracer = tracer
        self._rest = rest
        self._under_way: dict[CommandId, Command] = {}
        """Commands whose end was not counted yet."""
        self.state = MigrationState(config, now_ns=clock.now_ns())
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="controller-loop", daemon=True)

    def start(self) -> None:
        """Begin to decide."""
        self._thread.start()

    def stop(self, *, timeout_ns: int) -> None:
        """End after the turn that runs."""
        self._stopped.set()
        self._inbox.wake()
        self._thread.join(timeout_ns / NS_PER_S)

    def turn(self, items: Iterable[Item]) -> Plan:
        """Take these in, decide, send. Returns what was decided."""
        turn = _Turn(self._clock.now_ns())
        for item in items:
            self._take(item, turn)
        gone = self._view.expire(turn.now_ns)
        turn.events += left(gone)
        self._directory.left(gone)
        self.state, plan = step(self.state, turn.events, turn.now_ns)
        if plan.commands:
            self._send(plan, turn)
        else:
            self._pump(turn.now_ns)
        self._account(plan, turn)
        for question in turn.questions:
            question.ask()
        return plan

    def check_integrity(self) -> None:
        """Assert that what is counted and what the rules know fit together. Not while it runs."""
        assert set(self.state.commands) <= self._under_way.keys()
        self._view.check_integrity()
        self._decisions.check_integrity()

    def _run(self) -> None:
        while not self._stopped.is_set():
            try:
                self.turn(self._inbox.take(self._pause_ns()))
                if self._inbox.is_empty:
                    self._rest()
            except Exception as error:  # noqa: BLE001  (our own mistake: the node goes on without this turn)
                log_event(_log, "turn_failed", error=error, level=logging.ERROR)
                self._stopped.wait(self.state.config.tick_ns / NS_PER_S)

    def _pause_ns(self) -> int:
        """Until the next tick, or until a peer may be tried again."""
        now_ns, tick_ns = self._clock.now_ns(), self.state.config.tick_ns
        due = [(now_ns // tick_ns + 1) * tick_ns]
        due += [each.next_due_ns for each in self._peers.values() if each.next_due_ns is not None]
        return max(0, min(due) - now_ns)

    def _take(self, item: Item, turn: _Turn) -> None:
        match item:
            case StreamOpened(process):
                has_restarted, events = self._view.opened(process)
                turn.events += events
                if has_restarted:
                    self._metrics.restart(process.name)
                log_event(_log, "process_reports", {spans.PEER: process.name})
            case StreamClosed(process):
                self._view.closed(process, turn.now_ns)
                log_event(_log, "process_silent", {spans.PEER: process.name})
            case ReportArrived():
                self._take_report(item, turn)
            case Answer():
                for outcome in self._peers[item.peer].outcomes(item, turn.now_ns):
                    self._end(outcome, turn)
            case MoveOutcome():
                self._end(item, turn)
            case Question():
                turn.questions.append(item)

    def _take_report(self, arrived: ReportArrived, turn: _Turn) -> None:
        applied = self._view.apply(arrived.sent, arrived.received_ns)
        if applied is None:
            return
        events, change = applied
        # A move's end comes before the room after it.
        for outcome in arrived.sent.report.outcomes:
            self._end(outcome, turn)
        turn.events += events
        self._metrics.report(change.owner.name)
        self._directory.changed(change)
        if turn.arrived_ns is None:
            turn.arrived_ns = arrived.received_ns

    def _end(self, outcome: MoveOutcome, turn: _Turn) -> None:
        """A command ended, or is on its way. What another life of the controller commanded is none of ours."""
        if outcome.sender_boot_token != self._boot_token:
            self._metrics.held({HoldReason.UNKNOWN_COMMAND: 1})
            return
        command = self._under_way.get(CommandId(outcome.number))
        if command is None:
            return
        self._decisions.answer(outcome)
        if outcome.end.is_under_way:
            return
        del self._under_way[command.id]
        self._metrics.ended(outcome.end.label)
        error = None if outcome.end is MoveEnd.DONE else outcome.error_reason or outcome.end.label
        known = self.state.segments.get(command.ref)
        generation = outcome.generation or (command.generation if known is None else known.generation)
        tiers = outcome.tiers or (frozenset({command.source}) if known is None else known.tiers)
        turn.events.append(MoveEnded(command.id, error, generation, tiers))

    def _send(self, plan: Plan, turn: _Turn) -> None:
        """Send what was decided, and what waited for a peer."""
        span = self._tracer.begin(spans.DECIDE, attributes={spans.COMMANDS: len(plan.commands)})
        trace = span.context
        context = CallContext(new_context().request_id, None if trace is None else trace.traceparent)
        decided = []
        for command in plan.commands:
            known = self._view.segment(command.owner, command.segment)
            assert known is not None, f"the rules move segment {command.segment}, which nobody reported"
            self._under_way[command.id] = command
            order = Order(command, known.key, bytes.fromhex(command.owner.boot), context)
            self._peers[executor_of(command)].enqueue(order)
            decided.append(Decision(command, known.key, turn.now_ns))
        self._pump(turn.now_ns)
        if turn.arrived_ns is not None:
            self._metrics.decision_took(self._clock.now_ns() - turn.arrived_ns)
        span.end()
        self._decisions.add(decided)

    def _pump(self, now_ns: int) -> None:
        for peer in self._peers.values():
            peer.pump(now_ns)

    def _account(self, plan: Plan, turn: _Turn) -> None:
        """Count and log, after everything was sent."""
        self._metrics.decided(plan.commands)
        self._metrics.held(plan.held)
        self._decisions.hold(plan.held)
        self._metrics.reporting(self._view.reporting)
        for command in plan.commands:
            log_event(_log, "decided", _attributes(command))
        for number in [each for each in self._under_way if each not in self.state.commands]:
            command = self._under_way.pop(number)
            self._metrics.ended(EXPIRED if command.deadline_ns <= turn.now_ns else VOID)


def _attributes(command: Command) -> dict[str, str | int | float | bool]:
    return {
        spans.COMMAND: command.id,
        spans.DIRECTION: command.direction.value,
        spans.REASON: command.reason.value,
        spans.SEGMENT: command.segment,
        spans.GENERATION: command.generation,
        spans.TIER_SOURCE: command.source.value,
        spans.TIER_TARGET: command.target.value,
        spans.SIZE_BYTES: command.moved_bytes,
    }
