"""The migration rules over modelled tiers and a trace, on a virtual clock, beside plain LRU."""

from __future__ import annotations

from collections import Counter, OrderedDict
from dataclasses import dataclass, field, replace

from h3kv.core.types import SegmentId
from h3kv.core.units import NS_PER_S
from h3kv.policy.migration import step
from h3kv.policy.migration_config import MigrationConfig
from h3kv.policy.migration_state import (
    Command,
    Direction,
    Event,
    JitterReported,
    MigrationState,
    Owner,
    OwnerJoined,
    Touch,
    TouchesReported,
)

from .conversation_trace import Request, play
from .modelled_tiers import HOST, ModelledTiers

SEGMENT_BYTES = 4 << 20
OWNER = Owner("gpu_worker", "boot-1")


@dataclass
class Hits:
    """Touches, and how many of them found their segment in HOST. The first touch of a new segment is none."""

    touches: int = 0
    hits: int = 0

    def count(self, *, is_hit: bool) -> None:
        self.touches += 1
        self.hits += is_hit

    @property
    def rate(self) -> float:
        return self.hits / self.touches


@dataclass
class Run:
    lookups: Hits = field(default_factory=Hits)
    """Segments that requests find when they begin: the accesses of the trace itself."""
    attended: Hits = field(default_factory=Hits)
    """Touches of every tick, from then to the last token. One of a segment that waits to be promoted is no hit."""
    reasons: Counter[str] = field(default_factory=Counter)
    commands: list[tuple[int, Command]] = field(default_factory=list)
    """With the time of each."""
    forced: int = 0


def run_rules(requests: list[Request], config: MigrationConfig, *, host_segments: int, jitter_ns: float = 0.0) -> Run:
    """Hits and commands of the rules. A tick is a second."""
    config = replace(config, tick_ns=NS_PER_S)
    tiers = ModelledTiers(OWNER, host_segments, SEGMENT_BYTES)
    run = Run()
    state, _ = step(MigrationState(config), [OwnerJoined(OWNER), *tiers.rooms()], 0)
    for tick, now in enumerate(play(requests)):
        events: list[Event] = [*tiers.carry_out(), *tiers.write_behind()]
        touches: dict[SegmentId, None] = {}
        for segment in (SegmentId(block) for request in now.begun for block in request.blocks):
            if segment in tiers.segments:
                run.lookups.count(is_hit=tiers.touch(segment))
                touches[segment] = None
            else:
                events += tiers.seal(segment)
        for segment in map(SegmentId, now.attended):
            run.attended.count(is_hit=tiers.touch(segment))
            touches[segment] = None
        events.append(TouchesReported(OWNER, tick, tuple(Touch(segment, 1.0) for segment in touches)))
        events += [JitterReported(OWNER, HOST, jitter_ns), *tiers.rooms()]
        state, plan = step(state, events, tick * NS_PER_S)
        tiers.send(plan.commands)
        run.commands += [(tick * NS_PER_S, command) for command in plan.commands]
        run.reasons.update({reason.value: count for reason, count in plan.held.items()})
        run.reasons.update(command.reason.value for command in plan.commands)
        tiers.check_integrity()
    run.forced = tiers.forced
    return run


def run_lru(requests: list[Request], *, host_segments: int, is_instant: bool = False) -> Run:
    """Hits of a tier that takes in whatever is touched, for what was used longest ago.

    What was missed is there in the next tick, as when a command brings it, or at once.
    """
    run = Run()
    host: OrderedDict[int, None] = OrderedDict()
    known: set[int] = set()

    def place(block: int) -> None:
        host[block] = None
        host.move_to_end(block)
        if len(host) > host_segments:
            host.popitem(last=False)

    def use(block: int) -> bool:
        is_hit = block in host
        if is_hit or is_instant or block not in known:
            place(block)
        else:
            missed.setdefault(block)
        return is_hit

    missed: dict[int, None] = {}
    for now in play(requests):
        for block in missed:
            place(block)
        missed.clear()
        for block in (block for request in now.begun for block in request.blocks):
            is_hit = use(block)
            if block in known:
                run.lookups.count(is_hit=is_hit)
            known.add(block)
        for block in now.attended:
            run.attended.count(is_hit=use(block))
    return run


def shortest_return_ns(commands: list[tuple[int, Command]]) -> int | None:
    """Time from a move to the next one back, the shortest of all segments; None where nothing came back."""
    newest: dict[SegmentId, tuple[int, Direction]] = {}
    shortest: int | None = None
    for now_ns, command in commands:
        before = newest.get(command.segment)
        if before is not None and before[1] is not command.direction:
            gap_ns = now_ns - before[0]
            shortest = gap_ns if shortest is None else min(shortest, gap_ns)
        newest[command.segment] = (now_ns, command.direction)
    return shortest
