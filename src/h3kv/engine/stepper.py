"""How running sequences advance: a token of every answer, then a turn of reading one prompt.

    step    | one pass: a token of A, B, C | prompt D, some layers | one pass: A, B, C | prompt D, some more | ...
                                           |<------- turn ------->|

Answers take their tokens together, in one pass over the weights. Prompts take chunks in turn, and each chunk is cut
into turns, so that no answer waits for a whole chunk. What a sequence gets depends on nobody beside it.
"""

from __future__ import annotations

import dataclasses
from collections import deque
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from typing import Final, Protocol

import torch

from h3kv.core.errors import H3Error, SlabCorruptError, SlabUnavailableError, TierFullError
from h3kv.core.ports import Clock
from h3kv.engine.events import Event, TokenGenerated
from h3kv.engine.failures import failure_of
from h3kv.engine.interrupts import interrupts_deferred
from h3kv.engine.pool import KvPool
from h3kv.engine.reporting import Reporter
from h3kv.engine.request import RequestId
from h3kv.engine.sequence import ChunkRule, LanguageModel, RunningSequence
from h3kv.engine.stopping import FinishReason
from h3kv.policy.turns import goes_on, turn_ns

LOSSES_MAX: Final = 32
"""Segments that a request may lose and compute again. A disk that loses more than that would keep it busy for ever."""

BeforeStep = Callable[[Sequence[RequestId], bool], None]
"""Takes the requests that take part in what comes now, and whether it is reading."""


class StepListener(Protocol):
    """Learns what steps led to."""

    def emit(self, events: Sequence[Event]) -> None:
        """Something happened to requests that go on."""
        ...

    def ended(self, sequence: RunningSequence, reason: FinishReason) -> None:
        """A sequence has come to its end."""
        ...

    def failed(self, sequence: RunningSequence, error: H3Error) -> None:
        """A sequence cannot go on."""
        ...

    def crowded(self, sequence: RunningSequence, error: TierFullError) -> None:
        """A sequence finds no room for its next token. It tries again in the next step, unless it was taken off."""
        ...


@dataclass(frozen=True, slots=True, eq=False)
class _Reading:
    """A chunk that is being read."""

    sequence: RunningSequence
    steps: Generator[None, None, list[Event]]
    start: int
    """Tokens that were in the cache before."""


