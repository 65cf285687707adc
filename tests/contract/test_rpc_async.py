"""Calls from asyncio: errors of the tree, deadlines, ids and tokens, as with threads."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import grpc
import pytest
from tests.contract.rpc_loopback import Loopback, serving

from h3kv.api.nvme_io.v1 import nvme_io_service_pb2 as nvme
from h3kv.api.nvme_io.v1 import nvme_io_service_pb2_grpc as nvme_grpc
from h3kv.core.errors import AccessDeniedError, ConfigError, PeerTimeoutError, PeerUnavailableError, TierFullError
from h3kv.core.types import Tier
from h3kv.core.units import NS_PER_MS, NS_PER_S
from h3kv.rpc.addresses import TcpAddress, UnixAddress
from h3kv.rpc.async_client import AsyncPeerChannel
from h3kv.rpc.call_context import CallContext, read_context
from h3kv.rpc.credentials import Credentials
from h3kv.rpc.server import ServerConfig

CONTEXT = CallContext("request-1", f"00-{'1' * 32}-{'2' * 16}-01")
TOKEN = "0123456789abcdef" * 2

Work = Callable[[Loopback, AsyncPeerChannel, Any], Awaitable[None]]


def run(folder: Path, work: Work, *, credentials: Credentials | None = None) -> None:
    """A server on a thread, a channel on a loop."""
    address = UnixAddress(folder / "h3.sock")

    async def connected() -> None:
        async with AsyncPeerChannel(address, credentials=Credentials(TOKEN)) as channel:
            await work(loopback, channel, channel.stub(nvme_grpc.NvmeIoServiceStub))

    with serving(ServerConfig(address, credentials=credentials or Credentials(TOKEN))) as loopback:
        asyncio.run(connected())


def test_call_carries_id_trace_and_token(tmp_path: Path) -> None:
    seen: list[CallContext] = []

    async def work(loopback: Loopback, channel: AsyncPeerChannel, stub: Any) -> None:
        loopback.nvme_io.script = lambda context: seen.append(read_context(context.invocation_metadata()))
        answer = await channel.call(stub.GetStatistics, nvme.GetStatisticsRequest(), context=CONTEXT)
        assert answer == nvme.GetStatisticsResponse()

    run(tmp_path, work)
    assert seen == [CONTEXT]


def test_wrong_token_is_refused(tmp_path: Path) -> None:
    async def work(_: Loopback, channel: AsyncPeerChannel, stub: Any) -> None:
        with pytest.raises(AccessDeniedError):
            await channel.call(stub.GetStatistics, nvme.GetStatisticsRequest(), context=CONTEXT)

    run(tmp_path, work, credentials=Credentials(TOKEN[::-1]))


def test_errors_come_back_as_they_were_raised(tmp_path: Path) -> None:
    def fail(_: grpc.ServicerContext) -> None:
        raise TierFullError("HOST is full: demote something", tier=Tier.HOST, needed_bytes=9, free_bytes=8)

    async def work(loopback: Loopback, channel: AsyncPeerChannel, stub: Any) -> None:
        loopback.nvme_io.script = fail
        with pytest.raises(TierFullError, match="demote something") as caught:
            await channel.call(stub.GetStatistics, nvme.GetStatisticsRequest(), context=CONTEXT)
        assert (caught.value.tier, caught.value.needed_bytes) == (Tier.HOST, 9)
        stream = channel.stream(stub.WatchMoves, nvme.WatchMovesRequest(), context=CONTEXT)
        assert (await anext(stream)).event == 1
        with pytest.raises(TierFullError):
            await anext(stream)

    run(tmp_path, work)


def test_calls_that_run_when_the_channel_closes_can_be_repeated(tmp_path: Path) -> None:
    async def work(loopback: Loopback, channel: AsyncPeerChannel, stub: Any) -> None:
        loopback.nvme_io.script = lambda _: loopback.nvme_io.watch_ended.wait(30)
        stream = channel.stream(stub.WatchMoves, nvme.WatchMovesRequest(), context=CONTEXT)
        assert (await anext(stream)).event == 1
        call = channel.call(stub.GetStatistics, nvme.GetStatisticsRequest(), context=CONTEXT)
        running = [asyncio.ensure_future(anext(stream)), asyncio.ensure_future(call)]
        await asyncio.sleep(0.1)
        await channel.close()
        for ended in await asyncio.gather(*running, return_exceptions=True):
            assert isinstance(ended, PeerUnavailableError)
        with pytest.raises(PeerUnavailableError, match="ask again later"):
            await channel.call(stub.GetStatistics, nvme.GetStatisticsRequest(), context=CONTEXT)
        loopback.nvme_io.watch_ended.set()

    run(tmp_path, work)


def test_deadline_that_passes_is_a_timeout(tmp_path: Path) -> None:
    async def work(loopback: Loopback, channel: AsyncPeerChannel, stub: Any) -> None:
        loopback.nvme_io.script = lambda _: loopback.nvme_io.watch_ended.wait(30)
        call = channel.call(
            stub.GetStatistics, nvme.GetStatisticsRequest(), context=CONTEXT, timeout_ns=100 * NS_PER_MS
        )
        with pytest.raises(PeerTimeoutError):
            await call
        loopback.nvme_io.watch_ended.set()
        with pytest.raises(PeerTimeoutError, match="no time is left"):
            await channel.call(stub.GetStatistics, nvme.GetStatisticsRequest(), context=CONTEXT, timeout_ns=0)

    run(tmp_path, work)


def test_stream_that_is_closed_is_cancelled(tmp_path: Path) -> None:
    async def work(loopback: Loopback, channel: AsyncPeerChannel, stub: Any) -> None:
        def wait_for_the_caller(context: grpc.ServicerContext) -> None:
            context.add_callback(loopback.nvme_io.watch_ended.set)
            loopback.nvme_io.watch_ended.wait(30)

        loopback.nvme_io.script = wait_for_the_caller
        stream = channel.stream(stub.WatchMoves, nvme.WatchMovesRequest(), context=CONTEXT, timeout_ns=30 * NS_PER_S)
        async with contextlib.aclosing(stream):
            await anext(stream)
        assert await asyncio.to_thread(loopback.nvme_io.watch_ended.wait, 30)

    run(tmp_path, work)


def test_peer_that_is_not_there_is_named(tmp_path: Path) -> None:
    address = UnixAddress(tmp_path / "nobody.sock")

    async def work() -> None:
        async with AsyncPeerChannel(address) as channel:
            stub: Any = channel.stub(nvme_grpc.NvmeIoServiceStub)
            with pytest.raises(PeerUnavailableError, match="nobody"):
                await channel.call(stub.GetStatistics, nvme.GetStatisticsRequest(), context=CONTEXT)

    asyncio.run(work())


def test_port_without_credentials_is_refused() -> None:
    with pytest.raises(ConfigError, match="a port needs a token"):
        AsyncPeerChannel(TcpAddress("127.0.0.1", 1))
