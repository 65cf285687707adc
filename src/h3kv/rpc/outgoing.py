"""What happens to every call that leaves: a deadline, token and request id before it; errors of the tree after it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Self

import grpc

from h3kv.core.units import NS_PER_S
from h3kv.rpc.call_context import AUTHORIZATION, BEARER, REQUEST_ID, Metadata, new_context
from h3kv.rpc.status import from_call


@dataclass(frozen=True, slots=True)
class _Details(grpc.ClientCallDetails):
    method: str
    timeout: float | None
    metadata: Metadata | None
    credentials: grpc.CallCredentials | None
    wait_for_ready: bool | None
    compression: grpc.Compression | None


class OutgoingCalls(
    grpc.UnaryUnaryClientInterceptor,
    grpc.UnaryStreamClientInterceptor,
    grpc.StreamUnaryClientInterceptor,
    grpc.StreamStreamClientInterceptor,
):
    """Interceptor of one channel.

    Args:
        peer: address of the other side, for messages.
        token: presented with every call.
        timeout_ns: deadline of calls whose caller names none.
    """

    def __init__(self, *, peer: str, token: str | None, timeout_ns: int) -> None:
        self._peer = peer
        self._token = () if token is None else ((AUTHORIZATION, f"{BEARER}{token}"),)
        self._timeout_s = timeout_ns / NS_PER_S

    def intercept_unary_unary(self, continuation: Any, client_call_details: Any, request: Any) -> Any:
        """See grpc.UnaryUnaryClientInterceptor."""
        return MappedCall(continuation(self._prepared(client_call_details), request), self._peer)

    def intercept_unary_stream(self, continuation: Any, client_call_details: Any, request: Any) -> Any:
        """See grpc.UnaryStreamClientInterceptor."""
        return MappedStream(continuation(self._prepared(client_call_details), request), self._peer)

    def intercept_stream_unary(self, continuation: Any, client_call_details: Any, request_iterator: Any) -> Any:
        """See grpc.StreamUnaryClientInterceptor."""
        return MappedCall(continuation(self._prepared(client_call_details), request_iterator), self._peer)

    def intercept_stream_stream(self, continuation: Any, client_call_details: Any, request_iterator: Any) -> Any:
        """See grpc.StreamStreamClientInterceptor."""
        return MappedStream(continuation(self._prepared(client_call_details), request_iterator), self._peer)

    def _prepared(self, details: Any) -> _Details:
        given: Metadata = tuple(details.metadata or ())
        named = () if any(key == REQUEST_ID for key, _ in given) else new_context().metadata
        return _Details(
            method=details.method,
            timeout=self._timeout_s if details.timeout is None else details.timeout,
            metadata=(*given, *named, *self._token),
            credentials=details.credentials,
            wait_for_ready=details.wait_for_ready,
            compression=details.compression,
        )


class MappedCall:
    """A call with one answer. Everything but its errors is gRPC's."""

    def __init__(self, call: Any, peer: str) -> None:
        self._call = call
        self._peer = peer

    def result(self, timeout: float | None = None) -> Any:
        """The answer. Raises an error of the tree."""
        try:
            return self._call.result(timeout)
        except grpc.RpcError as error:
            raise from_call(error, peer=self._peer) from error

    def exception(self, timeout: float | None = None) -> Exception | None:
        """What `result` would raise."""
        error = self._call.exception(timeout)
        return from_call(error, peer=self._peer) if isinstance(error, grpc.RpcError) else error

    def add_done_callback(self, callback: Callable[[Self], None]) -> None:
        """Call back with this object when it has ended."""
        self._call.add_done_callback(lambda _: callback(self))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._call, name)


class MappedStream:
    """A call with many answers. Everything but its errors is gRPC's."""

    def __init__(self, call: Any, peer: str) -> None:
        self._call = call
        self._peer = peer
        self._is_cancelled = False

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        try:
            return next(self._call)
        except grpc.RpcError as error:
            if self._is_cancelled and error.code() is grpc.StatusCode.CANCELLED:
                raise StopIteration from None
            raise from_call(error, peer=self._peer) from error

    def cancel(self) -> bool:
        """Give it up: the iteration ends."""
        self._is_cancelled = True
        cancelled: bool = self._call.cancel()
        return cancelled

    def __getattr__(self, name: str) -> Any:
        return getattr(self._call, name)
