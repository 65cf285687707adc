"""Whether the node can answer, as everybody may ask: however many do, gpu_worker is asked once a second."""

from __future__ import annotations

import asyncio
import time
from typing import Final

from h3kv.core.errors import PeerBusyError, PeerError
from h3kv.core.units import NS_PER_S
from h3kv.rpc.call_context import new_context
from services.gateway.worker import Worker

FRESH_NS: Final = NS_PER_S
"""How long what was found is said again."""


class Health:
    """What gpu_worker said last.

    Args:
        worker: which is asked.
    """

    def __init__(self, worker: Worker) -> None:
        self._worker = worker
        self._lock = asyncio.Lock()
        self._name = ""
        self._error: PeerError | None = None
        self._until_ns = 0

    async def model(self) -> str:
        """Name of the model that is served; empty while it is too busy to say that it is there, since it started.

        Raises:
            PeerError: it is not there.
        """
        async with self._lock:
            if time.monotonic_ns() >= self._until_ns:
                await self._ask()
        if self._error is not None:
            raise self._error
        return self._name

    async def _ask(self) -> None:
        try:
            self._name, self._error = (await self._worker.model(new_context())).name, None
        except PeerBusyError:
            self._error = None
        except PeerError as error:
            self._error = error
        self._until_ns = time.monotonic_ns() + FRESH_NS
