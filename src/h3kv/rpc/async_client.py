"""A channel to a process of ours from a program on asyncio: as `rpc.client`, without a thread for each call."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable
from typing import Any, Final, Self, TypeVar, cast

import grpc
import grpc.aio

from h3kv.core.errors import H3Error, PeerCancelledError, PeerTimeoutError, PeerUnavailableError
from h3kv.core.units import NS_PER_S
from h3kv.rpc.addresses import Address, UnixAddress
from h3kv.rpc.call_context import AUTHORIZATION, BEARER, CallContext
from h3kv.rpc.client import DEFAULTS, ChannelConfig
from h3kv.rpc.credentials import NO_CREDENTIALS, Credentials, channel_credentials, check_protected
from h3kv.rpc.options import channel_options
from h3kv.rpc.status import from_call

StubT = TypeVar("StubT")

SETTING: Final = "address"
"""What messages call the peer's address."""


class AsyncPeerChannel:
    """Connects when it is first used, and again after its peer came back. For one event loop, which runs already.

    Calls go through `call` and `stream`, which give them a deadline, a token and an id, and raise errors of the tree.
    """

    def __init__(
        self,
        address: Address,
        *,
        credentials: Credentials = NO_CREDENTIALS,
        config: ChannelConfig = DEFAULTS,
    ) -> None:
        check_protected(address, credentials, setting=SETTING)
        options = channel_options(config.message_bytes_max)
        if credentials.tls is None or isinstance(address, UnixAddress):
            self._channel = grpc.aio.insecure_channel(address.target, options)
        else:
            secure = channel_credentials(credentials.tls, setting=SETTING)
            self._channel = grpc.aio.secure_channel(address.target, secure, options)
        self.address = address
        self._config = config
        self._is_closed = False
        token = credentials.token
        self._token = () if token is None else ((AUTHORIZATION, f"{BEARER}{token}"),)

    def stub(self, kind: Callable[[grpc.Channel], StubT]) -> StubT:
        """A stub of a generated class. Its methods are for `call` and `stream` alone."""
        return kind(cast("grpc.Channel", self._channel))

    async def call(self, method: Any, request: Any, *, context: CallContext, timeout_ns: int | None = None) -> Any:
        """The answer of a call with one.

        Args:
            method: of a stub.
            request: its message.
            context: id and trace that travel with it.
            timeout_ns: after which it is given up; the channel's default where None.

        Raises:
            H3Error: as the peer raised it, or because it cannot be reached.
        """
        running: Awaitable[Any] = self._begin(method, request, context, timeout_ns)
        try:
            return await running
        except grpc.RpcError as error:
            raise self._error(error) from error
        except asyncio.CancelledError:
            self._check_open()
            raise

    async def stream(
        self, method: Any, request: Any, *, context: CallContext, timeout_ns: int | None = None
    ) -> AsyncGenerator[Any]:
        """The answers of a call with many. Closing the generator gives the call up; arguments and errors as `call`."""
        running = self._begin(method, request, context, timeout_ns)
        try:
            async for answer in running:
                yield answer
        except grpc.RpcError as error:
            raise self._error(error) from error
        except asyncio.CancelledError:
            self._check_open()
            raise
        finally:
            running.cancel()

    async def close(self) -> None:
        """End the connection; calls that run and later ones raise PeerUnavailableError. Again, it does nothing."""
        self._is_closed = True
        await self._channel.close()

    def _check_open(self) -> None:
        """Raise PeerUnavailableError for a call that ended since we end."""
        if self._is_closed:
            raise PeerUnavailableError(
                f"the channel to {self.address} is closed, since this process ends: ask again later",
                peer=str(self.address),
            )

    def _error(self, error: grpc.RpcError) -> H3Error:
        """What a call ended with. What we give up ourselves does not come here: then it was the peer, as it ended."""
        found = from_call(error, peer=str(self.address))
        if isinstance(found, PeerCancelledError):
            return PeerUnavailableError(f"{self.address} ended the call as it ended itself", peer=str(self.address))
        return found

    def _begin(self, method: Any, request: Any, context: CallContext, timeout_ns: int | None) -> Any:
        limit_ns = self._config.timeout_ns if timeout_ns is None else timeout_ns
        if limit_ns <= 0:
            raise PeerTimeoutError("no time is left for the call: give it more", peer=str(self.address))
        self._check_open()
        return method(request, timeout=limit_ns / NS_PER_S, metadata=(*context.metadata, *self._token))

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()
