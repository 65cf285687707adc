"""The placement policy against an executor that carries out its plans in a world of its own."""

from dataclasses import dataclass, field

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from h3kv.core.types import SegmentId, Tier
from h3kv.policy.placement import (
    Copy,
    Drop,
    Event,
    MoveAsked,
    MoveFailed,
    MoveNotAsked,
    PlacementConfig,
    PlacementState,
    Plan,
    RoomNeeded,
    RoomReported,
    SegmentAppeared,
    SegmentGone,
    SegmentLeft,
    SegmentPinned,
    SegmentPlaced,
    SegmentTouched,
    SegmentUnpinned,
    step,
)

CAPACITY = {Tier.HOST: 48, Tier.NVME: 64}
SIZES = st.sampled_from([1, 2, 4, 8, 16])
WRITES_MAX = 2


@dataclass
class Segment:
    parent: SegmentId | None
    blocks: int
    tiers: list[Tier] = field(default_factory=list)
    pins: int = 0


class Placement(RuleBasedStateMachine):
    @initialize(has_nvme=st.booleans(), write_behind=st.booleans(), headroom=st.sampled_from([0, 5, 16]))
    def start(self, *, has_nvme: bool, write_behind: bool, headroom: int) -> None:
        self.config = PlacementConfig(has_nvme, write_behind, WRITES_MAX, headroom)
        self.state = self.replayed = PlacementState(self.config)
        self.tiers = [Tier.HOST, Tier.NVME] if has_nvme else [Tier.HOST]
        self.segments: dict[SegmentId, Segment] = {}
        self.copies: dict[SegmentId, Copy] = {}
        self.next = 1
        self.tell()

    def free(self, tier: Tier) -> int:
        used = sum(segment.blocks for segment in self.segments.values() if tier in segment.tiers)
        used += sum(self.segments[copy.segment].blocks for copy in self.copies.values() if copy.target is tier)
        return CAPACITY[tier] - used

    def tell(self, *events: Event) -> None:
        """Events and the rooms, then every command at once but the ends of copies."""
        events = (*events, *(RoomReported(tier, CAPACITY[tier], self.free(tier)) for tier in self.tiers))
        now_ns = self.state.now_ns + 1
        self.state, plan = step(self.state, events, now_ns)
        self.replayed, again = step(self.replayed, list(events), now_ns)
        assert (self.replayed, again) == (self.state, plan), "two runs of the same events differ"
        assert step(self.state, (), now_ns) == (self.state, ())
        follow = self.carry_out(plan)
        if follow:
            self.tell(*follow)

    def carry_out(self, plan: Plan) -> list[Event]:
        events: list[Event] = []
        for command in plan:
            segment = self.segments[command.segment]
            assert command.segment not in self.copies, "a command for a segment in flight"
            match command:
                case Copy(source=source, target=target):
                    assert source in segment.tiers
                    assert target not in segment.tiers
                    assert target in self.tiers
                    assert segment.blocks <= self.free(target), "a copy without room"
                    self.copies[command.segment] = command
                    writes = [copy for copy in self.copies.values() if copy.target is Tier.NVME]
                    assert len(writes) <= WRITES_MAX
                case Drop(tier=tier):
                    assert tier in segment.tiers
                    segment.tiers.remove(tier)
                    assert segment.tiers or segment.pins == 0, "the last copy of a pinned segment was dropped"
                    events.append(SegmentLeft(command.segment, tier))
                    if not segment.tiers:
                        del self.segments[command.segment]
                        events.append(SegmentGone(command.segment))
        return events

    @rule(data=st.data(), blocks=SIZES, is_restored=st.booleans())
    def appear(self, data: st.DataObject, blocks: int, *, is_restored: bool) -> None:
        tier = self.tiers[-1] if is_restored else Tier.HOST
        if blocks > self.free(tier):
            return
        parent = data.draw(st.sampled_from([None, *self.segments]))
        segment = SegmentId(self.next)
        self.next += 1
        self.segments[segment] = Segment(parent, blocks, [tier])
        self.tell(SegmentAppeared(segment, parent, blocks, frozenset({tier})))

    @precondition(lambda self: self.segments)
    @rule(data=st.data(), kind=st.sampled_from(["touch", "pin", "pin", "unpin"]))
    def use(self, data: st.DataObject, kind: str) -> None:
        segment = data.draw(st.sampled_from(list(self.segments)))
        match kind:
            case "touch":
                self.tell(SegmentTouched(segment))
            case "pin":
                self.segments[segment].pins += 1
                self.tell(SegmentPinned(segment))
            case _ if self.segments[segment].pins > 0:
                self.segments[segment].pins -= 1
                self.tell(SegmentUnpinned(segment))

    @precondition(lambda self: self.copies)
    @rule(data=st.data(), is_broken=st.booleans())
    def end_copy(self, data: st.DataObject, *, is_broken: bool) -> None:
        copy = self.copies.pop(data.draw(st.sampled_from(list(self.copies))))
        if is_broken:
            self.tell(MoveFailed(copy.segment, copy.target))
        else:
            self.segments[copy.segment].tiers.append(copy.target)
            self.tell(SegmentPlaced(copy.segment, copy.target))

    @precondition(lambda self: self.segments)
    @rule(data=st.data(), tier=st.sampled_from(list(CAPACITY)), is_withdrawn=st.booleans())
    def ask(self, data: st.DataObject, tier: Tier, *, is_withdrawn: bool) -> None:
        segment = data.draw(st.sampled_from(list(self.segments)))
        self.tell(MoveAsked(segment, tier, "asked"))
        if is_withdrawn:
            self.tell(MoveNotAsked(segment))
            assert segment not in self.state.asked

    @rule(tier=st.sampled_from(list(CAPACITY)), blocks=st.integers(0, 64))
    def need(self, tier: Tier, blocks: int) -> None:
        if tier in self.tiers:
            self.tell(RoomNeeded(tier, blocks))

    @rule(segment=st.integers(1_000, 1_001).map(SegmentId))
    def hear_of_strangers(self, segment: SegmentId) -> None:
        self.tell(SegmentTouched(segment), SegmentPlaced(segment, Tier.HOST), SegmentGone(segment))

    @invariant()
    def both_know_the_same_world(self) -> None:
        if not hasattr(self, "state"):
            return
        known = {segment: list(each.tiers) for segment, each in self.state.segments.items()}
        assert {segment: sorted(tiers) for segment, tiers in known.items()} == {
            segment: sorted(each.tiers) for segment, each in self.segments.items()
        }
        assert self.state.copies == self.copies
        assert self.state.asked.keys() <= self.segments.keys()
        if self.state.asked:
            assert self.copies, "what was asked for waits for nothing"
        for tier in self.tiers:
            assert 0 <= self.free(tier) == self.state.rooms[tier].free_blocks

    @invariant()
    def what_exists_can_be_found(self) -> None:
        for segment in getattr(self, "segments", {}).values():
            assert segment.parent is None or segment.parent in self.segments, "a beginning went before its end"


TestPlacement = Placement.TestCase
TestPlacement.settings = settings(max_examples=150, stateful_step_count=50)
