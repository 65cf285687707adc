"""The migration rules beside a clock that tests move."""

from collections.abc import Iterable
from dataclasses import replace

from h3kv.core.types import SegmentId, Tier
from h3kv.core.units import NS_PER_MS, NS_PER_S
from h3kv.policy.migration import step
from h3kv.policy.migration_config import HOST_NVME, MigrationConfig, TierPair
from h3kv.policy.migration_state import (
    Command,
    Event,
    MigrationState,
    MoveEnded,
    MoveReason,
    Owner,
    OwnerJoined,
    Plan,
    RoomReported,
    SegmentRef,
    SegmentReported,
    Touch,
    TouchesReported,
)

DEVICE, HOST, NVME = Tier.DEVICE, Tier.HOST, Tier.NVME
WORKER = Owner("gpu_worker", "boot-1")
TICK_NS = 100 * NS_PER_MS
SIZE = 10
"""Bytes of a segment; a tier holds 1,000."""


class World:
    """A state, and time that tests move. Commands end when a test says so."""

    def __init__(self, *, pairs: tuple[TierPair, ...] = (HOST_NVME,), **thresholds: int | float) -> None:
        config = replace(MigrationConfig(pairs=pairs), **thresholds)
        self.state = MigrationState(config)
        self.now_ns = 0
        self.tick = 0
        self.tell(OwnerJoined(WORKER))
        self.room(NVME, used=0, capacity=100_000)

    def tell(self, *events: Event) -> Plan:
        self.state, plan = step(self.state, events, self.now_ns)
        again, nothing = step(self.state, (), self.now_ns)
        assert (again, nothing) == (self.state, Plan()), "a second look decided something else"
        return plan

    def wait(self, seconds: float) -> Plan:
        self.now_ns += round(seconds * NS_PER_S)
        return self.tell()

    def room(self, tier: Tier, *, used: int, capacity: int = 1_000) -> Plan:
        return self.tell(RoomReported(WORKER, tier, capacity, capacity - used))

    def put(self, *segments: int, tiers: Iterable[Tier] = (HOST,), size: int = SIZE, pinned: bool = False) -> None:
        for segment in segments:
            self.tell(
                SegmentReported(WORKER, SegmentId(segment), 1, size, frozenset(tiers), is_pinned=pinned),
            )

    def touch(self, *segments: int, mass: float = 0.5) -> Plan:
        """One tick of touches."""
        self.tick += 1
        self.now_ns += TICK_NS
        return self.tell(
            TouchesReported(WORKER, self.tick, tuple(Touch(SegmentId(segment), mass) for segment in segments))
        )

    def end(self, command: Command, *, error: str | None = None) -> Plan:
        tiers = {command.source} if error else {command.target} | ({NVME} if command.target is HOST else set())
        return self.tell(MoveEnded(command.id, error, command.generation + 1, frozenset(tiers)))

    def segment(self, segment: int) -> SegmentRef:
        return SegmentRef(WORKER.name, SegmentId(segment))


def moves(plan: Plan) -> list[tuple[int, Tier, Tier, MoveReason]]:
    return [(each.segment, each.source, each.target, each.reason) for each in plan.commands]
