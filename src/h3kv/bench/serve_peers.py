"""Eight chats at once, and questions to a document: a node against vLLM behind its own server, and in one process."""

from __future__ import annotations

import asyncio
import contextlib
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from h3kv.bench.contestants import PeerContestant
from h3kv.bench.measure import Progress, Rounds, turns
from h3kv.bench.results import Results
from h3kv.bench.serve_client import Answer, Target
from h3kv.bench.serve_figures import output_rate, put_hits, put_latencies
from h3kv.bench.serve_load import all_at_once, one_by_one
from h3kv.bench.serve_prompts import Prompts
from h3kv.core.errors import ConfigError
from h3kv.core.types import DType
from h3kv.core.units import NS_PER_S

H3: Final = "h3"


@dataclass(frozen=True, slots=True)
class ChatSizes:
    """Chats that run together, of which no two begin alike."""

    chats: int
    prompt_tokens: int
    answer_tokens: int
    rounds: int


@dataclass(frozen=True, slots=True)
class DocumentSizes:
    """Questions to one document, each of which waits for the answer to the one before."""

    questions: int
    document_tokens: int
    question_tokens: int
    answer_tokens: int
    rounds: int


CHATS: Final = ChatSizes(8, 2048, 128, 3)
CHATS_QUICK: Final = ChatSizes(4, 256, 16, 1)
DOCUMENT: Final = DocumentSizes(10, 7936, 32, 16, 3)
DOCUMENT_QUICK: Final = DocumentSizes(4, 1024, 32, 4, 1)
CONTEXT_TOKENS: Final = 8192
"""Of the longest request of all that is asked here."""


class OfflineVllm(PeerContestant):
    """vLLM in a process of its own that is given all prompts at once: no HTTP, no driver beside it."""

    def __init__(self, python: str, folder: Path) -> None:
        super().__init__(python, "vllm_offline.py", folder, dtype=DType.BF16, context_tokens=CONTEXT_TOKENS)

    def output_rate(self, prompts: Sequence[Sequence[int]], *, answer_tokens: int) -> float:
        """Answer tokens per second of all prompts together."""
        question = {"command": "batch", "prompts": [list(prompt) for prompt in prompts], "tokens": answer_tokens}
        return len(prompts) * answer_tokens / float(self._ask(question)["seconds"])


@contextlib.contextmanager
def offline_vllm(python: str, folder: Path) -> Iterator[OfflineVllm]:
    """It, closed at the end."""
    with contextlib.closing(OfflineVllm(python, folder)) as offline:
        yield offline


def warm(targets: Sequence[Target], prompts: Prompts) -> None:
    """Have each server read and answer a little: memory is touched for the first time then."""
    for target in targets:
        with target.awake():
            asyncio.run(all_at_once(target, prompts.unshared(2, "warm", prompt_tokens=256, answer_tokens=8)))


def chats(
    results: Results, targets: Sequence[Target], prompts: Prompts, *, sizes: ChatSizes, progress: Progress
) -> None:
    """Put `serve.chat8.*`: each target's output rate and latencies, and the node's rate over the better vLLM.

    Raises:
        ConfigError: an answer is shorter than was asked for: the server cannot go on behind the end of a text.
        RequestError: a server refuses.
        PeerError: a server goes away.
    """
    rounds, answers = Rounds(), {target.name: list[Answer]() for target in targets}
    for repetition in range(sizes.rounds):
        asks = prompts.unshared(
            sizes.chats, "chat8", repetition, prompt_tokens=sizes.prompt_tokens, answer_tokens=sizes.answer_tokens
        )
        for target in turns(targets, repetition):
            with target.awake():
                said = asyncio.run(all_at_once(target, asks))
            _check_lengths(target, said, sizes.answer_tokens)
            rounds.add(target.name, output_rate(said))
            answers[target.name] += said
            progress(f"{sizes.chats} chats, {target.name}: {output_rate(said):.1f} tokens/s")
    for target in targets:
        results.put(f"serve.chat8.{target.name}_tokens_per_s", rounds.median(target.name))
        put_latencies(results, f"serve.chat8.{target.name}", answers[target.name])
    peers = [target.name for target in targets if target.name != H3]
    if peers and H3 in rounds.values:
        results.put("serve.chat8.vs_vllm", rounds.ratio(H3, max(peers, key=rounds.median)))


def offline_chats(
    results: Results, offline: OfflineVllm, prompts: Prompts, *, sizes: ChatSizes, progress: Progress
) -> None:
    """Put `serve.chat8.vllm_offline_tokens_per_s`, of the same prompts."""
    rates = []
    for repetition in range(sizes.rounds):
        asks = prompts.unshared(
            sizes.chats, "chat8", repetition, prompt_tokens=sizes.prompt_tokens, answer_tokens=sizes.answer_tokens
        )
        texts = [tuple(token for token in ask.prompt if isinstance(token, int)) for ask in asks]
        rates.append(offline.output_rate(texts, answer_tokens=sizes.answer_tokens))
        progress(f"{sizes.chats} chats, vLLM in one process: {rates[-1]:.1f} tokens/s")
    results.put("serve.chat8.vllm_offline_tokens_per_s", statistics.median(rates))


def document(
    results: Results, targets: Sequence[Target], prompts: Prompts, *, sizes: DocumentSizes, progress: Progress
) -> None:
    """Put `serve.docqa.*`: the mean time to first token of later questions, over the first's and over vLLM's.

    Raises:
        RequestError: a server refuses.
        PeerError: a server goes away.
    """
    first, later, answers = Rounds(), Rounds(), {target.name: list[Answer]() for target in targets}
    for repetition in range(sizes.rounds):
        asks = prompts.questions(
            sizes.questions,
            "docqa",
            repetition,
            document=sizes.document_tokens,
            question=sizes.question_tokens,
            answer=sizes.answer_tokens,
        )
        for target in turns(targets, repetition):
            with target.awake():
                said = asyncio.run(one_by_one(target, asks))
            first.add(target.name, said[0].ttft_ns / NS_PER_S)
            later.add(target.name, statistics.mean(answer.ttft_ns for answer in said[1:]) / NS_PER_S)
            answers[target.name] += said
            progress(
                f"document, {target.name}: first {first.values[target.name][-1]:.2f} s, "
                f"later {later.values[target.name][-1]:.3f} s"
            )
    for target in targets:
        prefix = f"serve.docqa.{target.name}"
        results.put(f"{prefix}_ttft_first_s", first.median(target.name))
        results.put(f"{prefix}_ttft_later_s", later.median(target.name))
        pairs = zip(later.values[target.name], first.values[target.name], strict=True)
        fraction = statistics.median(rest / begin for rest, begin in pairs)
        results.put("serve.docqa.ttft_fraction" if target.name == H3 else f"{prefix}_ttft_fraction", fraction)
        put_hits(results, prefix, answers[target.name])
    peers = [target.name for target in targets if target.name != H3]
    if peers and H3 in later.values:
        results.put("serve.docqa.vs_vllm", later.ratio(H3, min(peers, key=later.median)))


def _check_lengths(target: Target, answers: Sequence[Answer], wanted: int) -> None:
    short = [answer for answer in answers if answer.answer_tokens != wanted]
    if short and target.ignores_eos:
        raise ConfigError(
            f"{target.name} gave {short[0].answer_tokens} tokens where {wanted} were asked for: rates would not be "
            "comparable; choose a model whose answers go on",
            field="model",
        )
