"""The choices of one request: several answers, as one stream of events.

They are admitted together before any of them runs, with each prompt counted once: nobody pays for a request that is
refused half-way. All choices of a prompt begin with the same tokens. The first one goes ahead; the others follow when
its first token has come, and find the KV of their prompt.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator
from typing import Final

from h3kv.api.gpu_worker.v1 import gpu_worker_service_pb2 as pb
from h3kv.rpc.call_context import CallContext
from services.gateway.openai import Asked
from services.gateway.worker import Worker

EVENTS_HELD_MAX: Final = 64
"""Events that wait for a slow client; then the choices wait."""

Event = tuple[int, pb.GenerateResponse]
"""Index of a choice, and what happened to it."""


async def generate_choices(worker: Worker, asked: Asked, call: CallContext) -> AsyncGenerator[Event]:
    """Events of all choices, each up to its `finished`. Closing the generator cancels what runs.

    Args:
        worker: which computes.
        asked: prompts, and how each is to be answered.
        call: id and trace of the request.

    Raises:
        PeerTimeoutError: all of them together took longer than a request may.
        H3Error: what the first choice that failed raised.
    """
    deadline_ns = worker.deadline_ns()
    if asked.count == 1:
        request = asked.prompts[0]
        request.sampling.CopyFrom(asked.sampling)
        async with contextlib.aclosing(worker.generate(request, call, deadline_ns=deadline_ns)) as events:
            async for event in events:
                yield 0, event
        return
    length = asked.sampling.max_new_tokens if asked.sampling.HasField("max_new_tokens") else None
    together = pb.AdmitRequest(
        prompts=asked.prompts, answers=asked.choices, max_new_tokens=length, tenant=asked.prompts[0].tenant
    )
    async with worker.admitted(together, call, deadline_ns=deadline_ns) as admission:
        run = _Run(worker, call, asked, admission=admission, deadline_ns=deadline_ns)
        tasks = run.begin()
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
    """Choices that run at the same time.

    Args:
        worker: which computes.
        call: id and trace of the request.
        asked: for all of them.
        admission: under which gpu_worker has their prompts.
        deadline_ns: for all of them.
    """

    def __init__(
        self, worker: Worker, call: CallContext, asked: Asked, *, admission: pb.AdmitResponse, deadline_ns: int
    ) -> None:
        self.events: asyncio.Queue[tuple[int, pb.GenerateResponse | Exception]] = asyncio.Queue(EVENTS_HELD_MAX)
        self._worker = worker
        self._call = call
        self._asked = asked
        self._admission = admission
        self._deadline_ns = deadline_ns
        self._room = asyncio.Semaphore(max(admission.answers_at_a_time, 1))

    def begin(self) -> list[asyncio.Task[None]]:
        """A task for each choice, in their order."""
        tasks: list[asyncio.Task[None]] = []
        for prompt in range(len(self._asked.prompts)):
            led = asyncio.Event()
            for place in range(self._asked.choices):
                tasks.append(asyncio.ensure_future(self._generate(len(tasks), prompt, led, place=place)))
        return tasks

    async def _generate(self, index: int, prompt: int, led: asyncio.Event, *, place: int) -> None:
        try:
            if place:
                await led.wait()
            async with self._room, contextlib.aclosing(self._events(prompt, place)) as events:
                async for event in events:
                    if not event.HasField("progress"):
                        led.set()
                    await self.events.put((index, event))
        except Exception as error:  # noqa: BLE001  (whoever reads the events raises it)
            await self.events.put((index, error))

    def _events(self, prompt: int, place: int) -> AsyncGenerator[pb.GenerateResponse]:
        request = pb.GenerateRequest(
            admitted=pb.AdmittedPrompt(id=self._admission.id, prompt=prompt),
            sampling=self._asked.sampling_of(place),
            tenant=self._asked.prompts[prompt].tenant,
        )
        return self._worker.generate(request, self._call, deadline_ns=self._deadline_ns)