class Stepper:
    """Advances sequences. Not thread-safe.

    Args:
        model: reads chunks, takes tokens and gives scores.
        pool: of the sequences.
        listener: takes sequences off that ended or failed, and calls `forget`.
        chunks: how prompts are cut.
        device: where the model lies.
        clock: for turns, and statistics.
        reporter: learns what was computed.
    """

    def __init__(
        self,
        model: LanguageModel,
        pool: KvPool,
        listener: StepListener,
        *,
        chunks: ChunkRule,
        device: torch.device,
        clock: Clock,
        reporter: Reporter,
    ) -> None:
        self._model = model
        self._pool = pool
        self._listener = listener
        self._chunks = chunks
        self._device = device
        self._clock = clock
        self._reporter = reporter
        self._reading: _Reading | None = None
        # Sequences that were taken off in this step, and how many ever were.
        self._gone: set[RunningSequence] = set()
        self._taken_off = 0
        # What the last token of all answers took, and whether it read the cold store.
        self._token_ns = 0
        self._reads_cold = False
        self.before_step: BeforeStep = lambda *_: None
        """Called before answers take a token, and before each turn of reading."""

    def step(self, running: deque[RunningSequence]) -> None:
        """One more token of each answer, then a turn of reading.

        Args:
            running: whose turn it is to read comes first; it goes to the end once its chunk was read.
        """
        self._gone.clear()
        self._reads_cold = False
        answers = [sequence for sequence in running if sequence.is_answering]
        if answers:
            self._answer(answers)
        prompts = sum(not sequence.is_answering for sequence in running)
        self._read(running, turn_ns(self._token_ns if answers else None, prompts=prompts))

    def forget(self, sequence: RunningSequence) -> None:
        """A sequence was taken off: a chunk of it that is being read never was begun."""
        if self._reading is not None and self._reading.sequence is sequence:
            self._reading.steps.close()
            self._reading = None
        self._gone.add(sequence)
        self._taken_off += 1

    def _answer(self, answers: list[RunningSequence]) -> None:
        began_ns = self._clock.now_ns()
        ready = self._make_ready(answers)
        kvs = [sequence.kv for sequence in ready]
        self._reads_cold = self._pool.read_ahead(kvs, repeats=len(kvs) == self._pool.running)
        if ready:
            self.before_step([sequence.id for sequence in ready], False)
            self._answer_together(ready)
        self._token_ns = self._clock.now_ns() - began_ns

    def _make_ready(self, answers: list[RunningSequence]) -> list[RunningSequence]:
        """Those that can take their token now.

        Where one is taken off, what it leaves may move what others read: all are made ready anew then.
        """
        while True:
            taken_off = self._taken_off
            ready = [sequence for sequence in answers if sequence not in self._gone and self._is_ready(sequence)]
            if taken_off == self._taken_off:
                return ready

    def _is_ready(self, sequence: RunningSequence) -> bool:
        try:
            self._pool.grow(sequence.kv)
            sequence.begin_token()
        except TierFullError as error:
            self._listener.crowded(sequence, error)
            return False
        except BaseException as error:  # noqa: BLE001  (charged to the sequence, or raised again)
            self._charge([sequence], error)
            return False
        return sequence.is_answering

    def _answer_together(self, sequences: list[RunningSequence]) -> None:
        """One more token of each. Where it is not clear whose an error is, each takes its token alone."""
        batch = self._pool.batch([sequence.kv for sequence in sequences])
        reads = [dataclasses.replace(sequence.kv.cache.meter) for sequence in sequences]
        ids_B = torch.tensor([sequence.tokens[-1] for sequence in sequences], dtype=torch.int64, device=self._device)
        try:
            logits_BV = self._model.decode(ids_B, batch)
        except Exception as error:  # noqa: BLE001  (what breaks one request must not end the others)
            guilty = sequences if batch.current is None else [sequences[batch.current]]
            if len(guilty) == 1:
                self._charge(guilty, error)
                return
            for sequence in guilty:
                # The one before may have moved what this one reads.
                for ready in self._make_ready([sequence]):
                    self._answer_together([ready])
            return
        except BaseException as error:
            self._charge(sequences, error)
            raise
        now_ns = self._clock.now_ns()
        for row, sequence in enumerate(sequences):
            if sequence in self._gone:
                # It gave its room to one before it: this token is computed again when it goes on.
                continue
            try:
                event = sequence.end_token(logits_BV[row], now_ns, before=reads[row])
            except BaseException as error:  # noqa: BLE001  (charged to the sequence, or raised again)
                self._charge([sequence] if isinstance(error, Exception) else sequences[row:], error)
                continue
            self._reporter.stepped(prefill_tokens=0, decode_tokens=1)
            self._reporter.retrieved(reads[row], sequence.kv.cache.meter)
            self._note(sequence, [event])

    def _read(self, running: deque[RunningSequence], limit_ns: int) -> None:
        """A turn of reading: of the chunk that is under way, or of the next one of whoever is first in the row."""
        reading = self._reading or self._begin_chunk(running)
        if reading is None:
            return
        sequence = reading.sequence
        self.before_step([sequence.id], True)
        try:
            events = self._take_turn(reading, limit_ns)
        except TierFullError as error:
            self._reading = None
            self._listener.crowded(sequence, error)
            return
        except BaseException as error:  # noqa: BLE001  (charged to the sequence, or raised again)
            self._reading = None
            self._charge([sequence], error)
            return
        if events is None:
            return
        running.remove(sequence)
        running.append(sequence)
        read_tokens = min(sequence.kv.tokens, sequence.prompt_tokens) - reading.start
        answered = sum(isinstance(event, TokenGenerated) for event in events)
        self._reporter.stepped(prefill_tokens=max(read_tokens, 0), decode_tokens=answered)
        self._note(sequence, events)

    def _begin_chunk(self, running: deque[RunningSequence]) -> _Reading | None:
        sequence = next((each for each in running if not each.is_answering), None)
        if sequence is None:
            return None
        sequence.kv.touch_found()
        steps = sequence.read(
            self._model, self._clock, chunks=self._chunks, device=self._device, on_read=self._pool.speeds.prefilled
        )
        self._reading = _Reading(sequence, steps, sequence.kv.tokens)
        return self._reading

    def _take_turn(self, reading: _Reading, limit_ns: int) -> list[Event] | None:
        """Steps of reading, as many as fit. Returns the events of the chunk when it has ended, else None."""
        began_ns = step_began_ns = self._clock.now_ns()
        # Two that read the cold store in turn would discard what was read ahead for the other.
        is_whole = self._reads_cold and bool(reading.sequence.kv.cache.cold_slabs())
        while True:
            try:
                with self._pool.speeds.stepping(reading):
                    next(reading.steps)
            except StopIteration as end:
                self._reading = None
                events: list[Event] | None = end.value
                return events or []
            now_ns = self._clock.now_ns()
            if not is_whole and not goes_on(now_ns - began_ns, now_ns - step_began_ns, limit_ns):
                return None
            step_began_ns = now_ns

    def _note(self, sequence: RunningSequence, events: Sequence[Event]) -> None:
        """A chunk or a token has ended."""
        self._listener.emit(events)
        if sequence.finish_reason is not None:
            self._listener.ended(sequence, sequence.finish_reason)
            return
        try:
            sequence.settle()
        except TierFullError as error:
            self._listener.crowded(sequence, error)
        except BaseException as error:  # noqa: BLE001  (charged to the sequence, or raised again)
            self._charge([sequence], error)

    def _charge(self, sequences: Sequence[RunningSequence], error: BaseException) -> None:
        """A step of sequences went wrong: they end, or go back to compute what was lost in their next steps.

        Raises:
            BaseException: the process is told to stop; these end.
        """
        for sequence in sequences:
            if not isinstance(error, Exception):
                self._listener.ended(sequence, FinishReason.CANCELLED)
            elif not isinstance(error, SlabCorruptError | SlabUnavailableError):
                self._listener.failed(sequence, failure_of(error))
            else:
                self._lose(sequence, error)
        if not isinstance(error, Exception):
            raise error

    def _lose(self, sequence: RunningSequence, error: SlabCorruptError | SlabUnavailableError) -> None:
        self._reporter.lost(error)
        if isinstance(error, SlabCorruptError):
            self._pool.lose(error.key)
            with interrupts_deferred():
                sequence.kv.refresh()
        else:
            sequence.kv.forget_from(error.key)
        sequence.losses += 1
        if sequence.losses > LOSSES_MAX:
            self._listener.failed(sequence, error)
