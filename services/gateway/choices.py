"""The choices of one request: several answers, as one stream of events.

All choices of a prompt begin with the same tokens. The first one goes ahead; the others follow when its first token
has come, and find the KV of their prompt.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Sequence
from typing import Final

from h3kv.api.gpu_worker.v1 import gpu_worker_service_pb2 as pb
from h3kv.rpc.call_context import CallContext
from services.gateway.worker import Worker

AT_A_TIME_MAX: Final = 16
"""Choices of one request that run at a time, so that others get their turn."""
EVENTS_HELD_MAX: Final = 64
"""Events that wait for a slow client; then the choices wait."""

Event = tuple[int, pb.GenerateResponse]
"""Index of a choice, and what happened to it."""


async def generate_choices(
    worker: Worker, prompts: Sequence[Sequence[pb.GenerateRequest]], call: CallContext
) -> AsyncGenerator[Event]:
    """Events of all choices, each up to its `finished`. Closing the generator cancels what runs.

    Args:
        worker: which computes.
        prompts: for each prompt, the requests of its choices. They are numbered in this order.
        call: id and trace of the request.

    Raises:
        H3Error: what the first choice that failed raised.
    """
    if len(prompts) == len(prompts[0]) == 1:
        async with contextlib.aclosing(worker.generate(prompts[0][0], call)) as events:
            async for event in events:
                yield 0, event
        return
    run = _Run(worker, call)
    tasks = run.begin(prompts)
    try:
        left = len(tasks)
        while left:
            index, found = await run.events.get()
            if isinstance(found, Exception):
                raise found
            left -= found.HasField("finished")
            yield index, found
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)


class _Run:
    """Choices that run at the same time."""

    def __init__(self, worker: Worker, call: CallContext) -> None:
        self.events: asyncio.Queue[tuple[int, pb.GenerateResponse | Exception]] = asyncio.Queue(EVENTS_HELD_MAX)
        self._worker = worker
        self._call = call
        self._room = asyncio.Semaphore(AT_A_TIME_MAX)

    def begin(self, prompts: Sequence[Sequence[pb.GenerateRequest]]) -> list[asyncio.Task[None]]:
        """A task for each choice, in their order."""
        tasks: list[asyncio.Task[None]] = []
        for requests in prompts:
            led = asyncio.Event()
            for place, request in enumerate(requests):
                work = self._generate(len(tasks), request, led, is_first=place == 0)
                tasks.append(asyncio.ensure_future(work))
        return tasks

    async def _generate(self, index: int, request: pb.GenerateRequest, led: asyncio.Event, *, is_first: bool) -> None:
        try:
            if not is_first:
                await led.wait()
            async with self._room, contextlib.aclosing(self._worker.generate(request, self._call)) as events:
                async for event in events:
                    if is_first and not event.HasField("progress"):
                        led.set()
                    await self.events.put((index, event))
        except Exception as error:  # noqa: BLE001  (whoever reads the events raises it)
            await self.events.put((index, error))
