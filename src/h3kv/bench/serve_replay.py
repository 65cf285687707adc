"""Chats of several users that go on from turn to turn, and requests that come as a trace recorded them."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from h3kv.bench.measure import Progress
from h3kv.bench.results import Results
from h3kv.bench.serve_client import Answer, Target
from h3kv.bench.serve_figures import PERCENTILES, output_rate, percentile, prompt_rate, put_hits, put_latencies
from h3kv.bench.serve_load import at_times, together
from h3kv.bench.serve_prompts import Conversation
from h3kv.bench.serve_trace import Scale, read_trace, scaled
from h3kv.core.units import NS_PER_MS


@dataclass(frozen=True, slots=True)
class TurnSizes:
    """Users who talk at the same time, each of whom waits for the answer before the next turn."""

    users: int
    turns: int
    first_words: int
    """About a token each."""
    words: int
    """Of each later turn."""
    answer_tokens: int


@dataclass(frozen=True, slots=True)
class TraceSizes:
    """How much of a trace is played, and how small it is made."""

    requests: int
    scale: Scale
    running_max: int
    """Requests that run together; the others wait at the driver."""


TURNS: Final = TurnSizes(6, 6, 600, 60, 64)
TURNS_QUICK: Final = TurnSizes(2, 2, 60, 10, 8)
TRACE: Final = TraceSizes(120, Scale(8, 4.0, 3072, 64), 32)
TRACE_QUICK: Final = TraceSizes(12, Scale(8, 0.25, 1024, 4), 8)
CAPS: Final = ("--device-kv", "1GiB", "--host-kv", "1GiB", "--store-capacity", "8GiB")


def multi_turn(results: Results, target: Target, *, sizes: TurnSizes, progress: Progress) -> None:
    """Put `serve.turns.*`: latencies of later turns, throughput, and where prompts were found.

    Raises:
        RequestError: the server refuses.
        PeerError: the server goes away.
    """
    progress(f"turns: {sizes.users} users of {sizes.turns} turns, {target.name}")
    by_user = asyncio.run(_talks(target, sizes))
    answers = [answer for user in by_user for answer in user]
    prefix = f"serve.turns.{target.name}"
    put_latencies(results, prefix, [answer for user in by_user for answer in user[1:]])
    _put_rates(results, prefix, answers)
    put_hits(results, prefix, answers)


def trace(
    results: Results, target: Target, path: Path, *, vocabulary: int, sizes: TraceSizes, progress: Progress
) -> None:
    """Put `serve.trace.*`: latencies, throughput, errors, and where prompts were found.

    `ttft_due` counts from when a request was due: also while it waited at the driver.

    Raises:
        ConfigError: the trace cannot be read.
    """
    timed = scaled(read_trace(path, sizes.requests), sizes.scale, vocabulary=vocabulary)
    progress(f"trace: {len(timed)} requests of {path.stem} in {timed[-1][0] / 1e9:.0f} s, {target.name}")
    outcomes = asyncio.run(at_times(target, timed, running_max=sizes.running_max))
    for said, times in Counter(str(each.error) for each in outcomes if each.error is not None).most_common(3):
        progress(f"trace: {times} times: {said}")
    answers = [outcome.answer for outcome in outcomes if outcome.answer is not None]
    prefix = f"serve.trace.{target.name}"
    results.put(f"{prefix}.errors", len(outcomes) - len(answers))
    if answers:
        put_latencies(results, prefix, answers)
        waits_ms = [wait / NS_PER_MS for each in outcomes if (wait := each.ttft_due_ns) is not None]
        for percent in PERCENTILES:
            results.put(f"{prefix}.ttft_due_ms_p{percent}", percentile(waits_ms, percent))
        _put_rates(results, prefix, answers)
        put_hits(results, prefix, answers)


async def _talks(target: Target, sizes: TurnSizes) -> list[list[Answer]]:
    async def talk(user: int) -> list[Answer]:
        conversation, answers = Conversation(user, sizes.answer_tokens), list[Answer]()
        async with target.connection() as connection:
            for turn in range(sizes.turns):
                ask = conversation.say(sizes.words if turn else sizes.first_words)
                answers.append(await target.answer(connection, ask))
                conversation.hear(answers[-1].text)
        return answers

    return await together(talk(user) for user in range(sizes.users))


def _put_rates(results: Results, prefix: str, answers: Sequence[Answer]) -> None:
    results.put(f"{prefix}.output_tokens_per_s", output_rate(answers))
    results.put(f"{prefix}.prompt_tokens_per_s", prompt_rate(answers))
