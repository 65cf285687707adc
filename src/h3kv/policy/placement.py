"""Where segments lie: by recency, within caps.

    sealed --> HOST --write_behind, pressure--> HOST + NVME --room--> NVME --reuse--> HOST + NVME
                                                             NVME --room--> gone

Segments are written to NVME in the background, so that room in HOST can be made by forgetting alone. A segment that
lies on NVME is read from there; it comes back to HOST while it is pinned, and only into room that is free.

A plan assumes that it is carried out: dropped room counts as free and the room of a copy as taken, until a report says
otherwise.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from h3kv.core.types import SegmentId, Tier
from h3kv.policy.eviction import Candidate, order_evictions
from h3kv.policy.placement_state import (
    Copy,
    Drop,
    Event,
    KnownEvent,
    MoveAsked,
    MoveFailed,
    MoveNotAsked,
    PlacedSegment,
    PlacementConfig,
    PlacementState,
    Plan,
    Room,
    RoomNeeded,
    RoomReported,
    SegmentAppeared,
    SegmentGone,
    SegmentHeld,
    SegmentLeft,
    SegmentLetGo,
    SegmentPinned,
    SegmentPlaced,
    SegmentTouched,
    SegmentUnpinned,
    behind,
)

__all__ = [
    "Copy",
    "Drop",
    "Event",
    "MoveAsked",
    "MoveFailed",
    "MoveNotAsked",
    "PlacementConfig",
    "PlacementState",
    "Plan",
    "RoomNeeded",
    "RoomReported",
    "SegmentAppeared",
    "SegmentGone",
    "SegmentHeld",
    "SegmentLeft",
    "SegmentLetGo",
    "SegmentPinned",
    "SegmentPlaced",
    "SegmentTouched",
    "SegmentUnpinned",
    "step",
]


def step(state: PlacementState, events: Sequence[Event], now_ns: int) -> tuple[PlacementState, Plan]:
    """The state after these events and the plan that follows, both functions of the arguments alone.

    Without events the plan is empty. Events about unknown segments, such as the end of a copy whose segment is gone,
    change nothing.

    Args:
        state: of the step before; not changed.
        events: in the order in which they happened.
        now_ns: on the caller's clock, which never goes back.

    Cost: copies the table of segments, O(n); sorts it, O(n log n), in steps in which room is missing.
    """
    assert now_ns >= state.now_ns, "the clock went back"
    if not events:
        return state, ()
    draft = _Draft(state, now_ns)
    for event in events:
        draft.fold(event)
    is_host_wanted = state.needs.get(Tier.HOST) or draft.needs.get(Tier.HOST)
    draft.plan_host_room()
    draft.plan_nvme_room()
    if not is_host_wanted:
        # Room that was just made is for whoever waits for it.
        draft.plan_reuse()
    draft.plan_asked(may_promote=not is_host_wanted)
    draft.plan_write_behind()
    return draft.freeze(), tuple(draft.plan)


class _Draft:
    """A state while one step changes it, and the plan so far."""

    def __init__(self, state: PlacementState, now_ns: int) -> None:
        self.config = state.config
        self.now_ns = now_ns
        self.segments = dict(state.segments)
        self.unwritten = dict(state.unwritten)
        self.missed = dict(state.missed)
        self.copies = dict(state.copies)
        self.asked = dict(state.asked)
        self.rooms = dict(state.rooms)
        self.needs = dict(state.needs)
        self.tick = state.tick
        self.plan: list[Copy | Drop] = []

    def freeze(self) -> PlacementState:
        return PlacementState(
            config=self.config,
            segments=self.segments,
            unwritten=self.unwritten,
            missed=self.missed,
            copies=self.copies,
            asked=self.asked,
            rooms=self.rooms,
            needs=self.needs,
            tick=self.tick,
            now_ns=self.now_ns,
        )

    # Events

    def fold(self, event: Event) -> None:
        match event:
            case RoomReported(tier, capacity_blocks, free_blocks):
                self.rooms[tier] = Room(capacity_blocks, free_blocks)
            case RoomNeeded(tier, blocks):
                self.needs[tier] = blocks
                if tier is Tier.HOST and blocks > 0:
                    self._try_again()
            case SegmentAppeared(segment, parent, blocks, tiers):
                self.tick += 1
                known = self.segments.get(segment)
                pins = 0 if known is None else known.pins
                self._set(PlacedSegment(segment, parent, blocks, tiers, pins, last_used=self.tick))
            case SegmentGone(segment):
                for table in (self.segments, self.copies, self.asked, self.unwritten, self.missed):
                    table.pop(segment, None)
            case MoveNotAsked(segment):
                self.asked.pop(segment, None)
            case _:
                known = self.segments.get(event.segment)
                if known is not None:
                    self._fold_known(known, event)

    def _fold_known(self, known: PlacedSegment, event: KnownEvent) -> None:
        self.tick += 1
        match event:
            case SegmentTouched():
                held_back = known.held_back & {Tier.HOST} if self._rests(known) else frozenset()
                known = replace(known, last_used=self.tick, held_back=held_back)
            case SegmentPinned():
                held_back = known.held_back - {Tier.HOST}
                known = replace(known, last_used=self.tick, pins=known.pins + 1, held_back=held_back)
            case SegmentUnpinned():
                assert known.pins > 0, f"segment {known.segment} is not pinned"
                known = replace(known, last_used=self.tick, pins=known.pins - 1)
            case SegmentHeld() | SegmentLetGo():
                known = replace(known, is_held=isinstance(event, SegmentHeld))
            case SegmentPlaced(tier=tier):
                self._end_copy(known.segment, tier)
                known = replace(known, tiers=known.tiers | {tier})
                asked = self.asked.get(known.segment)
                if asked is not None and tier is asked.target is Tier.HOST:
                    # As good as used now: what was asked for is not the next to go.
                    known = replace(self._rested(known), last_used=self.tick)
            case SegmentLeft(tier=tier):
                known = replace(known, tiers=known.tiers - {tier})
            case MoveFailed(target=target):
                self._end_copy(known.segment, target)
                known = replace(known, held_back=known.held_back | {target})
            case MoveAsked(target=target):
                known = replace(known, held_back=known.held_back - {target})
                self.asked[known.segment] = event
        self._set(known)

    def _try_again(self) -> None:
        """What found no room on NVMe may find it now; while it is pinned or held it can leave HOST in no other way."""
        for segment in self.unwritten:
            known = self.segments[segment]
            if known.stays and Tier.NVME in known.held_back:
                self._set(replace(known, held_back=known.held_back - {Tier.NVME}))

    def _end_copy(self, segment: SegmentId, target: Tier) -> None:
        if segment in self.copies and self.copies[segment].target is target:
            del self.copies[segment]

    def _set(self, segment: PlacedSegment) -> None:
        """Keep a segment as it is now, and the two queues that follow from it."""
        self.segments[segment.segment] = segment
        if Tier.HOST in segment.tiers and Tier.NVME not in segment.tiers:
            self.unwritten.setdefault(segment.segment)
        else:
            self.unwritten.pop(segment.segment, None)
        if segment.pins > 0 and segment.tiers == {Tier.NVME}:
            self.missed.setdefault(segment.segment)
        else:
            self.missed.pop(segment.segment, None)

    # Room

    def plan_host_room(self) -> None:
        """Forget what also lies on NVME; write more of it there; without that, give segments up."""
        need = self.needs.get(Tier.HOST, 0)
        if self._missing(Tier.HOST, max(need, self.config.host_free_blocks_min)) <= 0:
            self.needs.pop(Tier.HOST, None)
            return
        kept_twice = [each for each in self.segments.values() if {Tier.HOST, Tier.NVME} <= each.tiers]
        for each in sorted(kept_twice, key=lambda each: (each.pins > 0, self._rests(each), each.last_used)):
            # Headroom alone is no reason to take what a running sequence reads, or what was just asked for.
            is_spared = each.pins > 0 or self._rests(each)
            wanted = need if is_spared else max(need, self.config.host_free_blocks_min)
            if self._missing(Tier.HOST, wanted) > 0 and each.segment not in self.copies:
                # What a running sequence reads would otherwise come back at once, and be dropped again.
                self._drop(replace(each, held_back=each.held_back | {Tier.HOST}), Tier.HOST, "room")
        coming = sum(self.segments[copy.segment].blocks for copy in self.copies.values() if copy.source is Tier.HOST)
        coming += self._plan_pressure(self._missing(Tier.HOST, need) - coming)
        # The end of a write that is under way gives room, or lets another one start.
        if self._writes() == 0:
            self._give_up(self._missing(Tier.HOST, need))
        if self._missing(Tier.HOST, need) <= 0:
            self.needs.pop(Tier.HOST, None)

    def _plan_pressure(self, missing: int) -> int:
        """Write the least recently used segments to NVME. Returns the blocks that will become free by that."""
        coming = 0
        if missing <= 0:
            return coming
        waiting = [self.segments[segment] for segment in self.unwritten]
        for each in sorted(waiting, key=lambda each: (each.pins > 0, each.last_used)):
            if coming < missing and self._copy(each, Tier.HOST, Tier.NVME, "pressure"):
                coming += each.blocks
        return coming

    def _give_up(self, missing: int) -> None:
        """Drop unwritten segments for good, with all that continues them; none where too few may go."""
        victims: list[PlacedSegment] = []
        passed: dict[SegmentId, list[PlacedSegment]] = {}
        for each in self._eviction_order():
            if missing > 0 and each.segment in self.unwritten:
                victims += (going := [*behind(each, passed), each])
                missing -= sum(one.blocks for one in going if Tier.HOST in one.tiers)
            elif each.parent is not None:
                passed.setdefault(each.parent, []).append(each)
        for each in victims if missing <= 0 else ():
            for tier in sorted(each.tiers):
                self._drop(self.segments[each.segment], tier, "room")

    def plan_nvme_room(self) -> None:
        """Make the room on NVME that is waited for."""
        need = self.needs.get(Tier.NVME, 0)
        self._make_nvme_room(need, used_before=None)
        if self._missing(Tier.NVME, need) <= 0:
            self.needs.pop(Tier.NVME, None)

    def _make_nvme_room(self, blocks: int, *, used_before: int | None) -> bool:
        """Drop copies on NVME until so many blocks are free. False, and nothing dropped, when too few may go.

        Args:
            blocks: to be free.
            used_before: only what was last used before this tick may go; anything where None.
        """
        missing = self._missing(Tier.NVME, blocks)
        if missing <= 0:
            return True
        victims: list[PlacedSegment] = []
        kept: dict[SegmentId, None] = {}
        for each in self._eviction_order():
            is_last_copy = each.tiers == {Tier.NVME}
            goes = (
                missing > 0
                and Tier.NVME in each.tiers
                and not (is_last_copy and each.segment in kept)
                and (used_before is None or each.last_used < used_before)
            )
            if goes:
                victims.append(each)
                missing -= each.blocks
            # What stays somewhere is only found while the segments before it exist.
            if each.parent is not None and not (goes and is_last_copy):
                kept[each.parent] = None
        if missing > 0:
            return False
        for each in victims:
            self._drop(replace(each, held_back=each.held_back | {Tier.NVME}), Tier.NVME, "room")
        return True

    # Copies

    def plan_reuse(self) -> None:
        """Bring pinned segments back into room that nobody else wants."""
        for segment in list(self.missed):
            each = self.segments[segment]
            wanted = self.config.host_free_blocks_min + each.blocks
            if Tier.HOST in self.rooms and self._missing(Tier.HOST, wanted) <= 0:
                self._copy(each, Tier.NVME, Tier.HOST, "reuse")

    def plan_asked(self, *, may_promote: bool) -> None:
        """Do what was asked for, as far as bounds allow it now. What has ended or cannot be done is taken off."""
        for asked in list(self.asked.values()):
            each = self.segments[asked.segment]
            is_up = asked.target is Tier.HOST
            if each.segment in self.copies:
                continue
            if (Tier.HOST in each.tiers) == is_up or asked.target in each.held_back or not each.tiers:
                del self.asked[each.segment]
            elif is_up:
                has_room = self._missing(Tier.HOST, self.config.host_free_blocks_min + each.blocks) <= 0
                if not (may_promote and has_room and self._copy(each, Tier.NVME, Tier.HOST, asked.reason)):
                    del self.asked[each.segment]
            elif Tier.NVME in each.tiers:
                del self.asked[each.segment]
                self._drop(self._rested(replace(each, held_back=each.held_back | {Tier.HOST})), Tier.HOST, asked.reason)
            elif self._writes() < self.config.copies_in_flight_max and not self._copy(
                each, Tier.HOST, Tier.NVME, asked.reason
            ):
                del self.asked[each.segment]

    def plan_write_behind(self) -> None:
        """Write sealed segments, oldest first. One that finds no room waits until it is used again."""
        if not (self.config.write_behind and self.config.has_nvme):
            return
        for segment in list(self.unwritten):
            each = self.segments[segment]
            if self._writes() >= self.config.copies_in_flight_max:
                return
            if segment in self.copies or Tier.NVME in each.held_back:
                continue
            if not self._copy(each, Tier.HOST, Tier.NVME, "write_behind"):
                self._set(replace(each, held_back=each.held_back | {Tier.NVME}))

    def _copy(self, each: PlacedSegment, source: Tier, target: Tier, reason: str) -> bool:
        """Start a copy unless a bound forbids it."""
        is_allowed = (
            (self.config.has_nvme or target is not Tier.NVME)
            and (target is Tier.HOST or self._writes() < self.config.copies_in_flight_max)
            and each.segment not in self.copies
            and target not in each.held_back
        )
        if not is_allowed:
            return False
        if target is Tier.NVME:
            # Nothing goes for the sake of what was used longer ago.
            used_before = self.tick + 1 if each.stays else each.last_used
            wanted = self.needs.get(Tier.NVME, 0) + each.blocks
            if not self._make_nvme_room(wanted, used_before=used_before):
                return False
        self.copies[each.segment] = Copy(each.segment, source, target, reason)
        self.plan.append(self.copies[each.segment])
        self._change_free(target, -each.blocks)
        return True

    def _rests(self, each: PlacedSegment) -> bool:
        return self.now_ns < each.rests_until_ns

    def _rested(self, each: PlacedSegment) -> PlacedSegment:
        return replace(each, rests_until_ns=self.now_ns + self.config.hysteresis_ns)

    def _writes(self) -> int:
        """How many copies to NVME are under way."""
        return sum(copy.target is Tier.NVME for copy in self.copies.values())

    def _drop(self, each: PlacedSegment, tier: Tier, reason: str) -> None:
        self.plan.append(Drop(each.segment, tier, reason))
        self._change_free(tier, each.blocks)
        self._set(replace(each, tiers=each.tiers - {tier}))

    def _missing(self, tier: Tier, blocks: int) -> int:
        """How many blocks are not free of so many. A tier that never reported has all of them."""
        room = self.rooms.get(tier)
        return 0 if room is None else blocks - room.free_blocks

    def _change_free(self, tier: Tier, blocks: int) -> None:
        room = self.rooms.get(tier)
        if room is not None:
            self.rooms[tier] = replace(room, free_blocks=room.free_blocks + blocks)

    def _eviction_order(self) -> list[PlacedSegment]:
        """Segments that nobody uses, least recently used first, each after all that continue it."""
        candidates = [
            # A segment in flight stays, and so does one that is held, as if they were pinned.
            Candidate(each.segment, each.parent, each.last_used, each.stays + (each.segment in self.copies))
            for each in self.segments.values()
            if each.tiers
        ]
        return [self.segments[segment] for segment in order_evictions(candidates)]
