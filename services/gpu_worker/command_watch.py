"""Commands that `nvme_io` passes on to this process, and how they ended, on the way back.

    nvme_io --WatchMoves--> reading thread --> engine's thread --> waiting --> telling thread --ReportOutcome--> nvme_io

Neither thread is waited for. When `nvme_io` goes, both try again; commands that nobody carries out are void at their
deadline.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Final

from h3kv.core.errors import H3Error, RequestError
from h3kv.core.units import NS_PER_MS, NS_PER_S
from h3kv.rpc.command_messages import EndedCommand, MoveCommand
from h3kv.rpc.convert import COMMANDS_MAX
from h3kv.rpc.nvme_io_client import CommandStream
from h3kv.tiers.remote.link import NodeLink

STREAM_NS: Final = 600 * NS_PER_S
"""Deadline of a stream: the next one goes on where it ended."""
PAUSE_NS: Final = 200 * NS_PER_MS
"""After which a broken stream is opened again, or a call repeated."""
ENDED_WAITING_MAX: Final = 4096
"""Ends that wait to be told; the oldest are forgotten first."""

_log = logging.getLogger(__name__)


class CommandWatch:
    """Watches from `start` to `stop`.

    Args:
        link: to `nvme_io`, open; closed after this has stopped.
        received: called on a thread of this object with each command, and when it came on the monotonic clock.
        on_failure: called by a thread of this object that broke: no command is heard, or no end told, any more.
    """

    def __init__(
        self,
        link: NodeLink,
        received: Callable[[MoveCommand, int], None],
        *,
        on_failure: Callable[[BaseException], None],
    ) -> None:
        self._link = link
        self._received = received
        self._on_failure = on_failure
        self._changed = threading.Condition()
        self._is_stopped = False
        self._stream: CommandStream | None = None
        self._life: tuple[int, bytes] | None = None
        """This process's number, and the life of the `nvme_io` that counts events for it."""
        self._seen: int | None = 0
        """The last event; None: whatever comes from now on."""
        self._ended: deque[EndedCommand] = deque(maxlen=ENDED_WAITING_MAX)
        self._threads = [
            threading.Thread(target=self._run, args=(act,), name=name, daemon=True)
            for name, act in (("commands-read", self._read), ("commands-told", self._tell))
        ]

    def start(self) -> None:
        """Begin to watch."""
        for thread in self._threads:
            thread.start()

    def tell(self, ended: Sequence[EndedCommand]) -> None:
        """Say how commands ended, soon. Never waits."""
        if ended:
            with self._changed:
                self._ended.extend(ended)
                self._changed.notify_all()

    def stop(self) -> None:
        """Give the stream up. What was not told is void. A call under way may take 5 s more."""
        with self._changed:
            self._is_stopped = True
            self._changed.notify_all()
            if self._stream is not None:
                self._stream.cancel()
        for thread in self._threads:
            if thread.ident is not None:
                thread.join()

    def _run(self, act: Callable[[], None]) -> None:
        while not self._is_stopped:
            try:
                act()
            except H3Error as error:
                _log.debug("nvme_io is not there: %s", error)
            except BaseException as error:  # noqa: BLE001  (whatever it was, no command would be heard any more)
                self._on_failure(error)
                return
            with self._changed:
                self._changed.wait_for(lambda: self._is_stopped, PAUSE_NS / NS_PER_S)

    def _read(self) -> None:
        """Read commands until the stream ends."""
        holder, registration = self._link.holder, self._link.registration
        life = holder, b"" if registration is None else registration.server_boot_token
        if self._life != life:
            self._life, self._seen = life, 0
        stream = self._link.calls.watch_commands(holder, self._seen, timeout_ns=STREAM_NS)
        with self._changed:
            self._stream = stream
            if self._is_stopped:
                stream.cancel()
        try:
            for event, command in stream:
                self._seen = event
                if command is not None:
                    self._received(command, time.monotonic_ns())
        except RequestError:
            # What came after the last event is lost.
            self._seen = None
            raise
        finally:
            stream.cancel()
            with self._changed:
                self._stream = None

    def _tell(self) -> None:
        """Tell ends as they come."""
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._is_stopped or self._ended)
                if self._is_stopped:
                    return
                batch = list(self._ended)[:COMMANDS_MAX]
            self._link.calls.report_ended(self._link.holder, batch)
            with self._changed:
                for each in batch:
                    if self._ended and self._ended[0] is each:
                        self._ended.popleft()
