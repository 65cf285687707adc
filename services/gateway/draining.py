"""A server that ends: what runs has its time, and what outlasts it is told so before it is cut.

told to end                 drain_seconds                    + LAST_WORDS_S
 |------ answers go on ----------|---- their last events -------|  cut
         no new connections          an error, as from a worker
                                     that went away
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Awaitable, Callable
from typing import Final

import uvicorn

LAST_WORDS_S: Final = 0.5
"""For streams to send an error as their last event, and for other answers to get their status."""


class DrainingServer(uvicorn.Server):
    """Serves until it is told to end.

    Args:
        config: without a time for the end.
        drain_s: for what runs then, in seconds.
        end_answers: has what still runs after that end with an error.
    """

    def __init__(self, config: uvicorn.Config, *, drain_s: float, end_answers: Callable[[], Awaitable[None]]) -> None:
        config.timeout_graceful_shutdown = drain_s + LAST_WORDS_S  # type: ignore[assignment]  # It only waits for it.
        super().__init__(config)
        self._drain_s = drain_s
        self._end_answers = end_answers

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """As uvicorn's."""
        ending = asyncio.ensure_future(self._end_late())
        try:
            await super().shutdown(sockets)
        finally:
            ending.cancel()

    async def _end_late(self) -> None:
        await asyncio.sleep(self._drain_s)
        await self._end_answers()
