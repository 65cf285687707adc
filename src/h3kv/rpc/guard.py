"""What happens to every call before and after its handler.

    message -> token -> deadline -> handler -> answer
                 |         |          |
                 +---------+----------+-----> status of the error tree

Health checks pass untouched: probes carry neither token nor reason.
"""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Final

import grpc
from google.protobuf.message import DecodeError

from h3kv.core.errors import AccessDeniedError, H3Error, PeerCancelledError, RequestError
from h3kv.core.units import NS_PER_S
from h3kv.rpc.call_context import read_context, read_token_of
from h3kv.rpc.credentials import token_matches
from h3kv.rpc.options import DEADLINE_NS_MAX
from h3kv.rpc.status import to_status

HEALTH: Final = "/grpc.health.v1.Health/"
REFLECTION: Final = "/grpc.reflection."

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _Malformed:
    """Stands for bytes that are no message."""

    error: str


class CallGuard(grpc.ServerInterceptor):
    """Refuses calls without deadline or with a wrong token, and turns what handlers raise into a status.

    Args:
        token: what callers must present; None where the socket's mode or a certificate says enough.
    """

    def __init__(self, token: str | None) -> None:
        self._token = token
        self._running = 0
        self._changed = threading.Condition()

    def wait_until_idle(self, timeout_ns: int) -> bool:
        """Wait so long for all handlers to end. Returns whether they have."""
        with self._changed:
            return self._changed.wait_for(lambda: self._running == 0, timeout_ns / NS_PER_S)

    def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], grpc.RpcMethodHandler[Any, Any] | None],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> grpc.RpcMethodHandler[Any, Any] | None:
        """See `grpc.ServerInterceptor`."""
        handler = continuation(handler_call_details)
        method = handler_call_details.method
        if handler is None or method.startswith(HEALTH):
            return handler
        return _guarded(handler, self._admitting(method))

    def _admitting(self, method: str) -> Callable[[grpc.ServicerContext], contextlib.AbstractContextManager[None]]:
        @contextlib.contextmanager
        def admitted(context: grpc.ServicerContext) -> Iterator[None]:
            self._count(1)
            try:
                self._check(method, context)
                yield
            except Exception as error:
                if type(error) is Exception and not error.args:
                    raise  # The handler aborted the call by itself: this is gRPC's way to leave it.
                _end(context, method, error)
            finally:
                self._count(-1)

        return admitted

    def _count(self, change: int) -> None:
        with self._changed:
            self._running += change
            self._changed.notify_all()

    def _check(self, method: str, context: grpc.ServicerContext) -> None:
        metadata = context.invocation_metadata()
        if self._token is not None and not token_matches(read_token_of(metadata), self._token):
            raise AccessDeniedError("the caller's token is missing or wrong: present the one that the server reads")
        if not method.startswith(REFLECTION) and context.time_remaining() * NS_PER_S > DEADLINE_NS_MAX:
            raise RequestError(f"{method} was called without a deadline: give the call one of up to a day")


def _end(context: grpc.ServicerContext, method: str, error: Exception) -> None:
    if not isinstance(error, H3Error):
        request = read_context(context.invocation_metadata()).request_id
        _log.error("%s of request %s ended with a mistake of ours", method, request, exc_info=error)
    context.abort_with_status(to_status(error))


def _guarded(
    handler: grpc.RpcMethodHandler[Any, Any],
    admitted: Callable[[grpc.ServicerContext], contextlib.AbstractContextManager[None]],
) -> grpc.RpcMethodHandler[Any, Any]:
    """The same handler with a guard around its behaviour and its reading of messages."""
    prepare = _each_checked if handler.request_streaming else _checked
    many = handler.stream_stream or handler.unary_stream
    one = handler.stream_unary or handler.unary_unary

    def answer(request: Any, context: grpc.ServicerContext) -> Any:
        assert one is not None
        with admitted(context):
            return one(prepare(request), context)

    def answers(request: Any, context: grpc.ServicerContext) -> Iterator[Any]:
        assert many is not None
        with admitted(context):
            yield from many(prepare(request), context)

    makers = {
        (False, False): grpc.unary_unary_rpc_method_handler,
        (False, True): grpc.unary_stream_rpc_method_handler,
        (True, False): grpc.stream_unary_rpc_method_handler,
        (True, True): grpc.stream_stream_rpc_method_handler,
    }
    make: Any = makers[handler.request_streaming, handler.response_streaming]
    guarded: grpc.RpcMethodHandler[Any, Any] = make(
        answers if handler.response_streaming else answer,
        request_deserializer=_reading(handler.request_deserializer),
        response_serializer=handler.response_serializer,
    )
    return guarded


def _reading(read: Callable[[bytes], Any] | None) -> Callable[[bytes], Any] | None:
    # An exception here would end the call as INTERNAL, before a handler could say that the caller is to blame.
    def read_or_mark(data: bytes) -> Any:
        assert read is not None
        try:
            return read(data)
        except DecodeError as error:
            return _Malformed(str(error))

    return None if read is None else read_or_mark


def _checked(request: Any) -> Any:
    if isinstance(request, _Malformed):
        raise RequestError(f"the message is malformed ({request.error}): send one of this version's protocol")
    return request


def _each_checked(requests: Iterator[Any]) -> Iterator[Any]:
    try:
        for request in requests:
            yield _checked(request)
    except grpc.RpcError as error:
        raise PeerCancelledError("the caller went away before its last message", peer="caller") from error
