"""Between gRPC and the loop: parses, hands on, answers."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Final, TypeVar

import grpc

from h3kv.api.common.v1 import commands_pb2, types_pb2
from h3kv.api.migration_controller.v1 import migration_controller_service_pb2 as pb
from h3kv.api.migration_controller.v1 import migration_controller_service_pb2_grpc as pb_grpc
from h3kv.core.errors import PeerCancelledError, PeerTimeoutError, RequestError
from h3kv.core.ports import Clock
from h3kv.core.units import NS_PER_MS
from h3kv.policy.migration_state import Direction
from h3kv.rpc.command_messages import outcome_message
from h3kv.rpc.convert import PAGE_MAX, tier_message
from h3kv.rpc.reports import ProcessName, read_report
from services.migration_controller.decisions import Decision, DecisionLog
from services.migration_controller.inbox import Inbox, Question, ReportArrived, StreamClosed, StreamOpened
from services.migration_controller.view_pages import ViewPages

POLL_NS: Final = 100 * NS_PER_MS
"""After which a stream that waits for room looks whether its caller is still there."""
ENDED_LIVES_MAX: Final = 1_024
"""Boot tokens of ended lives that are remembered."""
DECISIONS_DEFAULT: Final = 100

Answered = TypeVar("Answered")

_DIRECTIONS: Final = {Direction.PROMOTE: pb.DIRECTION_PROMOTE, Direction.DEMOTE: pb.DIRECTION_DEMOTE}


@dataclass(slots=True)
class _Stream:
    process: ProcessName
    context: grpc.ServicerContext
    report: int = 0


class _Streams:
    """Which stream of each process counts: the newest. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._open: dict[str, _Stream] = {}
        self._newest: dict[str, bytes] = {}
        """Boot token of the newest life, by name."""
        self._ended: OrderedDict[bytes, None] = OrderedDict()
        """Lives that a later one replaced."""

    def open(self, process: ProcessName, context: grpc.ServicerContext) -> _Stream:
        """A stream begins, and ends the older one. Raises RequestError where a later life was seen."""
        stream = _Stream(process, context)
        with self._lock:
            if process.boot_token in self._ended:
                message = f"a later {process.name} reports: this one must end, or begin with another boot token"
                raise RequestError(message)
            before = self._newest.get(process.name)
            if before is not None and before != process.boot_token:
                self._ended[before] = None
                while len(self._ended) > ENDED_LIVES_MAX:
                    self._ended.popitem(last=False)
            self._newest[process.name] = process.boot_token
            older = self._open.get(process.name)
            self._open[process.name] = stream
        if older is not None:
            older.context.cancel()
        return stream

    def is_newest(self, stream: _Stream) -> bool:
        """Whether no later stream of the process was opened."""
        with self._lock:
            return self._open.get(stream.process.name) is stream

    def close(self, stream: _Stream) -> None:
        """A stream ended."""
        with self._lock:
            if self._open.get(stream.process.name) is stream:
                del self._open[stream.process.name]


class ControllerServicer(pb_grpc.MigrationControllerServiceServicer):
    """Thread-safe.

    Args:
        clock: monotonic.
        identity: of this controller.
        inbox: of the loop.
        decisions: what was decided.
        pages: reads the view; called between turns.
    """

    def __init__(
        self, clock: Clock, identity: ProcessName, *, inbox: Inbox, decisions: DecisionLog, pages: ViewPages
    ) -> None:
        self._clock = clock
        self._identity = identity
        self._inbox = inbox
        self._decisions = decisions
        self._pages = pages
        self._streams = _Streams()

    def ReportTelemetry(
        self, request_iterator: Iterator[pb.ReportTelemetryRequest], context: grpc.ServicerContext
    ) -> pb.ReportTelemetryResponse:
        """See the protocol."""
        stream: _Stream | None = None
        reports = 0
        try:
            for message in request_iterator:
                received_ns = self._clock.now_ns()
                sent = read_report(message)
                if stream is None:
                    stream = self._streams.open(sent.process, context)
                    self._inbox.put(StreamOpened(sent.process))
                elif sent.process != stream.process:
                    raise RequestError("process changed within a stream: each process opens its own")
                if not self._streams.is_newest(stream):
                    raise PeerCancelledError("another stream of the process took over", peer=sent.process.name)
                if sent.number > stream.report:
                    stream.report = sent.number
                    self._hand_in(ReportArrived(sent, received_ns), context)
                    reports += 1
        finally:
            if stream is not None:
                self._streams.close(stream)
                self._inbox.put(StreamClosed(stream.process))
        return pb.ReportTelemetryResponse(reports=reports)

    def GetView(self, request: pb.GetViewRequest, context: grpc.ServicerContext) -> pb.GetViewResponse:
        """See the protocol."""
        if request.page_size > PAGE_MAX:
            raise RequestError(f"page_size = {request.page_size}: must be up to {PAGE_MAX}")
        page = self._pages.parse(request.page_token)
        response = self._ask(lambda: self._pages.read(request.page_size, page), context)
        response.server.CopyFrom(self._identity_message())
        return response

    def GetDecisions(self, request: pb.GetDecisionsRequest, context: grpc.ServicerContext) -> pb.GetDecisionsResponse:
        """See the protocol."""
        del context
        if request.count > PAGE_MAX:
            raise RequestError(f"count = {request.count}: must be up to {PAGE_MAX}")
        count = request.count or DECISIONS_DEFAULT
        has_number = request.HasField("after_decision")
        chosen = self._decisions.after(request.after_decision, count) if has_number else self._decisions.newest(count)
        totals, held = self._decisions.totals()
        messages = [self._decision_message(each) for each in chosen]
        return pb.GetDecisionsResponse(decisions=messages, totals=totals, held_totals=held)

    def _hand_in(self, arrived: ReportArrived, context: grpc.ServicerContext) -> None:
        while not self._inbox.put_report(arrived, timeout_ns=POLL_NS):
            if not context.is_active():
                raise PeerCancelledError("the caller went away", peer=arrived.sent.process.name)

    def _ask(self, read: Callable[[], Answered], context: grpc.ServicerContext) -> Answered:
        """What `read` returns, called by the loop between two turns."""
        answers: list[Answered] = []
        done = threading.Event()

        def ask() -> None:
            answers.append(read())
            done.set()

        self._inbox.put(Question(ask))
        left_s = min(context.time_remaining(), 3_600.0)
        if not done.wait(left_s):
            message = f"the controller did not come to it in {left_s:.1f} s: ask again"
            raise PeerTimeoutError(message, peer=self._identity.name)
        return answers[0]

    def _identity_message(self) -> types_pb2.ProcessIdentity:
        return types_pb2.ProcessIdentity(name=self._identity.name, boot_token=self._identity.boot_token)

    def _decision_message(self, decision: Decision) -> pb.Decision:
        command = decision.command
        message = pb.Decision(
            decision=command.id,
            made_ns=decision.made_ns,
            direction=_DIRECTIONS[command.direction],
            source=tier_message(command.source),
            target=tier_message(command.target),
            command=commands_pb2.Command(
                id=commands_pb2.CommandId(sender_boot_token=self._identity.boot_token, number=command.id),
                segment=types_pb2.SegmentRef(
                    key=decision.key,
                    segment=command.segment,
                    owner_boot_token=bytes.fromhex(command.owner.boot),
                    generation=command.generation,
                ),
                timeout_ns=command.deadline_ns - decision.made_ns,
                reason=command.reason.value,
            ),
        )
        if decision.outcome is not None:
            message.outcome.CopyFrom(outcome_message(decision.outcome))
        return message
