"""Moves between HOST and the cold store that others command, carried out by the engine's thread between two steps.

    command --begin--> under way --take_ended--> done, failed, no room, expired before it began
                  +--> expired, unknown, stale, busy

A command acts once: one that comes again is answered as it was.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from h3kv.core.errors import RequestError, SlabUnavailableError, TierBrokenError
from h3kv.core.limits import SEGMENT_BLOCKS_MAX
from h3kv.core.types import Tier
from h3kv.engine.pool import KvPool
from h3kv.engine.segment import Phase, Segment
from h3kv.rpc.command_messages import EndedCommand, MoveCommand, MoveEnd, MoveOutcome

ENDED_KEPT: Final = 4096
"""Commands whose end is remembered; the oldest go first. Their time is over long before."""


@dataclass(slots=True, eq=False)
class _UnderWay:
    """A command whose move was asked for."""

    command: MoveCommand
    deadline_ns: int
    began_ns: int
    size_bytes: int
    """To be copied."""
    has_begun: bool = False
    """Whether bytes were seen to move."""


class MoveExecutor:
    """For the thread that runs the pool.

    Args:
        pool: whose segments move.
        boot_token: of this process, which owns them.
        now_ns: of a monotonic clock.
    """

    def __init__(self, pool: KvPool, *, boot_token: bytes, now_ns: Callable[[], int]) -> None:
        self._pool = pool
        self._boot_token = boot_token
        self._now_ns = now_ns
        self._under_way: dict[tuple[bytes, int], _UnderWay] = {}
        self._ended: OrderedDict[tuple[bytes, int], EndedCommand] = OrderedDict()
        self._untold: list[EndedCommand] = []

    def begin(self, command: MoveCommand, received_ns: int) -> None:
        """Carry a command out, as far as that is still wanted and can be."""
        known = self._ended.get(command.id)
        if known is not None:
            self._untold.append(known)
            return
        if command.id in self._under_way:
            return
        now_ns, deadline_ns = self._now_ns(), received_ns + command.timeout_ns
        segment = self._pool.segments.find(command.segment)
        refusal = MoveEnd.EXPIRED if now_ns >= deadline_ns else self._refusal(command, segment)
        if refusal is not None:
            self._end(command, segment, refusal)
            return
        assert segment is not None
        copied = 0 if command.target in segment.tiers else self._size_bytes(segment)
        moving = self._under_way[command.id] = _UnderWay(command, deadline_ns, now_ns, copied)
        self._pool.placer.ask([segment.id], command.target, reason=command.reason)
        self._follow(moving)

    def take_ended(self) -> list[EndedCommand]:
        """Commands that ended since the last call, and those that came again after their end."""
        for moving in list(self._under_way.values()):
            self._follow(moving)
        untold, self._untold = self._untold, []
        return untold

    def _refusal(self, command: MoveCommand, segment: Segment | None) -> MoveEnd | None:
        """Why nothing is to be done; None where it is."""
        if {command.source, command.target} != {Tier.HOST, Tier.NVME}:
            return MoveEnd.FAILED
        if (
            command.owner_boot_token != self._boot_token
            or segment is None
            or segment.phase is not Phase.SEALED
            or segment.keys[:1] != (command.key,)
        ):
            return MoveEnd.UNKNOWN_SEGMENT
        if segment.generation != command.generation:
            return MoveEnd.STALE
        if _has_come(segment, command.target):
            return MoveEnd.DONE
        is_moving = any(moving.command.segment == segment.id for moving in self._under_way.values())
        if is_moving or segment.arrival is not None or (command.target is Tier.NVME and segment.is_read_whole):
            return MoveEnd.BUSY
        return None

    def _follow(self, moving: _UnderWay) -> None:
        """End a command whose move has ended, or will not begin any more."""
        command, placer = moving.command, self._pool.placer
        segment = self._pool.segments.find(command.segment)
        if segment is None or segment.phase is not Phase.SEALED:
            self._end(command, None, MoveEnd.FAILED, moving)
            return
        moving.has_begun |= segment.is_copied or segment.arrival is not None
        if _has_come(segment, command.target):
            self._end(command, segment, MoveEnd.DONE, moving)
        elif command.target is Tier.NVME and segment.is_read_whole:
            # A sequence found it meanwhile. A copy that was begun is of use later.
            placer.ask_no_more(segment.id)
            self._end(command, segment, MoveEnd.BUSY, moving)
        elif not placer.is_asked(segment.id):
            was_possible = moving.has_begun or self._has_room(segment, command.target)
            self._end(command, segment, MoveEnd.FAILED if was_possible else MoveEnd.NO_ROOM, moving)
        elif not moving.has_begun and self._now_ns() >= moving.deadline_ns:
            placer.ask_no_more(segment.id)
            self._end(command, segment, MoveEnd.EXPIRED, moving)

    def _end(
        self, command: MoveCommand, segment: Segment | None, end: MoveEnd, moving: _UnderWay | None = None
    ) -> None:
        self._under_way.pop(command.id, None)
        outcome = MoveOutcome(
            command.sender_boot_token,
            command.number,
            end,
            error_reason=_error_reason(command, segment) if end is MoveEnd.FAILED else "",
            generation=None if segment is None else segment.generation,
            tiers=frozenset() if segment is None else segment.tiers,
        )
        size_bytes = moving.size_bytes if moving is not None and end is MoveEnd.DONE else 0
        duration_ns = 0 if moving is None else self._now_ns() - moving.began_ns
        ended = EndedCommand(command, outcome, size_bytes=size_bytes, duration_ns=duration_ns)
        self._ended[command.id] = ended
        self._untold.append(ended)
        while len(self._ended) > ENDED_KEPT:
            self._ended.popitem(last=False)

    def _has_room(self, segment: Segment, target: Tier) -> bool:
        """Whether room is not what a move failed for: then its source or target is broken, or away."""
        table = self._pool.segments
        if target is Tier.HOST:
            # A segment's room stays free there; what was reserved for this one is given back with the next tick.
            free_blocks = table.free_blocks() + self._pool.placer.refused_blocks
            return free_blocks >= segment.room_blocks + SEGMENT_BLOCKS_MAX
        cold = table.cold
        return cold is not None and (cold.is_degraded or cold.statistics().free_bytes >= self._size_bytes(segment))

    def _size_bytes(self, segment: Segment) -> int:
        return segment.room_blocks * self._pool.layout.block_bytes


def _has_come(segment: Segment, target: Tier) -> bool:
    """Whether it lies where a command wants it: in no faster tier either."""
    return segment.home_L is not None if target is Tier.HOST else segment.tiers == {Tier.NVME}


def _error_reason(command: MoveCommand, segment: Segment | None) -> str:
    if {command.source, command.target} != {Tier.HOST, Tier.NVME}:
        return RequestError.reason
    is_read = segment is None or command.target is Tier.HOST
    return SlabUnavailableError.reason if is_read else TierBrokenError.reason
