"""Requests in, events out: in each step a token of every running answer, then a turn of reading one prompt.

    submit -> waiting -> running: reading -> answering -> Finished or Failed
                 |                   |           |
                 +------- cancel ----+-----------+--> Finished(cancelled)

Answers take their tokens together, in one pass over the weights. Prompts take chunks one after the other, each cut into
turns, so that no answer waits for a whole chunk.

A request starts when there is room for its prompt and the beginning of its answer: of the tenant that has the fewest
running, in the order of submission. Of those that outgrow the room together the one that came last is suspended: it
waits in front of all others, and goes on where it was. So the one that came first can always finish, and two requests
never wait for each other's room.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Generator, Sequence

import torch

from h3kv.core.errors import H3Error, InternalError, TierFullError
from h3kv.core.limits import BLOCK_TOKENS
from h3kv.core.ports import Clock, Telemetry
from h3kv.engine.admission import check_context, check_memory, cut_to_room
from h3kv.engine.config import EngineConfig
from h3kv.engine.events import Event, Failed, Finished, RequestStatistics
from h3kv.engine.failures import failure_of
from h3kv.engine.needs import KvNeed
from h3kv.engine.pool import KvPool
from h3kv.engine.reporting import Reporter
from h3kv.engine.request import Request, RequestId
from h3kv.engine.sequence import ChunkRule, LanguageModel, RunningSequence, Vocabulary
from h3kv.engine.sequence_kv import SequenceKv
from h3kv.engine.stepper import BeforeStep, Stepper
from h3kv.engine.stopping import FinishReason
from h3kv.engine.waiting import WaitingRequest, in_turn, need_of
from h3kv.policy.window import SEQUENCES_MAX


class Engine:
    """Runs requests on one model and one store. Not thread-safe: one owner calls it, between steps.

    Args:
        model: reads chunks and gives scores.
        pool: holds the KV; the caller closes it after the engine.
        vocabulary: text and end tokens.
        fingerprint: digest of everything but the tokens that decides the KV.
        device: where the model lies.
        config: see there.
        clock: for statistics only.
        telemetry: receives counters and gauges.

    Raises:
        ConfigError: the pool has no room for what retrieval reads.
    """

    def __init__(
        self,
        model: LanguageModel,
        pool: KvPool,
        *,
        vocabulary: Vocabulary,
        fingerprint: bytes,
        device: torch.device,
        config: EngineConfig,
        clock: Clock,
        telemetry: Telemetry,
    ) -> None:
        self._config = model.config
        self._pool = pool
        self._segments = pool.segments
        self._vocabulary = vocabulary
        self._fingerprint = fingerprint
        self._retrieval = config.retrieval
        if config.retrieval is not None:
            pool.check_retrieval(config.retrieval)
        self._clock = clock
        self._reporter = Reporter(telemetry)
        self._next_id = 1
        self._waiting: deque[WaitingRequest] = deque()
        self._running: deque[RunningSequence] = deque()
        # Whether the request that has the next turn may try to start: room changes only when one ends.
        self._may_admit = True
        # Events of the step that is being taken; those that no stream took; those that streams have not given out yet.
        self._events: list[Event] = []
        self._unclaimed: list[Event] = []
        self._streams: dict[RequestId, deque[Event]] = {}
        self._stepper = Stepper(
            model, pool, self, chunks=_chunk_rule(pool, config), device=device, clock=clock, reporter=self._reporter
        )
        pool.capacity.serve_longest(self._longest_blocks)
        self._report()

    @property
    def is_running(self) -> bool:
        """Whether a sequence has room, so that a step advances it."""
        return bool(self._running)

    @property
    def has_work(self) -> bool:
        """Whether a step would do or report anything."""
        return bool(self._waiting or self._running or self._events or self._unclaimed)

    def watch_steps(self, before_step: BeforeStep) -> None:
        """Have this called before answers take a token, and before each turn of reading a prompt."""
        self._stepper.before_step = before_step

    def submit(self, request: Request) -> RequestId:
        """Queue a request. Nothing is reserved yet.

        Raises:
            RequestError: the prompt is empty or has a token outside the vocabulary.
            ContextLengthError: prompt and answer exceed the context.
            TierFullError: the cap is too small for this request even when it runs alone; the message has the sum.
        """
        request.check(self._config.vocabulary_size)
        check_context(request, self._config.max_context)
        need = self._need_of(request)
        held_blocks = self._pool.held_blocks(need)
        cut = cut_to_room(request, self._pool, held_blocks=held_blocks)
        if cut is not request:
            request, need = cut, self._need_of(cut)
        check_memory(request, self._pool, held_blocks=held_blocks)
        waiting = WaitingRequest(RequestId(self._next_id), request, need, self._clock.now_ns())
        self._next_id += 1
        self._waiting.append(waiting)
        # It may have the next turn, and room where another had none. Suspended ones wait for the end of one that runs.
        self._may_admit |= self._waiting[0].suspended is None
        self._reporter.submitted(waiting.id, request)
        self._report()
        return waiting.id

    def step(self) -> list[Event]:
        """Start what has room, then take a token of each running answer, and a turn of reading one prompt.

        What goes wrong in one request becomes its `Failed`. KeyboardInterrupt and SystemExit end the sequences that
        were at it, which then hold nothing, and go on to the caller.

        Returns:
            Events of requests that no open stream of `generate` waits for; a stream's events go to the stream.
        """
        self._dispatch(self._step())
        events, self._unclaimed = self._unclaimed, []
        return events

    def cancel(self, request_id: RequestId) -> Finished | None:
        """End a request now and give back all that it holds; its whole blocks stay for reuse.

        Returns:
            The last event of the request, which no step reports any more; None when it is unknown or has ended.
        """
        return self._cancel_waiting(request_id) or self._cancel_running(request_id)

    def generate(self, request: Request) -> Generator[Event]:
        """Events of one request until it has finished; other requests go on beside it.

        The request is submitted when the first event is asked for. Leaving the iterator early cancels it.

        Raises:
            H3Error: what `submit` raises, or the error with which the request failed.
        """
        request_id = self.submit(request)
        inbox = self._streams[request_id] = deque()
        try:
            while True:
                while not inbox:
                    self._dispatch(self._step())
                    if not inbox and not self._is_alive(request_id):
                        raise InternalError(f"request {request_id} ended without a last event: report it")
                event = inbox.popleft()
                if isinstance(event, Failed):
                    raise event.error
                yield event
                if isinstance(event, Finished):
                    return
        finally:
            del self._streams[request_id]
            self.cancel(request_id)
            self._events = [event for event in self._events if event.request != request_id]

    def close(self) -> None:
        """Cancel everything. The store may be closed afterwards."""
        request_ids = [waiting.id for waiting in self._waiting] + [sequence.id for sequence in self._running]
        for request_id in request_ids:
            self.cancel(request_id)

    def evict_cached(self) -> int:
        """Give up all KV that no running request uses. Returns the number of segments."""
        evicted = self._pool.placer.evict_all()
        self._may_admit = True
        self._report()
        return evicted

    def check_integrity(self) -> None:
        """Assert that pins and room belong to running sequences or to the cache."""
        self._pool.check_integrity()
        pins = self._segments.statistics().pins
        held = sum(sequence.kv.pins for sequence in self._running)
        assert pins == held, f"{pins} pins, but running sequences hold {held}"
        assert self._pool.running == len(self._running), "a sequence was counted in and not out"

    def _longest_blocks(self) -> int:
        """Blocks of the longest request that was taken on and has not ended, beside those that documents hold."""
        longest = max((sequence.kv.blocks_beside_documents for sequence in self._running), default=0)
        # To look up what documents hold takes a while for a long prompt: only those that could be longer are looked at.
        for need in sorted((each.need for each in self._waiting), key=lambda need: need.blocks, reverse=True):
            if need.blocks <= longest:
                break
            longest = max(longest, need.blocks - self._pool.held_blocks(need))
        return longest

    def _need_of(self, request: Request) -> KvNeed:
        return need_of(request, self._fingerprint, retrieves=self._retrieval is not None)

    def _is_alive(self, request_id: RequestId) -> bool:
        """Whether further events of a request may come."""
        is_waiting = any(waiting.id == request_id for waiting in self._waiting)
        return is_waiting or any(sequence.id == request_id for sequence in self._running)

    def _step(self) -> list[Event]:
        self._pool.tick()
        self._admit()
        self._stepper.step(self._running)
        events, self._events = self._events, []
        return events

    def _admit(self) -> None:
        """Start waiting requests, as long as there is room for the one whose turn it is.

        Those wait aside that begin with what a running one is reading.
        """
        while self._may_admit and len(self._running) < SEQUENCES_MAX:
            turns = in_turn(self._waiting, self._running, places=self._pool.capacity.places)
            waiting = next((each for each in turns if not self._is_being_read(each)), None)
            if waiting is None:
                return
            try:
                self._share_with(waiting)
                self._start(waiting)
            except TierFullError as error:
                if self._running or not self._segments.is_settled:
                    # One of them will end and give room back, or a seal will, which can then be evicted.
                    self._may_admit = not self._segments.is_settled
                    return
                self._waiting.remove(waiting)
                self._fail(waiting.id, error)
            except Exception as error:  # noqa: BLE001  (what breaks one request must not end the others)
                self._waiting.remove(waiting)
                self._fail(waiting.id, failure_of(error))
            else:
                if waiting.suspended is None:
                    self._reporter.started(self._running[-1].statistics())
            self._report()

    def _is_being_read(self, waiting: WaitingRequest) -> bool:
        """Whether a running one reads its beginning, so that it waits for that."""
        keys = waiting.need.lookup_keys
        return any(sequence.will_have(keys) for sequence in self._running)

    def _share_with(self, waiting: WaitingRequest) -> None:
        """Have it find what running ones have of its beginning, also where that lies in their windows."""
        keys = waiting.need.lookup_keys
        for sequence in self._running:
            sequence.share(keys)

    def _start(self, waiting: WaitingRequest) -> None:
        """Make a waiting request a running one. Whatever is raised, it still waits and holds nothing."""
        kv = self._pool.open_sequence(waiting.need, is_alone=not self._running)
        try:
            self._running.append(self._sequence_of(waiting, kv))
            self._waiting.remove(waiting)
        except BaseException:
            self._undo_start(waiting, kv)
            raise

    def _sequence_of(self, waiting: WaitingRequest, kv: SequenceKv) -> RunningSequence:
        if waiting.suspended is not None:
            waiting.suspended.resume(kv)
            return waiting.suspended
        return RunningSequence(
            waiting.id,
            waiting.request,
            kv,
            vocabulary=self._vocabulary,
            retrieval=self._retrieval,
            submitted_ns=waiting.submitted_ns,
            started_ns=self._clock.now_ns(),
        )

    def _undo_start(self, waiting: WaitingRequest, kv: SequenceKv) -> None:
        """Make a request wait again, before all others, wherever its start was interrupted."""
        self._pool.close_sequence(kv, ())
        if self._running and self._running[-1].kv is kv:
            self._running.pop()
        if waiting not in self._waiting:
            self._waiting.appendleft(waiting)

    def _cancel_waiting(self, request_id: RequestId) -> Finished | None:
        waiting = next((waiting for waiting in self._waiting if waiting.id == request_id), None)
        if waiting is None:
            return None
        self._waiting.remove(waiting)
        self._may_admit = True
        self._report()
        statistics = waiting.statistics(self._clock.now_ns(), self._segments.tier)
        return self._cancelled(request_id, statistics)

    def _cancel_running(self, request_id: RequestId) -> Finished | None:
        sequence = next((sequence for sequence in self._running if sequence.id == request_id), None)
        if sequence is None:
            return None
        finished = self._cancelled(request_id, sequence.statistics())
        self._end(sequence)
        return finished

    def _cancelled(self, request_id: RequestId, statistics: RequestStatistics) -> Finished:
        """The last event, which the request's stream gets too if one is open."""
        finished = self._finish(request_id, FinishReason.CANCELLED, statistics)
        if request_id in self._streams:
            self._streams[request_id].append(finished)
        return finished

    def _end(self, sequence: RunningSequence) -> None:
        """Take a sequence off and give back all that it holds."""
        self._stepper.forget(sequence)
        self._running.remove(sequence)
        self._may_admit = True
        self._pool.close_sequence(sequence.kv, sequence.tokens)
        self._report()

    def _finish(self, request_id: RequestId, reason: FinishReason, statistics: RequestStatistics) -> Finished:
        self._reporter.ended(request_id, reason, statistics)
        return Finished(request_id, reason, statistics)

    def _fail(self, request_id: RequestId, error: H3Error) -> None:
        self._reporter.ended(request_id, error.reason, None)
        self._events.append(Failed(request_id, error))

    def emit(self, events: Sequence[Event]) -> None:
        """See `StepListener.emit`."""
        self._events += events

    def ended(self, sequence: RunningSequence, reason: FinishReason) -> None:
        """See `StepListener.ended`."""
        self._events.append(self._finish(sequence.id, reason, sequence.statistics()))
        self._end(sequence)

    def failed(self, sequence: RunningSequence, error: H3Error) -> None:
        """See `StepListener.failed`."""
        self._fail(sequence.id, error)
        self._end(sequence)

    def crowded(self, sequence: RunningSequence, error: TierFullError) -> None:
        """See `StepListener.crowded`.

        The one that came last gives its room back and waits in front of all others. What it computed stays, in the
        lower tiers if need be, and is found again when it goes on.
        """
        is_alone = len(self._running) == 1
        if is_alone and sequence.kv.reserved_blocks >= sequence.kv.blocks_max:
            self.failed(sequence, error)
            return
        last = max(self._running, key=lambda each: each.id)
        # One that is alone gives up what it found of others until there is room for all of it.
        need = need_of(
            last.request,
            self._fingerprint,
            retrieves=self._retrieval is not None,
            tokens=last.tokens,
            reserves_all=is_alone,
        )
        self._waiting.appendleft(WaitingRequest(last.id, last.request, need, last.submitted_ns, suspended=last))
        self._reporter.suspended()
        self._end(last)
        # Only the end of another one gives it the room that was too little for both.
        self._may_admit = is_alone

    def _dispatch(self, events: list[Event]) -> None:
        """Sort events into the streams that wait for them."""
        for event in events:
            self._streams.get(event.request, self._unclaimed).append(event)

    def _report(self) -> None:
        self._reporter.occupancy(self._pool.statistics(), self._segments)
        self._reporter.indexes(self._pool.indexes.store)
        self._reporter.requests(running=len(self._running), waiting=len(self._waiting))


def _chunk_rule(pool: KvPool, config: EngineConfig) -> ChunkRule:
    room_tokens = pool.device_plan.chunk_blocks * BLOCK_TOKENS
    return ChunkRule(
        base_tokens=min(config.chunk_tokens, room_tokens),
        room_tokens=room_tokens,
        resident_tokens=pool.resident_tokens,
    )
