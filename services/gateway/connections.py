"""Connections that do not wait for ever: neither for a request that trickles in, nor for a client that reads nothing.

While a request is answered, its body is bounded where it is read, and its answer by the gateway's settings.

A client that reads slowly is waited for as long as it reads: what counts is how much it has taken,

    written - in our buffer - in the system's queue

which is looked at in every state of the connection, also while it is being closed.
"""

from __future__ import annotations

import array
import asyncio
import fcntl
import termios
from typing import Any, ClassVar

from uvicorn.protocols.http.h11_impl import H11Protocol


class BoundedProtocol(H11Protocol):
    """One connection. A client that takes longer is cut off."""

    seconds: ClassVar[float]
    """From one answer to the end of the next request's head; and for a client to read on."""
    connections_max: ClassVar[int]
    """Connections that are open together. Further ones are closed at once."""

    _head_timer: asyncio.TimerHandle | None = None
    _tick_timer: asyncio.TimerHandle | None = None
    _counted: CountedTransport
    _taken_bytes = 0

    def connection_made(self, transport: Any) -> None:
        """As asyncio says."""
        self._counted = CountedTransport(transport)
        counted: Any = self._counted
        super().connection_made(counted)
        if len(self.connections) > self.connections_max:
            transport.abort()
            return
        self._tick_timer = self.loop.call_later(self.seconds, self._tick)
        self._await_head()

    def data_received(self, data: bytes) -> None:
        """As asyncio says."""
        super().data_received(data)
        self._await_head()

    def on_response_complete(self) -> None:
        """Called when an answer was sent."""
        super().on_response_complete()
        self._await_head()

    def connection_lost(self, exc: Exception | None) -> None:
        """As asyncio says."""
        self._stop_head_timer()
        if self._tick_timer is not None:
            self._tick_timer.cancel()
        super().connection_lost(exc)

    def _await_head(self) -> None:
        """A timer runs exactly while nothing is answered, whatever the client sends meanwhile."""
        cycle: Any = self.cycle  # None before the first request.
        if cycle is not None and not cycle.response_complete:
            self._stop_head_timer()
        elif self._head_timer is None and not self.transport.is_closing():
            # What the client has not read yet still goes out: the tick sees to its end.
            self._head_timer = self.loop.call_later(self.seconds, self.transport.close)

    def _stop_head_timer(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    def _tick(self) -> None:
        """Cut off a client that has something to read and took nothing of it since the last time."""
        before, self._taken_bytes = self._taken_bytes, self._counted.taken_bytes
        if self._taken_bytes == before and self._counted.get_write_buffer_size() > 0:
            self.transport.abort()
        else:
            self._tick_timer = self.loop.call_later(self.seconds, self._tick)


class CountedTransport:
    """A transport that knows how much was written to it. All else is the transport's own."""

    def __init__(self, transport: Any) -> None:
        self._transport = transport
        self._written_bytes = 0

    def write(self, data: bytes) -> None:
        """As asyncio says."""
        self._written_bytes += len(data)
        self._transport.write(data)

    def get_write_buffer_size(self) -> int:
        """As asyncio says."""
        size: int = self._transport.get_write_buffer_size()
        return size

    @property
    def taken_bytes(self) -> int:
        """Bytes that the client's side has taken."""
        return self._written_bytes - self.get_write_buffer_size() - _queued_bytes(self._transport)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)


def bounded_protocol(*, seconds: float, connections_max: int) -> type[BoundedProtocol]:
    """A protocol for uvicorn with these bounds."""
    bounds = {"seconds": seconds, "connections_max": connections_max}
    return type(BoundedProtocol.__name__, (BoundedProtocol,), bounds)


def _queued_bytes(transport: Any) -> int:
    """What the system holds for the client; 0 where it does not say."""
    queued = array.array("i", [0])
    try:
        fcntl.ioctl(transport.get_extra_info("socket").fileno(), termios.TIOCOUTQ, queued)
    except (OSError, ValueError):
        return 0
    return queued[0]
