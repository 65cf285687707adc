import asyncio
from pathlib import Path
from typing import Any

import pytest
from starlette.requests import Request
from starlette.types import Message

from h3kv.api.gpu_worker.v1 import gpu_worker_service_pb2 as pb
from h3kv.core.errors import QuotaError
from h3kv.core.units import NS_PER_S
from h3kv.rpc.addresses import UnixAddress
from h3kv.rpc.async_client import AsyncPeerChannel
from h3kv.rpc.call_context import new_context
from services.gateway.metrics import CALL
from services.gateway.requests import BodyBounds
from services.gateway.tokens import AT_A_TIME_MAX, TokenCounter
from services.gateway.worker import Worker


def waiting(opened: asyncio.Event) -> Request:
    """A request whose client goes when an event is set."""

    async def receive() -> Message:
        await opened.wait()
        return {"type": "http.disconnect"}

    headers = [(b"content-type", b"application/json")]
    scope: dict[str, Any] = {"type": "http", "method": "POST", "path": "/tokenize", "headers": headers}
    scope[CALL] = new_context()
    return Request(scope, receive)


def test_a_tenant_has_few_prompts_counted_at_a_time_and_leaves_others_alone(tmp_path: Path) -> None:
    first, other = pb.Tenant(name="a"), pb.Tenant(name="b")

    async def ask() -> None:
        opened, bounds = asyncio.Event(), BodyBounds(1024, 60 * NS_PER_S, "http.body_max")
        async with AsyncPeerChannel(UnixAddress(tmp_path / "worker.sock")) as channel:
            counter = TokenCounter(Worker(channel, answer_ns=NS_PER_S), bounds)
            tasks = [asyncio.ensure_future(counter.count(waiting(opened), first)) for _ in range(AT_A_TIME_MAX)]
            await asyncio.sleep(0)
            with pytest.raises(QuotaError) as caught:
                await counter.count(waiting(opened), first)
            assert caught.value.retry_after_s == 1
            tasks.append(asyncio.ensure_future(counter.count(waiting(opened), other)))
            await asyncio.sleep(0)
            assert not tasks[-1].done()
            opened.set()
            await asyncio.wait(tasks)
            tasks.append(asyncio.ensure_future(counter.count(waiting(opened), first)))
            await asyncio.wait(tasks)
            assert not any(isinstance(task.exception(), QuotaError) for task in tasks)

    asyncio.run(ask())
