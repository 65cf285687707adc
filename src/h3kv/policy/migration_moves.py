"""The migration rules: which segments move, and why the others do not."""

from __future__ import annotations

import heapq
from collections.abc import Iterator

from h3kv.core.types import Tier
from h3kv.policy.migration_config import TierPair
from h3kv.policy.migration_draft import Draft
from h3kv.policy.migration_heat import is_hotter
from h3kv.policy.migration_state import Claim, Direction, HoldReason, MoveReason, TrackedSegment
from h3kv.policy.migration_tables import SegmentRef


def keep_claims(draft: Draft) -> None:
    """Promote what earned its place and has it now."""
    for ref, claim in list(draft.claims.items()):
        if claim.commands:
            continue
        hold = _bar(draft, draft.segments[ref], Direction.PROMOTE) or _promotion_limit(draft, ref, claim.pair)
        if hold is None:
            draft.command(ref, claim.pair, MoveReason.EARNED)
        elif hold in {HoldReason.BUDGET, HoldReason.COMMANDS_MAX}:
            continue
        else:
            draft.hold(hold)
        del draft.claims[ref]


def promote(draft: Draft) -> None:
    """Promote what this step's events touched, hottest first."""
    coldest: dict[Tier, Iterator[SegmentRef]] = {}
    for ref in sorted(draft.touched, key=lambda ref: (-draft.segments[ref].heat, ref)):
        pair = _pair_above(draft, draft.segments[ref])
        if pair is not None:
            hold = _promote(draft, ref, pair, coldest=coldest)
            if hold is not None:
                draft.hold(hold)


def demote(draft: Draft) -> None:
    """Demote idle segments, coldest first, from fast tiers that are too full or unsteady."""
    for pair in draft.config.pairs:
        if pair.fast not in draft.rooms:
            continue
        reason, used_fraction_min = _pressure(draft, pair.fast)
        if reason is not None:
            _shrink(draft, pair, reason, used_bytes_min=used_fraction_min * draft.rooms[pair.fast].capacity_bytes)


def _promote(
    draft: Draft, ref: SegmentRef, pair: TierPair, *, coldest: dict[Tier, Iterator[SegmentRef]]
) -> HoldReason | None:
    """Promote a touched segment, or make room for it. Returns why neither was done."""
    segment = draft.segments[ref]
    if ref in draft.claims:
        return HoldReason.IN_FLIGHT
    barred = _bar(draft, segment, Direction.PROMOTE)
    if barred is not None:
        return barred
    room = draft.rooms.get(pair.fast)
    if room is None:
        return HoldReason.ROOM_UNKNOWN
    free_after = draft.free_bytes(pair.fast) - segment.size_bytes
    if free_after >= draft.config.promote_free_fraction_min * room.capacity_bytes:
        limit = _promotion_limit(draft, ref, pair)
        if limit is None:
            draft.command(ref, pair, MoveReason.ROOM)
        return limit
    if segment.touches_in_row < draft.config.promote_touches_in_row:
        return HoldReason.FEW_TOUCHES
    return _displace(draft, ref, pair, coldest=coldest)


def _displace(
    draft: Draft, ref: SegmentRef, pair: TierPair, *, coldest: dict[Tier, Iterator[SegmentRef]]
) -> HoldReason | None:
    """Demote the coldest segments for one that is hotter by the margin: as many as its size asks for, or none.

    `coldest` goes on where the last call in this step ended: what was not cold enough for a hotter one is not for this.
    """
    if len(draft.claims) >= draft.config.commands_in_flight_max:
        return HoldReason.COMMANDS_MAX
    # One demotion and the promotion at least: looking for the coldest costs more than this.
    if len(draft.commands) + 2 > draft.config.commands_in_flight_max:
        return HoldReason.COMMANDS_MAX
    needed = draft.segments[ref].size_bytes
    victims: list[SegmentRef] = []
    if pair.fast not in coldest:
        coldest[pair.fast] = _by_heat(draft, pair.fast)
    queue = coldest[pair.fast]
    while needed > 0:
        victim = next(queue, None)
        if victim is None:
            return HoldReason.NOT_HOTTER
        if not is_hotter(draft.segments[ref].heat, draft.segments[victim].heat, draft.config.displace_margin):
            return HoldReason.NOT_HOTTER
        if _bar(draft, draft.segments[victim], Direction.DEMOTE) is None:
            victims.append(victim)
            needed -= draft.segments[victim].size_bytes
    copied = [each for each in victims if pair.slow not in draft.segments[each].tiers]
    moved_bytes = sum(draft.segments[each].size_bytes for each in copied)
    limit = _limit(draft, Direction.DEMOTE, moved_bytes, pair.slow, count=len(victims) + 1)
    if limit is None:
        commands = [draft.command(each, pair, MoveReason.DISPLACED).id for each in victims]
        # Time for the demotions, and then for the budget of the promotion.
        deadline_ns = draft.now_ns + 2 * draft.config.command_timeout_ns
        draft.claims[ref] = Claim(pair, frozenset(commands), deadline_ns)
    return limit


