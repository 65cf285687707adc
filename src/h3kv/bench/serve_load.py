"""Ways in which requests come: all at once, one after another, over a few connections, or at given times."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TypeVar

from h3kv.bench.serve_client import Answer, Ask, Target
from h3kv.core.errors import H3Error
from h3kv.core.units import NS_PER_S

Found = TypeVar("Found")


async def together(works: Iterable[Coroutine[object, object, Found]]) -> list[Found]:
    """What several pieces of work give back, in their order, once all have ended. Raises what the first one raised that
    failed; the others are cancelled then.
    """
    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(work) for work in works]
    except ExceptionGroup as failed:
        raise failed.exceptions[0] from failed
    return [task.result() for task in tasks]


async def all_at_once(target: Target, asks: Sequence[Ask]) -> list[Answer]:
    """The answers in the order of the requests, which were sent together, each on a connection of its own.

    Raises:
        H3Error: one of them failed; the others are given up.
    """
    return await together(_alone(target, ask) for ask in asks)


async def one_by_one(target: Target, asks: Iterable[Ask]) -> list[Answer]:
    """The answers of requests of which each waits for the one before.

    Raises:
        H3Error: one of them failed.
    """
    async with target.connection() as connection:
        return [await target.answer(connection, ask) for ask in asks]


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of one request."""

    answer: Answer | None
    """None: it failed."""
    error: H3Error | None
    due_ns: int
    """When it should have been sent, by `time.perf_counter_ns`."""

    @property
    def ttft_due_ns(self) -> int | None:
        """From when it was due to its first piece: what a user waits who cannot wait to ask. None: it failed."""
        return None if self.answer is None else self.answer.sent_ns + self.answer.ttft_ns - self.due_ns


async def over_connections(
    target: Target,
    asks: Iterator[Ask],
    *,
    connections: int,
    check: Callable[[Ask, Answer], None] = lambda *_: None,
) -> list[H3Error]:
    """Have requests answered over so many connections, each of which takes the next one when it is free.

    Args:
        target: who answers.
        asks: taken from while there are some.
        connections: that are open together.
        check: raises H3Error for an answer that is as bad as none.

    Returns:
        The errors; a request that failed is not asked again.
    """
    errors: list[H3Error] = []

    async def work() -> None:
        async with target.connection() as connection:
            for ask in asks:
                try:
                    check(ask, await target.answer(connection, ask))
                except H3Error as error:
                    errors.append(error)

    await together(work() for _ in range(connections))
    return errors


async def at_times(target: Target, timed: Sequence[tuple[int, Ask]], *, running_max: int) -> list[Outcome]:
    """Send requests at their times, whatever became of those before.

    Args:
        target: who answers.
        timed: nanoseconds after the first one, in rising order, and requests.
        running_max: further ones wait until one of these has its answer.

    Returns:
        What became of each, in their order. An answer's own times count from when it was really sent.
    """
    room = asyncio.Semaphore(running_max)
    begin_ns = time.perf_counter_ns()

    async def play(due_ns: int, ask: Ask) -> Outcome:
        await asyncio.sleep(max(begin_ns + due_ns - time.perf_counter_ns(), 0) / NS_PER_S)
        async with room:
            try:
                return Outcome(await _alone(target, ask), None, begin_ns + due_ns)
            except H3Error as error:
                return Outcome(None, error, begin_ns + due_ns)

    return await together(play(due_ns, ask) for due_ns, ask in timed)


async def _alone(target: Target, ask: Ask) -> Answer:
    async with target.connection() as connection:
        return await target.answer(connection, ask)
