"""Records to and from the server, over whatever channel there is now."""

from __future__ import annotations

import select
from collections import deque
from collections.abc import Callable

from h3kv.core.errors import H3Error, RegionError, RequestError
from h3kv.core.units import NS_PER_S
from h3kv.telemetry.trace_context import UNTRACED
from h3kv.tiers.remote import records
from h3kv.tiers.remote.channel import ChannelSide
from h3kv.tiers.remote.records import Kind, Record

Take = Callable[[Record], bool]
"""Takes a completion, if it is its own."""


class Exchange:
    """Pushes in order, keeps what finds no room, and passes on what comes. Not thread-safe."""

    def __init__(self) -> None:
        self._side: ChannelSide | None = None
        self._note_posted: Callable[[int], None] = lambda _: None
        self._takers: tuple[Take, ...] = ()
        self._unsent: deque[bytes] = deque()
        self._next_number = 1
        self._posted = 0
        self._trace = self._trace_wanted = UNTRACED
        self.is_degraded = False
        """Whether the store takes no more moves, as its server last said."""
        self.awaited_total = 0
        """Answers that were waited for."""
        self.heard_total = 0
        """Records that came: who sends them runs."""
        self.fault: H3Error | None = None
        """Why the server ended this channel."""

    def serve(self, *takers: Take) -> None:
        """Say who takes completions."""
        self._takers = takers

    def enter(self, side: ChannelSide, note_posted: Callable[[int], None]) -> None:
        """Use a channel from now on."""
        self._side, self._note_posted = side, note_posted
        self._posted, self.is_degraded, self.fault = 0, False, None
        self._trace = UNTRACED

    def leave(self) -> None:
        """There is none now: what is sent goes nowhere."""
        self._side = None
        self._unsent.clear()

    @property
    def is_open(self) -> bool:
        """Whether there is a server that listens."""
        return self._side is not None and self.fault is None

    @property
    def signal(self) -> int:
        """What `wait` compares with."""
        return 0 if self._side is None else self._side.own_bell.signal

    def wait(self, seen: int, timeout_ns: int) -> None:
        """Return when something came since the signal was `seen`, or the time is over."""
        if self._side is not None:
            self._side.own_bell.wait(seen, timeout_ns)
        else:
            _pause(timeout_ns)

    def numbers(self, count: int = 1) -> int:
        """The first of so many numbers that were never used."""
        first = self._next_number
        self._next_number += count
        return first

    def trace(self, context: bytes) -> None:
        """Say which trace what is sent from now on belongs to, as `pack_context` packs it."""
        self._trace_wanted = context

    def send(self, record: bytes) -> None:
        """Push a record, or keep it until there is room. `flush` wakes the server."""
        if not self.is_open:
            return
        if self._trace_wanted != self._trace:
            self._trace = self._trace_wanted
            self._unsent.append(records.pack(Kind.TRACE, 0, self._trace))
        self._unsent.append(record)

    def flush(self) -> None:
        """Push what there is room for, and wake the server."""
        side, before = self._side, self._posted
        try:
            while side is not None and self._unsent and side.outgoing.push(self._unsent[0]):
                self._unsent.popleft()
                self._posted += 1
        except RegionError as error:
            self._break(error)
        if side is not None and self._posted > before:
            self._note_posted(self._posted)
            side.peer_bell.ring()

    def pump(self) -> None:
        """Pass on all that came, and push what was kept."""
        side = self._side
        try:
            while side is not None and self.fault is None and (data := side.incoming.pop()) is not None:
                record = records.unpack(data)
                self.heard_total += 1
                self.is_degraded = bool(record.flags & records.IS_DEGRADED)
                if not any(take(record) for take in self._takers) and record.number == 0:
                    self._break(records.read_failure(record).error(None))
        except (RegionError, RequestError) as error:
            self._break(error)
        if self._unsent:
            self.flush()

    def _break(self, error: H3Error) -> None:
        self.fault = error
        self._unsent.clear()
        self.is_degraded = True


def _pause(timeout_ns: int) -> None:
    """Nobody can wake us: the server is gone."""
    select.select([], [], [], timeout_ns / NS_PER_S)
