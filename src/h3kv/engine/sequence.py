"""One request while it runs: a prompt that is read in chunks, then an answer that grows by tokens.

Shapes: T tokens of a chunk, V vocabulary.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from typing import Final, Literal, Protocol

import torch
from torch import Tensor

from h3kv.attention.retrieval import RetrievalMeter
from h3kv.core.limits import BLOCK_TOKENS, SEGMENT_BLOCKS_MAX
from h3kv.core.ports import Clock
from h3kv.core.retrieval import RetrievalSetting
from h3kv.core.types import BlockKey
from h3kv.engine.detokenizer import Detokenizer
from h3kv.engine.events import Event, PrefillProgress, RequestStatistics, TokenGenerated
from h3kv.engine.interrupts import interrupts_deferred
from h3kv.engine.request import Request, RequestId
from h3kv.engine.sampling import Choice, Sampler
from h3kv.engine.sequence_kv import SequenceKv
from h3kv.engine.stopping import FinishReason, StopRule
from h3kv.models.config import ModelConfig
from h3kv.models.decoder import SteppedKvCache, TokenBatch
from h3kv.policy.chunking import chunk_end

BLOCKS_WORTH_WAITING: Final = 8
"""A prompt waits for another that reads so many of its first blocks, 512 tokens: it finds them then."""


class LanguageModel(Protocol):
    """What the engine needs of `models.decoder.Decoder`."""

    @property
    def config(self) -> ModelConfig:
        """Sizes and limits."""
        ...

    def steps(
        self, token_ids_T: Tensor, cache: SteppedKvCache, *, logits: Literal["last", "all", "none"]
    ) -> Generator[None, None, Tensor]:
        """See `Decoder.steps`."""
        ...

    def decode(self, token_ids_B: Tensor, batch: TokenBatch) -> Tensor:
        """See `Decoder.decode`."""
        ...


class Vocabulary(Protocol):
    """What the engine needs of `models.tokenizer.Tokenizer`."""

    @property
    def eos_ids(self) -> frozenset[int]:
        """Tokens with which the model ends a text."""
        ...

    @property
    def special_ids(self) -> frozenset[int]:
        """Tokens that stand for no text."""
        ...

    def token_bytes(self, token: int) -> bytes:
        """UTF-8 bytes of a token, perhaps parts of characters; of a special one, its name."""
        ...


@dataclass(frozen=True, slots=True)
class ChunkRule:
    """How known tokens are cut into chunks. A function of positions and configuration alone."""

    base_tokens: int
    """Chunks end at multiples of it from the start of the prompt, wherever the first one begins: a prompt that was
    partly found is cut as one that was not."""
    room_tokens: int
    """Longest chunk that the device has room for."""
    resident_tokens: int | None
    """Beyond so many tokens each chunk reads the rest again from the cold store, and is longer for it; None: never."""

    def end(self, start: int, known_tokens: int) -> int:
        """The position at which the chunk that begins at `start` ends."""
        return chunk_end(
            start,
            known_tokens,
            base_tokens=self.base_tokens,
            room_tokens=self.room_tokens,
            resident_tokens=self.resident_tokens if self.resident_tokens is not None else known_tokens,
        )


class RunningSequence:
    """Advances by a chunk, in steps, or by a token, beside others. Its owner closes `kv` when it ended.

    Args:
        request_id: of the request.
        request: checked.
        kv: of this sequence; its owner closes it.
        vocabulary: gives text and end tokens.
        retrieval: how the answer's tokens choose what they read; the prompt reads everything.
        submitted_ns: when the request came, on the clock of `step`.
        started_ns: when it got its room.
    """

    def __init__(
        self,
        request_id: RequestId,
        request: Request,
        kv: SequenceKv,
        *,
        vocabulary: Vocabulary,
        retrieval: RetrievalSetting | None,
        submitted_ns: int,
        started_ns: int,
    ) -> None:
        self.id = request_id
        self.request = request
        self.kv = kv
        self.tokens = list(request.prompt)
        self.finish_reason: FinishReason | None = None
        self.losses = 0
        self.prompt_tokens = len(request.prompt)
        self._retrieval = retrieval
        self._reused_tokens = kv.reused_tokens
        self._recomputed_tokens = kv.recomputed_tokens
        self._attended = kv.attended_tokens()
        self._sampler = Sampler(request.sampling, prompt=request.prompt)
        self._stop_rule = StopRule(request.sampling, vocabulary.eos_ids)
        self._silent_ids = vocabulary.special_ids if request.sampling.skip_special_tokens else frozenset()
        self._detokenizer = Detokenizer(vocabulary.token_bytes, request.sampling.stop)
        self.submitted_ns = submitted_ns
        self._started_ns = started_ns
        self._prefill_ns = 0
        self._read_tokens = 0
        self._token_times_ns: list[int] = []

    def share(self, keys: Sequence[BlockKey]) -> None:
        """Have another prompt find what it has of it: one with this root key and these keys of blocks."""
        with interrupts_deferred():
            self.kv.share(self.kv.blocks_in_common(keys), self.tokens)

    def will_have(self, keys: Sequence[BlockKey]) -> bool:
        """Whether it still reads so much of another prompt's beginning that it is sooner found than computed again."""
        if self.is_answering:
            return False
        common = self.kv.blocks_in_common(keys)
        found = sum(self.kv.reused_tokens.values()) // BLOCK_TOKENS
        # The segment of the last common block is full, or ends with the prompt.
        needed = min(common + SEGMENT_BLOCKS_MAX - 1, self.prompt_tokens // BLOCK_TOKENS)
        return common - found >= BLOCKS_WORTH_WAITING and self.kv.blocks < needed

    def resume(self, kv: SequenceKv) -> None:
        """It has room again, with what could be kept of its KV: the rest is read as known tokens are.

        Its owner closed the one before when it was suspended.
        """
        kv.cache.meter = self.kv.cache.meter
        self.kv = kv

    @property
    def is_answering(self) -> bool:
        """Whether its next step is a token of the answer, of which everything before is in the cache."""
        return self.kv.tokens >= self.prompt_tokens and self.kv.tokens == len(self.tokens) - 1

    def read(
        self,
        model: LanguageModel,
        clock: Clock,
        *,
        chunks: ChunkRule,
        device: torch.device,
        on_read: Callable[[int, int, int], None],
    ) -> Generator[None, None, list[Event]]:
        """Read the next chunk of what is known, in steps; its last token may give the first one of the answer.

        Tokens whose KV was lost are read again like a prompt, those of the answer included.

        Args:
            model, clock, chunks, device: as of the engine.
            on_read: called when the chunk was computed, with its first position, its tokens and the ns that it took.

        Yields:
            Where others may take their turn. Left there, the chunk was never begun.

        Raises:
            SlabCorruptError, SlabUnavailableError: the chunk may be read again once what cannot be read is given up.
        """
        with interrupts_deferred():
            self.kv.refresh()
        start, end = self.kv.tokens, self._chunk_end(chunks)
        self.kv.retrieval = self._retrieval if start >= self.prompt_tokens else None
        is_last = end == len(self.tokens)
        began_ns = clock.now_ns()
        with interrupts_deferred():
            self.kv.prepare(end - start)
        ids_T = torch.tensor(self.tokens[start:end], dtype=torch.int64, device=device)
        steps = model.steps(ids_T, self.kv, logits="last" if is_last else "none")
        spent_ns = 0
        while True:
            try:
                next(steps)
            except StopIteration as done:
                logits_TV: Tensor = done.value
                break
            spent_ns += clock.now_ns() - began_ns
            yield
            began_ns = clock.now_ns()
            with interrupts_deferred():
                self.kv.refresh()
            if self.kv.tokens != start:
                return []
        choice = self._sampler.choose(logits_TV[-1]) if is_last else None
        ended_ns = clock.now_ns()
        events: list[Event] = []
        spent_ns += ended_ns - began_ns
        on_read(start, end - start, spent_ns)
        if start < self.prompt_tokens and not self._token_times_ns:
            self._prefill_ns += spent_ns
            # What is read again after it was lost is no progress.
            self._read_tokens = max(self._read_tokens, end)
            events.append(self._progress())
        if choice is not None:
            events.append(self._accept(choice, ended_ns))
        return events

    def _progress(self) -> PrefillProgress:
        found = sum(self._reused_tokens.values())
        return PrefillProgress(self.id, self._read_tokens, found, self.prompt_tokens)

    def _chunk_end(self, chunks: ChunkRule) -> int:
        """Where the next chunk ends. The answer's tokens are not cut as the prompt's are."""
        start, known = self.kv.tokens, len(self.tokens)
        end = chunks.end(start, self.prompt_tokens if start < self.prompt_tokens else known)
        assert start < end <= known, "an ended sequence was stepped"
        return end

    def begin_token(self) -> None:
        """Make ready for the next token of the answer. `is_answering` may be false afterwards: a part was lost.

        Raises:
            TierFullError: there is no room for it.
        """
        with interrupts_deferred():
            self.kv.refresh()
            if self.is_answering:
                self.kv.retrieval = self._retrieval
                self.kv.prepare(1, reads_ahead=False)

    def end_token(self, logits_V: Tensor, now_ns: int, *, before: RetrievalMeter) -> TokenGenerated:
        """Choose the next token after the newest one was computed.

        Args:
            logits_V: its scores.
            now_ns: on the clock.
            before: what retrieval had read before it was.

        Raises:
            NumericsError: the scores are none.
        """
        self._attended.add(self.kv.tokens, before, self.kv.cache.meter)
        return self._accept(self._sampler.choose(logits_V), now_ns)

    def settle(self) -> None:
        """After a chunk or a token: let go of what leaves the window. Raises TierFullError: that finds no room."""
        with interrupts_deferred():
            self.kv.settle(self.tokens)

    def statistics(self) -> RequestStatistics:
        """Counts and times so far."""
        times_ns = self._token_times_ns
        return RequestStatistics(
            prompt_tokens=self.prompt_tokens,
            cached_tokens=self._reused_tokens,
            generated_tokens=len(self.tokens) - self.prompt_tokens,
            waiting_ns=self._started_ns - self.submitted_ns,
            prefill_ns=self._prefill_ns,
            time_to_first_token_ns=times_ns[0] - self.submitted_ns if times_ns else None,
            inter_token_ns=tuple(after - before for before, after in itertools.pairwise(times_ns)),
            recall=self.kv.cache.meter.recall,
            attended_fraction=self._attended.fraction,
            recomputed_tokens=self._recomputed_tokens,
        )

    def _accept(self, choice: Choice, now_ns: int) -> TokenGenerated:
        """Take the newest token into the answer, and see whether it is the last."""
        token = choice.token
        self._token_times_ns.append(now_ns)
        self.tokens.append(token)
        is_silent = token in self._silent_ids or self._stop_rule.is_end_token(token)
        text = "" if is_silent else self._detokenizer.push(token)
        self.finish_reason = self._stop_rule.check(
            token,
            generated=len(self.tokens) - self.prompt_tokens,
            stop_string_found=self._detokenizer.stopped,
        )
        if self.finish_reason is not None:
            text += self._detokenizer.finish()
        return TokenGenerated(self.id, token, text, choice.logprobs)
