"""Connections that do not wait for ever: neither for a request that trickles in, nor for a client that reads nothing.

While a request is answered, its body is bounded where it is read, and its answer by the gateway's settings.
"""

from __future__ import annotations

import asyncio
from typing import Any, ClassVar

from uvicorn.protocols.http.h11_impl import H11Protocol


class BoundedProtocol(H11Protocol):
    """One connection. A client that takes longer is cut off."""

    seconds: ClassVar[float]
    """From one answer to the end of the next request's head; and for a client to make room for more of its answer."""

    _head_timer: asyncio.TimerHandle | None = None
    _room_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: Any) -> None:
        """As asyncio says."""
        super().connection_made(transport)
        self._await_head()

    def data_received(self, data: bytes) -> None:
        """As asyncio says."""
        super().data_received(data)
        self._await_head()

    def on_response_complete(self) -> None:
        """Called when an answer was sent."""
        super().on_response_complete()
        self._await_head()

    def pause_writing(self) -> None:
        """As asyncio says: no more fits."""
        super().pause_writing()
        if self._room_timer is None:
            self._room_timer = self.loop.call_later(self.seconds, self.transport.abort)

    def resume_writing(self) -> None:
        """As asyncio says: there is room again."""
        self._stop_room_timer()
        super().resume_writing()

    def connection_lost(self, exc: Exception | None) -> None:
        """As asyncio says."""
        self._stop_head_timer()
        self._stop_room_timer()
        super().connection_lost(exc)

    def _await_head(self) -> None:
        """A timer runs exactly while nothing is answered, whatever the client sends meanwhile."""
        cycle: Any = self.cycle  # None before the first request.
        if cycle is not None and not cycle.response_complete:
            self._stop_head_timer()
        elif self._head_timer is None and not self.transport.is_closing():
            self._head_timer = self.loop.call_later(self.seconds, self.transport.abort)

    def _stop_head_timer(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    def _stop_room_timer(self) -> None:
        if self._room_timer is not None:
            self._room_timer.cancel()
            self._room_timer = None


def bounded_protocol(*, seconds: float) -> type[BoundedProtocol]:
    """A protocol for uvicorn with this bound."""
    return type(BoundedProtocol.__name__, (BoundedProtocol,), {"seconds": seconds})
