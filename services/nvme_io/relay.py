"""Commands on their way to the holder of a segment, and the moves that everyone is told of.

Each watcher reads a log of its own kind: a holder the commands for it and all moves, everyone else the moves alone.
Each log numbers its events from 1, without gaps.
"""

from __future__ import annotations

import threading
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Final

from h3kv.api.common.v1 import commands_pb2, types_pb2
from h3kv.api.nvme_io.v1 import nvme_io_service_pb2 as pb
from h3kv.core.errors import PeerTimeoutError, RequestError
from h3kv.core.units import NS_PER_MS, NS_PER_S
from h3kv.rpc.convert import COMMANDS_MAX, read_boot_token, read_key, read_label

EVENTS_KEPT: Final = 4096
COMMANDS_KEPT: Final = 65_536
"""Whose ids are remembered; the oldest go first."""
_LOOK_NS: Final = 100 * NS_PER_MS

CommandKey = tuple[bytes, int]


@dataclass(frozen=True, slots=True)
class _Event:
    message: pb.WatchMovesResponse
    deadline_ns: int | None = None
    """Of a command: it may be read much later than it came."""

    def read_at(self, now_ns: int) -> pb.WatchMovesResponse:
        """The message, its command with the time that is left now."""
        if self.deadline_ns is None:
            return self.message
        message = pb.WatchMovesResponse()
        message.CopyFrom(self.message)
        message.command.command.timeout_ns = max(self.deadline_ns - now_ns, 0)
        return message


@dataclass(slots=True)
class _Log:
    events: deque[_Event] = field(default_factory=lambda: deque(maxlen=EVENTS_KEPT))
    newest: int = 0

    def add(self, message: pb.WatchMovesResponse, *, deadline_ns: int | None = None) -> None:
        self.newest += 1
        message.event = self.newest
        self.events.append(_Event(message, deadline_ns))

    def after(self, seen: int) -> list[_Event]:
        return [each for each in self.events if each.message.event > seen]


class Relay:
    """Thread-safe.

    Args:
        now_ns: of a monotonic clock.
    """

    def __init__(self, now_ns: Callable[[], int]) -> None:
        self._now_ns = now_ns
        self._changed = threading.Condition()
        self._holders: dict[bytes, int] = {}
        self._logs: dict[int | None, _Log] = {None: _Log()}
        self._outcomes: OrderedDict[CommandKey, commands_pb2.CommandOutcome] = OrderedDict()
        self._is_closed = False

    def join(self, holder: int, boot_token: bytes) -> None:
        """A client has joined, under a number."""
        with self._changed:
            self._holders[boot_token] = holder
            self._logs.setdefault(holder, _Log())

    def leave(self, holder: int) -> None:
        """It has gone, and its log with it."""
        with self._changed:
            self._holders = {token: number for token, number in self._holders.items() if number != holder}
            self._logs.pop(holder, None)
            self._changed.notify_all()

    def pass_on(
        self, commands: list[commands_pb2.Command], source: types_pb2.Tier, target: types_pb2.Tier
    ) -> list[commands_pb2.CommandOutcome]:
        """Hand commands to the holders of their segments. One outcome for each.

        Raises:
            RequestError: one is malformed, and nothing was done with any.
        """
        keys = [_key(command, index) for index, command in enumerate(commands)]
        if len(commands) > COMMANDS_MAX or len(set(keys)) != len(keys):
            raise RequestError(f"a call has up to {COMMANDS_MAX} commands, no id twice")
        with self._changed:
            outcomes = [self._pass(key, command, source, target) for key, command in zip(keys, commands, strict=True)]
            self._changed.notify_all()
        return outcomes

    def report(self, moves: list[pb.MoveEnded]) -> None:
        """How relayed commands ended, and moves of a holder's own. The first word on a command counts."""
        with self._changed:
            for move in moves:
                key = (move.outcome.id.sender_boot_token, move.outcome.id.number)
                if move.outcome.id.number:
                    before = self._outcomes.get(key)
                    if before is None or before.outcome != commands_pb2.OUTCOME_RELAYED:
                        continue
                    self._outcomes[key] = move.outcome
                for log in self._logs.values():
                    log.add(pb.WatchMovesResponse(move=move))
            self._changed.notify_all()

    def watch(
        self, holder: int | None, after: int | None, *, is_over: Callable[[], bool], deadline_ns: int
    ) -> Iterator[pb.WatchMovesResponse]:
        """Events of a log, as they come.

        Args:
            holder: whose log; None: of everyone.
            after: the last event that was seen; None: only what comes from now on.
            is_over: whether the watcher has gone.
            deadline_ns: when to end.

        Raises:
            RequestError: the events after that one are lost.
            PeerTimeoutError: the deadline came.
        """
        with self._changed:
            log = self._logs.get(holder)
            newest = 0 if log is None else log.newest
            oldest = log.events[0].message.event if log is not None and log.events else newest + 1
        seen = newest if after is None else after
        if seen > newest or seen + 1 < oldest:
            raise RequestError(f"events after {seen} are not kept: the newest is {newest}; ask without after_event")
        while True:
            with self._changed:
                log = self._logs.get(holder)
                if log is None or self._is_closed or is_over():
                    return
                events = log.after(seen)
                if not events:
                    left_ns = deadline_ns - self._now_ns()
                    if left_ns <= 0:
                        raise PeerTimeoutError("the stream has reached its deadline: open the next one", peer="nvme_io")
                    self._changed.wait(min(left_ns, _LOOK_NS) / NS_PER_S)
            for event in events:
                seen = event.message.event
                yield event.read_at(self._now_ns())

    def close(self) -> None:
        """End all streams."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()

    def _pass(
        self, key: CommandKey, command: commands_pb2.Command, source: types_pb2.Tier, target: types_pb2.Tier
    ) -> commands_pb2.CommandOutcome:
        before = self._outcomes.get(key)
        if before is not None:
            return before
        holder = self._holders.get(command.segment.owner_boot_token)
        outcome = commands_pb2.CommandOutcome(id=command.id, outcome=commands_pb2.OUTCOME_RELAYED)
        if holder is None:
            outcome.outcome = commands_pb2.OUTCOME_UNKNOWN_SEGMENT
        elif command.timeout_ns == 0:
            outcome.outcome = commands_pb2.OUTCOME_EXPIRED
        else:
            relayed = pb.RelayedCommand(command=command, source=source, target=target)
            deadline_ns = self._now_ns() + command.timeout_ns
            self._logs[holder].add(pb.WatchMovesResponse(command=relayed), deadline_ns=deadline_ns)
        self._outcomes[key] = outcome
        while len(self._outcomes) > COMMANDS_KEPT:
            self._outcomes.popitem(last=False)
        return outcome


def _key(command: commands_pb2.Command, index: int) -> CommandKey:
    """The id of a command that is well-formed. Raises RequestError."""
    field = f"commands[{index}]"
    if command.id.number == 0:
        raise RequestError(f"{field}.id.number = 0: commands are numbered from 1")
    read_label(command.reason, field=f"{field}.reason")
    read_key(command.segment.key, field=f"{field}.segment.key")
    read_boot_token(command.segment.owner_boot_token, field=f"{field}.segment.owner_boot_token")
    return read_boot_token(command.id.sender_boot_token, field=f"{field}.id.sender_boot_token"), command.id.number
