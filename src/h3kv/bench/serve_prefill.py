"""Running chats beside a long prefill: what it does to their tokens, and what they do to it.

    chats     ....|-- window --|---------- while it is read ----------|-- window --|  given up
    prefill                    |sent                       first token|                        alone: |---------|

The chats' contexts grow meanwhile; the windows before and after have the same mean.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Final

from h3kv.bench.measure import Progress
from h3kv.bench.results import Results
from h3kv.bench.serve_client import Answer, Ask, Target
from h3kv.bench.serve_figures import percentile
from h3kv.bench.serve_load import one_by_one
from h3kv.bench.serve_prompts import Prompts
from h3kv.core.errors import ConfigError
from h3kv.core.units import NS_PER_MS, NS_PER_S

LOOK_S: Final = 0.02


@dataclass(frozen=True, slots=True)
class Sizes:
    """How much runs."""

    chats: int
    chat_tokens: int
    """Of their prompts."""
    answer_tokens: int
    """That they could give, more than come while the prompt is read."""
    prefill_tokens: int
    window_pieces: int
    """Of each chat, before and after."""
    caps: tuple[str, ...]
    """Flags of `h3 up`."""


FULL: Final = Sizes(4, 512, 24_000, 32_768, 150, ("--max-context", "40960", "--device-kv", "4GiB", "--host-kv", "2GiB"))
QUICK: Final = Sizes(2, 64, 3000, 2048, 10, ("--max-context", "8192", "--device-kv", "1GiB", "--host-kv", "512MiB"))


@dataclass(frozen=True, slots=True)
class Beside:
    """What was seen while chats ran."""

    without_ns: list[int]
    """Times between pieces in the two windows."""
    under_ns: list[int]
    """Those of which a part lies within the prefill."""
    prefill_ns: int
    """Time to first token of the long prompt."""


def measure(results: Results, target: Target, prompts: Prompts, *, sizes: Sizes, progress: Progress) -> None:
    """Put `serve.itl_under_prefill`, p99 over p99, `serve.prefill_kept`, speed over speed, and absolute figures.

    Raises:
        ConfigError: a chat ended before the prefill.
        RequestError: the server refuses.
        PeerError: the server goes away.
    """
    ask = Ask(prompts.tokens(sizes.prefill_tokens, "prefill", "beside"), 1)
    beside = asyncio.run(_beside_chats(target, prompts, ask, sizes=sizes, progress=progress))
    progress(f"prefill beside chats: {beside.prefill_ns / NS_PER_S:.1f} s")
    alone = asyncio.run(one_by_one(target, [Ask(prompts.tokens(sizes.prefill_tokens, "prefill", "alone"), 1)]))[0]
    progress(f"prefill alone: {alone.ttft_ns / NS_PER_S:.1f} s")
    without, under = (percentile(gaps, 99) / NS_PER_MS for gaps in (beside.without_ns, beside.under_ns))
    results.put("serve.itl_ms_p99_without_prefill", without)
    results.put("serve.itl_ms_p99_under_prefill", under)
    results.put("serve.itl_under_prefill", under / without)
    results.put("serve.prefill_alone_tokens_per_s", sizes.prefill_tokens * NS_PER_S / alone.ttft_ns)
    results.put("serve.prefill_beside_tokens_per_s", sizes.prefill_tokens * NS_PER_S / beside.prefill_ns)
    results.put("serve.prefill_kept", alone.ttft_ns / beside.prefill_ns)


async def _beside_chats(target: Target, prompts: Prompts, ask: Ask, *, sizes: Sizes, progress: Progress) -> Beside:
    chats = prompts.unshared(sizes.chats, "chats", prompt_tokens=sizes.chat_tokens, answer_tokens=sizes.answer_tokens)
    async with _running(target, chats) as running:
        progress(f"prefill: {sizes.chats} chats begin")
        await _until_all_have(running, [2 + sizes.window_pieces] * len(running))
        read = (await one_by_one(target, [ask]))[0]
        at_end = [len(answer.piece_ns) for answer in running]
        await _until_all_have(running, [pieces + 1 + sizes.window_pieces for pieces in at_end])
        times = [tuple(answer.piece_ns) for answer in running]
    # All chats have begun by then: before it, they disturb each other by their own prompts.
    begun_ns = max(each[0] for each in times)
    begin_ns, end_ns = read.sent_ns, read.sent_ns + read.ttft_ns
    without = [*gaps_within(times, begun_ns, begin_ns), *gaps_within(times, end_ns, max(map(max, times)))]
    return Beside(without, gaps_touching(times, begin_ns, end_ns), read.ttft_ns)


def gaps_within(times: Iterable[Sequence[int]], begin_ns: int, end_ns: int) -> list[int]:
    """Times between two pieces of one answer that both lie in an interval."""
    return [
        later - sooner for each in times for sooner, later in pairwise(each) if begin_ns <= sooner and later <= end_ns
    ]


def gaps_touching(times: Iterable[Sequence[int]], begin_ns: int, end_ns: int) -> list[int]:
    """Times between two pieces of one answer between which a part of an interval lies."""
    return [
        later - sooner for each in times for sooner, later in pairwise(each) if sooner < end_ns and later > begin_ns
    ]


@contextlib.asynccontextmanager
async def _running(target: Target, asks: Sequence[Ask]) -> AsyncIterator[list[Answer]]:
    """Answers that grow meanwhile, and are given up at the end."""
    answers = [Answer(0) for _ in asks]

    async def run(ask: Ask, answer: Answer) -> None:
        async with target.connection() as connection:
            await target.answer(connection, ask, answer)

    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(run(ask, answer)) for ask, answer in zip(asks, answers, strict=True)]
            yield answers
            for task in tasks:
                task.cancel()
    except ExceptionGroup as failed:
        raise failed.exceptions[0] from failed


async def _until_all_have(answers: Sequence[Answer], pieces: Sequence[int]) -> None:
    while any(len(answer.piece_ns) < wanted for answer, wanted in zip(answers, pieces, strict=True)):
        if any(answer.end_ns for answer in answers):
            raise ConfigError("a chat ended before the long prompt was read: choose another model", field="model")
        await asyncio.sleep(LOOK_S)
