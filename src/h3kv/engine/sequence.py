"""One request while it runs: a prompt that is read in chunks, then an answer that grows by tokens.

Shapes: T tokens of a chunk, V vocabulary.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import Literal, Protocol

import torch
from torch import Tensor

from h3kv.core.ports import Clock
from h3kv.core.retrieval import RetrievalSetting
from h3kv.engine.detokenizer import Detokenizer
from h3kv.engine.events import Event, PrefillProgress, RequestStatistics, TokenGenerated
from h3kv.engine.interrupts import interrupts_deferred
from h3kv.engine.request import Request, RequestId
from h3kv.engine.sampling import Sampler
from h3kv.engine.sequence_kv import SequenceKv
from h3kv.engine.stopping import FinishReason, StopRule
from h3kv.models.config import ModelConfig
from h3kv.models.decoder import KvCache
from h3kv.policy.chunking import chunk_end


class LanguageModel(Protocol):
    """What the engine needs of `models.decoder.Decoder`."""

    @property
    def config(self) -> ModelConfig:
        """Sizes and limits."""
        ...

    def forward(self, token_ids_T: Tensor, cache: KvCache, *, logits: Literal["last", "all", "none"]) -> Tensor:
        """See `Decoder.forward`."""
        ...


class Vocabulary(Protocol):
    """What the engine needs of `models.tokenizer.Tokenizer`."""

    @property
    def eos_ids(self) -> frozenset[int]:
        """Tokens with which the model ends a text."""
        ...

    def token_bytes(self, token: int) -> bytes:
        """UTF-8 bytes of a token, perhaps parts of characters."""
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
    """Advances by one chunk or one token at a time. Its owner closes `kv` when it ended.

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
        self.kv = kv
        self.tokens = list(request.prompt)
        self.finish_reason: FinishReason | None = None
        self.losses = 0
        self.prompt_tokens = len(request.prompt)
        self._retrieval = retrieval
        self._cached_tokens = sum(kv.reused_tokens.values())
        self._sampler = Sampler(request.sampling)
        self._stop_rule = StopRule(request.sampling, vocabulary.eos_ids)
        self._detokenizer = Detokenizer(vocabulary.token_bytes, request.sampling.stop)
        self._submitted_ns = submitted_ns
        self._started_ns = started_ns
        self._prefill_ns = 0
        self._token_times_ns: list[int] = []

    def step(self, model: LanguageModel, clock: Clock, *, chunks: ChunkRule, device: torch.device) -> list[Event]:
        """Read the next chunk of what is known, or generate the next token.

        Tokens whose KV was lost are read again like a prompt, those of the answer included.

        Raises:
            SlabCorruptError, SlabUnavailableError: a part of the KV cannot be read. The step may be taken again once
                that part is given up.
        """
        with interrupts_deferred():
            self.kv.refresh()
        start, known = self.kv.tokens, len(self.tokens)
        end = (
            chunks.end(start, self.prompt_tokens)
            if start < self.prompt_tokens
            else min(known, chunks.end(start, known))
        )
        self.kv.retrieval = self._retrieval if start >= self.prompt_tokens else None
        is_last = end == known
        assert start < end <= known, "an ended sequence was stepped"
        began_ns = clock.now_ns()
        with interrupts_deferred():
            self.kv.prepare(end - start)
        ids_T = torch.tensor(self.tokens[start:end], dtype=torch.int64, device=device)
        logits = model.forward(ids_T, self.kv, logits="last" if is_last else "none")
        token = self._sampler.choose(logits[-1]) if is_last else None
        ended_ns = clock.now_ns()
        with interrupts_deferred():
            self.kv.settle(self.tokens)
        events: list[Event] = []
        if start < self.prompt_tokens:
            self._prefill_ns += ended_ns - began_ns
            events.append(PrefillProgress(self.id, end, self._cached_tokens, self.prompt_tokens))
        if token is not None:
            self._token_times_ns.append(ended_ns)
            events.append(self._accept(token))
        return events

    def statistics(self) -> RequestStatistics:
        """Counts and times so far."""
        times_ns = self._token_times_ns
        return RequestStatistics(
            prompt_tokens=self.prompt_tokens,
            cached_tokens=self.kv.reused_tokens,
            generated_tokens=len(self.tokens) - self.prompt_tokens,
            waiting_ns=self._started_ns - self._submitted_ns,
            prefill_ns=self._prefill_ns,
            time_to_first_token_ns=times_ns[0] - self._submitted_ns if times_ns else None,
            inter_token_ns=tuple(after - before for before, after in itertools.pairwise(times_ns)),
            recall=self.kv.cache.meter.recall,
        )

    def _accept(self, token: int) -> TokenGenerated:
        """Take the newest token into the answer, and see whether it is the last."""
        self.tokens.append(token)
        text = "" if self._stop_rule.is_end_token(token) else self._detokenizer.push(token)
        self.finish_reason = self._stop_rule.check(
            token,
            generated=len(self.tokens) - self.prompt_tokens,
            stop_string_found=self._detokenizer.stopped,
        )
        if self.finish_reason is not None:
            text += self._detokenizer.finish()
        return TokenGenerated(self.id, token, text)
