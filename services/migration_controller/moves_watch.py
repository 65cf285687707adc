"""How moves end, as `nvme_io` tells everyone who watches."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from typing import Any, Final

from h3kv.api.nvme_io.v1 import nvme_io_service_pb2 as pb
from h3kv.api.nvme_io.v1 import nvme_io_service_pb2_grpc as pb_grpc
from h3kv.core.errors import H3Error, RequestError
from h3kv.core.units import NS_PER_S
from h3kv.rpc.client import PeerChannel
from h3kv.rpc.command_messages import MoveOutcome, read_move_outcome

STREAM_NS: Final = 600 * NS_PER_S
"""Deadline of a stream: the next one goes on where it ended."""
PAUSE_S: Final = 0.5
"""After which a stream that broke is opened again."""

_log = logging.getLogger(__name__)


class MovesWatch:
    """Watches from `start` to `stop`, on a thread of its own: a stream blocks whoever reads it.

    Args:
        channel: to `nvme_io`. Stays the caller's.
        ended: called with the outcome of each command that ended, on that thread.
    """

    def __init__(self, channel: PeerChannel, ended: Callable[[MoveOutcome], None]) -> None:
        self._stub = pb_grpc.NvmeIoServiceStub(channel.grpc)
        self._ended = ended
        self._stopped = threading.Event()
        self._lock = threading.Lock()
        self._stream: Any = None
        self._after: int | None = None
        """The last event that was seen."""
        self._thread = threading.Thread(target=self._run, name="moves-watch", daemon=True)

    def start(self) -> None:
        """Begin to watch."""
        self._thread.start()

    def stop(self, *, timeout_ns: int) -> None:
        """Give the stream up."""
        self._stopped.set()
        with self._lock:
            if self._stream is not None:
                self._stream.cancel()
        self._thread.join(timeout_ns / NS_PER_S)

    def _run(self) -> None:
        while not self._stopped.is_set():
            try:
                self._read()
            except RequestError:
                # The events after the one that was seen are lost, or another nvme_io counts from 1.
                self._after = None
            except H3Error as error:
                _log.debug("moves cannot be watched: %s", error)
            self._stopped.wait(PAUSE_S)

    def _read(self) -> None:
        request = pb.WatchMovesRequest(after_event=self._after)
        stream = self._stub.WatchMoves(request, timeout=STREAM_NS / NS_PER_S)
        with self._lock:
            self._stream = stream
            if self._stopped.is_set():
                stream.cancel()
        for response in stream:
            self._after = response.event
            outcome = response.move.outcome
            if response.HasField("move") and outcome.id.number:
                self._ended(read_move_outcome(outcome, field="move.outcome"))
