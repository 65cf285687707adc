"""Whether this process serves, as the standard health service says it: all of its services do, or none.

A watch keeps no thread. Whoever brings news sends it, and waits for gRPC's event thread to have sent it; that thread
also runs what is called when a watch ends. So nothing is ever sent under a lock which such a call takes: a watch that
ends while another begins would stop the server for ever.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, Final

import grpc
from grpc_health.v1 import health_pb2

SERVICE_NAME: Final[str] = health_pb2.DESCRIPTOR.services_by_name["Health"].full_name
WHOLE: Final = ""
"""Name of the process as a whole, to the protocol."""

Send = Callable[[Any], None]
"""Sends a message on a watch, and waits until it is sent. Does nothing once the watch has ended."""


class Health:
    """Answers from `register`: NOT_SERVING until `announce`. Thread-safe, but not for gRPC's event thread."""

    def __init__(self) -> None:
        self._services = [WHOLE]
        self._is_serving = self._is_ended = False
        self._watches: dict[_Watch, None] = {}
        self._lock = threading.Lock()
        """Nothing waits while it is held."""

    @property
    def services(self) -> tuple[str, ...]:
        """Full names of those that were added."""
        return tuple(self._services[1:])

    def add(self, service: str) -> None:
        """Know a service by its full name, before `register`."""
        self._services.append(service)

    def register(self, server: grpc.Server) -> None:
        """Answer what is asked of a server."""
        question, answer = health_pb2.HealthCheckRequest.FromString, health_pb2.HealthCheckResponse.SerializeToString
        watch: Any = _WatchMethod(self._watch)
        handlers = {
            "Check": grpc.unary_unary_rpc_method_handler(self._check, question, answer),
            "List": grpc.unary_unary_rpc_method_handler(
                self._list, health_pb2.HealthListRequest.FromString, health_pb2.HealthListResponse.SerializeToString
            ),
            "Watch": grpc.unary_stream_rpc_method_handler(watch, question, answer),
        }
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE_NAME, handlers),))

    def announce(self, *, is_serving: bool) -> None:
        """Tell those who ask and those who watch whether calls are welcome. Says nothing after `end`."""
        with self._lock:
            self._is_serving = is_serving and not self._is_ended
            watches = list(self._watches)
        for watch in watches:
            watch.tell(self._status)

    def end(self) -> None:
        """Calls are never welcome again."""
        with self._lock:
            self._is_ended = True
        self.announce(is_serving=False)

    def check_integrity(self) -> None:
        """Assert that no watch is kept that has ended. Once nobody watches any more."""
        with self._lock:
            assert not self._watches, f"{len(self._watches)} watches are kept"

    def _check(self, request: Any, context: grpc.ServicerContext) -> Any:
        if request.service not in self._services:
            context.abort(grpc.StatusCode.NOT_FOUND, f"there is no service {request.service[:100]!r} here")
        return health_pb2.HealthCheckResponse(status=self._status(request.service))

    def _list(self, request: Any, context: grpc.ServicerContext) -> Any:
        del request, context
        named = {each: health_pb2.HealthCheckResponse(status=self._status(each)) for each in self._services}
        return health_pb2.HealthListResponse(statuses=named)

    def _status(self, service: str) -> int:
        answer = health_pb2.HealthCheckResponse
        if service not in self._services:
            return int(answer.SERVICE_UNKNOWN)
        with self._lock:
            return int(answer.SERVING if self._is_serving else answer.NOT_SERVING)

    def _watch(self, service: str, context: grpc.ServicerContext, send: Send) -> None:
        watch = _Watch(service, send)
        with self._lock:
            self._watches[watch] = None
        if not context.add_callback(lambda: self._forget(watch)):
            self._forget(watch)
        watch.tell(self._status)

    def _forget(self, watch: _Watch) -> None:
        with self._lock:
            self._watches.pop(watch, None)


class _Watch:
    """Somebody who wants to know of every change."""

    def __init__(self, service: str, send: Send) -> None:
        self._service = service
        self._send = send
        self._told: int | None = None
        self._sending = threading.Lock()
        """Of two who bring news, the second looks again when the first has sent."""

    def tell(self, status_of: Callable[[str], int]) -> None:
        """Send what is so now, unless it was the last that was sent."""
        with self._sending:
            status = status_of(self._service)
            if status != self._told:
                self._told = status
                self._send(health_pb2.HealthCheckResponse(status=status))


class _WatchMethod:
    """The handler of `Watch`: gRPC gives it something to send with and lets its thread go."""

    experimental_non_blocking: Final = True
    """What gRPC looks for."""

    def __init__(self, begin: Callable[[str, grpc.ServicerContext, Send], None]) -> None:
        self._begin = begin

    def __call__(self, request: Any, context: grpc.ServicerContext, send_response_callback: Send) -> None:
        self._begin(request.service, context, send_response_callback)
