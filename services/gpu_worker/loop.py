"""The engine's thread: it alone touches the node.

    handlers --commands--> [ all commands, one step of the engine, its events ] --outboxes--> handlers

Handlers never wait for each other, and the engine waits for none of them. A command waits for one step at most.
"""

from __future__ import annotations

import concurrent.futures
import logging
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final, TypeVar

from h3kv.core.errors import H3Error, InternalError, PeerBusyError, PeerTimeoutError, PeerUnavailableError
from h3kv.core.units import NS_PER_MS, NS_PER_S
from h3kv.engine.events import Event, Failed, Finished
from h3kv.engine.request import Request, RequestId
from h3kv.node import Node
from h3kv.telemetry.trace_context import TraceContext, pack_context
from h3kv.telemetry.tracing import Tracer
from services.gpu_worker.outbox import Outbox
from services.gpu_worker.steps import StepSpans

ResultT = TypeVar("ResultT")

MOVING_POLL_NS: Final = NS_PER_MS
"""Between two looks at moves while nothing else is to be done."""
IDLE_POLL_NS: Final = NS_PER_S
"""The same while no move is under way."""

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, eq=False)
class Answer:
    """What a caller has of its request. Any thread may use it."""

    outbox: Outbox
    _give_up: Callable[[Answer], None]

    def __iter__(self) -> Iterator[Event]:
        """Events to the last, `Finished`. They end without it after `cancel`.

        Raises:
            H3Error: the request failed.
        """
        while (event := self.outbox.take()) is not None:
            yield event

    def cancel(self) -> None:
        """The caller wants no more: the request ends before the next step. Calling it again does nothing."""
        self._give_up(self)


@dataclass(slots=True, eq=False)
class _Open:
    """A request that has not ended."""

    answer: Answer
    spans: StepSpans
    id: RequestId | None = None
    """None until the engine has it."""


