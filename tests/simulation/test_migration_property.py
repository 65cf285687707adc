"""Whatever processes report, in whatever order: bounds hold, pinned segments stay, commands act once."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from h3kv.core.types import SegmentId
from h3kv.core.units import NS_PER_MS, NS_PER_S
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
    OwnerLeft,
    SegmentReported,
    Touch,
    TouchesReported,
)

from .modelled_tiers import HOST, NVME, ModelledTiers

SEGMENT_BYTES = 10
HOST_SEGMENTS = 10
CONFIG = MigrationConfig(
    touch_mass_min=0.1,
    eviction_threshold_ns=NS_PER_S // 5,
    hysteresis_ns=NS_PER_S,
    heat_half_life_ns=NS_PER_S,
    watermark_high=0.9,
    watermark_low=0.7,
    jitter_used_fraction_min=0.4,
    displace_margin=1.0,
    promote_bytes_per_tick=25,
    demote_bytes_per_tick=15,
    commands_in_flight_max=6,
    segments_max=40,
)


class Migration(RuleBasedStateMachine):
    @initialize()
    def start(self) -> None:
        self.now_ns = 0
        self.tick = 0
        self.boots = 0
        self.state = MigrationState(CONFIG)
        self.moved: dict[SegmentId, tuple[int, Direction]] = {}
        self.spent: Counter[tuple[int, Direction]] = Counter()
        self.join()

    def join(self) -> None:
        self.boots += 1
        self.owner = Owner("gpu_worker", f"boot-{self.boots}")
        self.tiers = ModelledTiers(self.owner, HOST_SEGMENTS, SEGMENT_BYTES)
        self.tell(OwnerJoined(self.owner), *self.tiers.rooms())
        for number in range(1, 9):
            self.seal(number)
            self.now_ns += CONFIG.tick_ns
        for segment in (SegmentId(1), SegmentId(2), SegmentId(3), SegmentId(4)):
            self.tiers.place(segment, frozenset({NVME}))
            self.tell(self.tiers.report(segment), *self.tiers.rooms())

    def tell(self, *events: Event) -> None:
        before = self.state
        self.state, plan = step(before, events, self.now_ns)
        assert step(before, list(events), self.now_ns) == (self.state, plan), "two runs of the same events differ"
        for command in plan.commands:
            self.check(command, before)
        self.tiers.send(plan.commands)

    def check(self, command: Command, before: MigrationState) -> None:
        known = self.tiers.segments[command.segment]
        assert not known.is_pinned, "a pinned segment was moved"
        assert command.source in known.tiers
        assert command.target not in known.tiers or command.moved_bytes == 0
        assert all(each.ref != command.ref for each in before.commands.values() if each.id in self.state.commands)
        newest = self.moved.get(command.segment)
        if newest is not None and newest[1] is not command.direction:
            assert self.now_ns - newest[0] >= CONFIG.hysteresis_ns, "moved back too early"
        self.moved[command.segment] = (self.now_ns, command.direction)
        self.spent[self.now_ns // CONFIG.tick_ns, command.direction] += command.moved_bytes

    def some(self, data: st.DataObject) -> SegmentId:
        return data.draw(st.sampled_from(list(self.tiers.segments)))

    @rule(number=st.integers(9, 60))
    def seal(self, number: int) -> None:
        segment = SegmentId(number)
        if segment not in self.tiers.segments:
            self.tell(*self.tiers.seal(segment), *self.tiers.rooms())

    @rule(data=st.data(), masses=st.lists(st.sampled_from([0.0, 0.05, 0.1, 1.0]), max_size=8))
    def touch(self, data: st.DataObject, masses: list[float]) -> None:
        self.tick += 1
        touches = tuple(Touch(self.some(data), mass) for mass in masses)
        self.tell(TouchesReported(self.owner, self.tick, touches))

    @rule(data=st.data(), count=st.integers(1, 4))
    def touch_in_a_row(self, data: st.DataObject, count: int) -> None:
        below = [segment for segment, each in self.tiers.segments.items() if HOST not in each.tiers]
        touches = tuple(Touch(segment, 1.0) for segment in (below or list(self.tiers.segments))[:count])
        for _ in range(3):
            self.tick += 1
            self.now_ns += CONFIG.tick_ns
            self.tell(TouchesReported(self.owner, self.tick, touches))

    @rule()
    def touch_what_just_left(self) -> None:
        """Idle segments leave, and are wanted at once."""
        self.now_ns += CONFIG.eviction_threshold_ns
        self.tell(JitterReported(self.owner, HOST, 80.0), *self.tiers.rooms())
        left = [command.segment for command in self.tiers.waiting if command.target is NVME]
        self.carry_out()
        self.tick += 1
        self.now_ns += CONFIG.tick_ns
        self.tell(TouchesReported(self.owner, self.tick, tuple(Touch(segment, 1.0) for segment in left)))

    @rule(data=st.data())
    def pin_or_unpin(self, data: st.DataObject) -> None:
        segment = self.some(data)
        known = self.tiers.segments[segment]
        if known.is_pinned or sum(each.is_pinned for each in self.tiers.segments.values()) < HOST_SEGMENTS // 3:
            known.is_pinned = not known.is_pinned
            self.tell(self.tiers.report(segment))

    @rule(milliseconds=st.sampled_from([1, 99, 100, 700, 1_500]))
    def wait(self, milliseconds: int) -> None:
        self.now_ns += milliseconds * NS_PER_MS
        self.tell()

    @rule()
    def write_behind(self) -> None:
        self.tell(*self.tiers.write_behind())

    @rule(jitter_ns=st.sampled_from([0.0, 25.0, 80.0]))
    def tremble(self, jitter_ns: float) -> None:
        self.tell(JitterReported(self.owner, HOST, jitter_ns))

    @rule()
    def carry_out(self) -> None:
        self.tell(*self.tiers.carry_out(), *self.tiers.rooms())

    @precondition(lambda self: self.tiers.waiting)
    @rule(data=st.data())
    def lose_a_command(self, data: st.DataObject) -> None:
        self.tiers.waiting.remove(data.draw(st.sampled_from(self.tiers.waiting)))

    @precondition(lambda self: self.tiers.waiting)
    @rule(is_remembered=st.booleans())
    def carry_out_twice(self, *, is_remembered: bool) -> None:
        commands = list(self.tiers.waiting)
        ends = self.tiers.carry_out()
        places = {segment: replace(each) for segment, each in self.tiers.segments.items()}
        if not is_remembered:
            self.tiers.seen.clear()
        self.tiers.send(tuple(commands))
        again = self.tiers.carry_out()
        assert self.tiers.segments == places, "a command acted twice"
        self.tell(*ends)
        before = self.state
        self.tell(*again)
        assert replace(self.state, balances=before.balances) == before, "the end of a command counted twice"

    @rule()
    def restart(self) -> None:
        self.moved.clear()
        if self.boots % 2:
            self.tell(OwnerLeft(self.owner))
            assert not self.state.segments
        self.join()

    @rule(number=st.integers(1, 60))
    def hear_of_earlier_lives(self, number: int) -> None:
        stale = Owner(self.owner.name, "boot-0")
        before = self.state
        self.tell(SegmentReported(stale, SegmentId(number), 1, SEGMENT_BYTES, frozenset({NVME})), OwnerLeft(stale))
        assert self.state.segments == before.segments

    @invariant()
    def bounds_hold(self) -> None:
        state = self.state
        budgets = {
            Direction.PROMOTE: CONFIG.promote_bytes_per_tick,
            Direction.DEMOTE: CONFIG.demote_bytes_per_tick,
        }
        assert all(moved_bytes <= budgets[direction] for (_, direction), moved_bytes in self.spent.items())
        assert len(state.segments) <= CONFIG.segments_max
        assert len(state.commands) <= CONFIG.commands_in_flight_max
        assert len(state.claims) <= CONFIG.commands_in_flight_max
        refs = [command.ref for command in state.commands.values()]
        assert len(refs) == len(set(refs)), "two commands for one segment"
        assert {ref for ref, each in state.segments.items() if each.command is not None} == set(refs)
        assert all(command.deadline_ns > state.now_ns for command in state.commands.values())

    @invariant()
    def tables_agree(self) -> None:
        state = self.state
        assert set(state.lying[HOST]) == {ref for ref, each in state.segments.items() if HOST in each.tiers}
        assert set(state.claims) <= set(state.segments)
        self.tiers.check_integrity()


TestMigration = Migration.TestCase
TestMigration.settings = settings(max_examples=60, stateful_step_count=40)