def _pressure(draft: Draft, tier: Tier) -> tuple[MoveReason | None, float]:
    """Why a fast tier should shrink, and down to which used share."""
    capacity_bytes = draft.rooms[tier].capacity_bytes
    used_bytes = draft.used_bytes(tier)
    if used_bytes >= draft.config.watermark_high * capacity_bytes:
        draft.shrinking.add(tier)
    elif used_bytes <= draft.config.watermark_low * capacity_bytes:
        draft.shrinking.discard(tier)
    if tier in draft.shrinking:
        return MoveReason.WATERMARK, draft.config.watermark_low
    _, jitter_ns = draft.jitter_ns.get(tier, ("", 0.0))
    if jitter_ns > draft.config.jitter_ns_max:
        return MoveReason.JITTER, draft.config.jitter_used_fraction_min
    return None, 1.0


def _shrink(draft: Draft, pair: TierPair, reason: MoveReason, *, used_bytes_min: float) -> None:
    excess_bytes = draft.used_bytes(pair.fast) - used_bytes_min
    if excess_bytes <= 0:
        return
    if len(draft.commands) >= draft.config.commands_in_flight_max:
        draft.hold(HoldReason.COMMANDS_MAX)
        return
    for ref in _idle_by_heat(draft, pair.fast):
        segment = draft.segments[ref]
        hold = _bar(draft, segment, Direction.DEMOTE)
        if hold is None:
            moved_bytes = 0 if pair.slow in segment.tiers else segment.size_bytes
            hold = _limit(draft, Direction.DEMOTE, moved_bytes, pair.slow, count=1)
        if hold is None:
            draft.command(ref, pair, reason)
            excess_bytes -= segment.size_bytes
            if excess_bytes <= 0:
                return
            continue
        draft.hold(hold)
        if hold in {HoldReason.BUDGET, HoldReason.COMMANDS_MAX}:
            return


def _bar(draft: Draft, segment: TrackedSegment, direction: Direction) -> HoldReason | None:
    """What about the segment itself forbids to move it."""
    if segment.is_pinned:
        return HoldReason.PINNED
    if segment.command is not None:
        return HoldReason.IN_FLIGHT
    is_back = segment.moved not in {None, direction} and draft.now_ns - segment.moved_ns < draft.config.hysteresis_ns
    if is_back or draft.now_ns < segment.rests_until_ns:
        return HoldReason.HYSTERESIS
    return None


def _promotion_limit(draft: Draft, ref: SegmentRef, pair: TierPair) -> HoldReason | None:
    if pair.fast in draft.segments[ref].tiers or pair.slow not in draft.segments[ref].tiers:
        return HoldReason.ROOM_LOST
    return _limit(draft, Direction.PROMOTE, draft.segments[ref].size_bytes, pair.fast, count=1)


def _limit(draft: Draft, direction: Direction, moved_bytes: int, target: Tier, *, count: int) -> HoldReason | None:
    """Which bound forbids to start so many commands that copy so many bytes."""
    if len(draft.commands) + count > draft.config.commands_in_flight_max:
        return HoldReason.COMMANDS_MAX
    if moved_bytes > 0 and target not in draft.rooms:
        return HoldReason.ROOM_UNKNOWN
    if moved_bytes > 0 and draft.free_bytes(target) < moved_bytes:
        return HoldReason.TARGET_FULL
    if not draft.affords(direction, moved_bytes):
        return HoldReason.BUDGET
    return None


def _pair_above(draft: Draft, segment: TrackedSegment) -> TierPair | None:
    """The pair in which a segment could be promoted: its slow tier is the fastest in which the segment lies."""
    for pair in draft.config.pairs:
        if pair.slow in segment.tiers and pair.fast not in segment.tiers:
            return pair
    return None


def _by_heat(draft: Draft, tier: Tier) -> Iterator[SegmentRef]:
    """Segments of a fast tier, coldest first. Cost: O(n) to start, O(log n) for each that is taken."""
    return _popped([(segment.heat, ref) for shard in draft.lying[tier].filled for ref, segment in shard.items()])


def _idle_by_heat(draft: Draft, tier: Tier) -> Iterator[SegmentRef]:
    """Those of them that are idle, coldest first. The others are counted as held."""
    touched_ns_max = draft.now_ns - draft.config.eviction_threshold_ns
    members = draft.lying[tier]
    heap = [
        (segment.heat, ref)
        for shard in members.filled
        for ref, segment in shard.items()
        if segment.touched_ns <= touched_ns_max
    ]
    if len(heap) < len(members):
        draft.hold(HoldReason.NOT_IDLE, len(members) - len(heap))
    return _popped(heap)


def _popped(heap: list[tuple[float, SegmentRef]]) -> Iterator[SegmentRef]:
    heapq.heapify(heap)
    return (heapq.heappop(heap)[1] for _ in range(len(heap)))