class EngineLoop:
    """Runs from `start` to `stop`.

    Args:
        node: touched by this thread alone until `stop` has returned.
        tracer: where spans of steps go.
        requests_max: of clients that run or wait, as `RequestShares` has it. There is room for as many again, which
            were cancelled since the last step, and for a document that is read: what was admitted is not refused here.
        name: of this process, for messages.
        on_failure: called once by the thread when the node itself broke; nothing is served any more.
        on_step: called by the thread after every step, and now and then without one.
        on_trace: called by the thread before a step whose trace differs from that of the step before, with the packed
            context for what other processes do for it.
    """

    def __init__(
        self,
        node: Node,
        *,
        tracer: Tracer,
        requests_max: int,
        name: str,
        on_failure: Callable[[BaseException], None],
        on_step: Callable[[Node], None],
        on_trace: Callable[[bytes], None] = lambda _: None,
    ) -> None:
        self._node = node
        self._tracer = tracer
        self._open_max = 2 * requests_max + 1
        self._name = name
        self._on_failure = on_failure
        self._on_step = on_step
        self._on_trace = on_trace
        self._is_traced = False
        self._stepped: list[_Open] = []
        node.engine.watch_steps(self._before_step)
        self._changed = threading.Condition()
        self._commands: deque[Callable[[], None]] = deque()
        self._calls: list[concurrent.futures.Future[Any]] = []
        self._open: dict[Answer, _Open] = {}
        self._by_id: dict[RequestId, _Open] = {}
        self._is_refusing = False
        self._is_stopping = False
        self._thread = threading.Thread(target=self._run, name="engine")

    def start(self) -> None:
        """Begin to take requests."""
        self._thread.start()

    def submit(self, request: Request, *, trace: TraceContext | None) -> Answer:
        """Hand in a request. What the engine has against it is raised by the answer.

        Args:
            request: checked but for what depends on the model.
            trace: parent of the spans of its steps.

        Raises:
            PeerBusyError: too many requests run or wait.
            PeerUnavailableError: this process is about to end.
        """
        answer = Answer(Outbox(request.sampling.max_new_tokens), self._give_up)
        with self._changed:
            self._check_open()
            if len(self._open) >= self._open_max:
                message = f"{self._open_max} requests run, wait or end: repeat it later, or raise requests_max"
                raise PeerBusyError(message, peer=self._name)
            opened = self._open[answer] = _Open(answer, StepSpans(self._tracer, trace))
            self._commands.append(lambda: self._begin(request, opened))
            self._changed.notify_all()
        return answer

    def call(self, function: Callable[[Node], ResultT], *, timeout_ns: int) -> ResultT:
        """What a function gives back that the engine's thread runs between two steps.

        Raises:
            PeerTimeoutError: a step took longer than that. The function may still run, or never does.
            PeerUnavailableError: this process is about to end.
        """
        future: concurrent.futures.Future[ResultT] = concurrent.futures.Future()

        def run() -> None:
            if not future.set_running_or_notify_cancel():
                return
            try:
                future.set_result(function(self._node))
            except H3Error as error:
                future.set_exception(error)
            except BaseException:
                future.set_exception(self._ending())
                raise

        with self._changed:
            self._check_open()
            self._calls = [call for call in self._calls if not call.done()] + [future]
            self._commands.append(run)
            self._changed.notify_all()
        try:
            return future.result(timeout_ns / NS_PER_S)
        except concurrent.futures.TimeoutError as error:
            future.cancel()
            raise PeerTimeoutError(
                "a step took longer than the call: repeat it with more time", peer=self._name
            ) from error
        except concurrent.futures.CancelledError as error:
            raise self._ending() from error

    def post(self, function: Callable[[Node], None]) -> None:
        """Have the engine's thread run a function between two steps, soon. Never waits; once it ends, nothing runs."""
        with self._changed:
            self._commands.append(lambda: function(self._node))
            self._changed.notify_all()

    def drain(self, timeout_ns: int) -> None:
        """Refuse new requests, wait so long for those that are open, and end what is left with PeerUnavailableError."""
        with self._changed:
            self._is_refusing = True
            self._changed.wait_for(lambda: not self._open, timeout_ns / NS_PER_S)
            left = list(self._open)
        for answer in left:
            answer.outbox.fail(self._ending())
            answer.cancel()

    def stop(self) -> None:
        """End the thread after its step. The node may be closed afterwards. Calling it again does nothing."""
        with self._changed:
            self._is_refusing = self._is_stopping = True
            self._changed.notify_all()
        if self._thread.ident is not None:
            self._thread.join()

    def _check_open(self) -> None:
        if self._is_refusing:
            raise self._ending()

    def _ending(self) -> PeerUnavailableError:
        return PeerUnavailableError(f"{self._name} is ending: repeat it when it runs again", peer=self._name)

    def _give_up(self, answer: Answer) -> None:
        answer.outbox.close()
        with self._changed:
            opened = self._open.get(answer)
            if opened is not None:
                self._commands.append(lambda: self._cancel(opened))
                self._changed.notify_all()

    def _run(self) -> None:
        try:
            while self._take_commands():
                self._advance()
        except BaseException as error:  # noqa: BLE001  (whatever it was, nobody may wait for this thread any more)
            self._break(error)
        else:
            self._end_all(self._ending())

    def _take_commands(self) -> bool:
        """Carry out what handlers want; wait where nothing is to be done. Returns whether to go on."""
        with self._changed:
            if not (self._commands or self._is_stopping or self._node.engine.has_work):
                pool = self._node.pool
                is_moving = pool.placer.is_moving or not pool.segments.is_settled
                self._changed.wait((MOVING_POLL_NS if is_moving else IDLE_POLL_NS) / NS_PER_S)
            commands, self._commands = self._commands, deque()
        for command in commands:
            command()
        return not self._is_stopping

    def _advance(self) -> None:
        """One step. Without work it takes notice of moves."""
        events = self._node.engine.step()
        stepped, self._stepped = self._stepped, []
        self._trace(None)
        for each in dict.fromkeys(stepped):
            each.spans.end([event for event in events if event.request == each.id])
        for request_id in dict.fromkeys(event.request for event in events):
            opened = self._by_id.get(request_id)
            if opened is None:
                continue
            own = [event for event in events if event.request == request_id]
            for event in own:
                opened.answer.outbox.put(event)
            if isinstance(own[-1], Finished | Failed):
                self._forget(opened)
        self._on_step(self._node)
        if not events and self._node.engine.has_work and not self._node.engine.is_running:
            # The first request waits for a move to end.
            with self._changed:
                self._changed.wait_for(lambda: self._commands or self._is_stopping, MOVING_POLL_NS / NS_PER_S)

    def _before_step(self, request_ids: Sequence[RequestId], is_prefill: bool) -> None:
        """The engine is about to advance requests: what is done for all of them is traced as the first one's."""
        found = [self._by_id[request_id] for request_id in request_ids if request_id in self._by_id]
        contexts = [opened.spans.begin(is_prefill=is_prefill, sequences=len(request_ids)) for opened in found]
        self._stepped += found
        self._trace(next((context for context in contexts if context is not None), None))

    def _trace(self, context: TraceContext | None) -> None:
        """Tell whose trace what happens from now on belongs to; nothing where it is nobody's, as before."""
        if context is not None or self._is_traced:
            self._is_traced = context is not None
            self._on_trace(pack_context(context))

    def _begin(self, request: Request, opened: _Open) -> None:
        if opened.answer not in self._open:
            return
        try:
            opened.id = self._node.engine.submit(request)
        except H3Error as error:
            opened.answer.outbox.fail(error)
            self._forget(opened)
        else:
            self._by_id[opened.id] = opened

    def _cancel(self, opened: _Open) -> None:
        if opened.answer in self._open:
            if opened.id is not None:
                self._node.engine.cancel(opened.id)
            self._forget(opened)

    def _forget(self, opened: _Open) -> None:
        opened.spans.close()
        if opened.id is not None:
            self._by_id.pop(opened.id, None)
        with self._changed:
            self._open.pop(opened.answer, None)
            self._changed.notify_all()

    def _break(self, error: BaseException) -> None:
        _log.critical("the engine broke: this process ends", exc_info=error)
        failure: H3Error
        if isinstance(error, H3Error):
            failure = PeerUnavailableError(f"{self._name} begins anew ({error}): repeat it then", peer=self._name)
        else:
            failure = InternalError("the engine broke: the log of the process that served it says where")
        failure.__cause__ = error
        with self._changed:
            self._is_refusing = True
        self._end_all(failure)
        self._on_failure(error)

    def _end_all(self, error: H3Error) -> None:
        with self._changed:
            left, self._open = self._open, {}
            self._commands.clear()
            self._changed.notify_all()
        for call in self._calls:
            call.cancel()
        for answer in left:
            answer.outbox.fail(error)
