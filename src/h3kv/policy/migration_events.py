"""How events change what the migration rules know."""

from __future__ import annotations

from h3kv.core.types import Tier
from h3kv.policy.migration_draft import Draft
from h3kv.policy.migration_heat import add_use, first_heat, prolong_use
from h3kv.policy.migration_state import (
    Claim,
    Command,
    Direction,
    Event,
    HoldReason,
    JitterReported,
    MoveEnded,
    Owner,
    OwnerJoined,
    OwnerLeft,
    OwnerState,
    Room,
    RoomReported,
    SegmentGone,
    SegmentReported,
    Touch,
    TouchesReported,
    TrackedSegment,
)
from h3kv.policy.migration_tables import SegmentRef


def fold(draft: Draft, event: Event) -> None:
    """Take one event in. Those of processes that are not there, or no longer, change nothing."""
    match event:
        case OwnerJoined(owner):
            _join(draft, owner)
        case OwnerLeft(owner):
            if draft.knows(owner):
                draft.forget_owner(owner.name)
        case MoveEnded():
            _end_move(draft, event)
        case _:
            if draft.knows(event.owner):
                _fold_known(draft, event)


def expire(draft: Draft) -> None:
    """Forget commands and claims whose deadline has come. A command may have been carried out all the same, so its
    segment counts as moved.
    """
    for command in [each for each in draft.commands.values() if each.deadline_ns <= draft.now_ns]:
        draft.hold(HoldReason.EXPIRED)
        _take_off(draft, command)
        draft.lose_claims(command.id)
        segment = draft.segments[command.ref]
        draft.put(command.ref, segment._replace(moved=command.direction, moved_ns=draft.now_ns))
    for ref in [ref for ref, claim in draft.claims.items() if claim.deadline_ns <= draft.now_ns]:
        draft.hold(HoldReason.EXPIRED)
        del draft.claims[ref]


def _fold_known(
    draft: Draft, event: RoomReported | JitterReported | SegmentReported | SegmentGone | TouchesReported
) -> None:
    match event:
        case RoomReported(owner, tier, capacity_bytes, free_bytes):
            draft.rooms[tier] = Room(owner.name, capacity_bytes, free_bytes)
        case JitterReported(owner, tier, jitter_ns):
            draft.jitter_ns[tier] = (owner.name, jitter_ns)
        case SegmentReported():
            _report(draft, event)
        case SegmentGone(owner, segment):
            draft.forget(SegmentRef(owner.name, segment))
        case TouchesReported(owner, tick, touches):
            _touch_all(draft, owner, tick, touches)


def _join(draft: Draft, owner: Owner) -> None:
    known = draft.owners.get(owner.name)
    if known is not None and known.boot == owner.boot:
        return
    draft.forget_owner(owner.name)
    if len(draft.owners) >= draft.config.owners_max:
        draft.hold(HoldReason.TABLE_FULL)
        return
    draft.owners[owner.name] = OwnerState(owner.boot)


def _report(draft: Draft, event: SegmentReported) -> None:
    ref = SegmentRef(event.owner.name, event.segment)
    known = draft.segments.get(ref)
    if known is None:
        if len(draft.segments) >= draft.config.segments_max:
            draft.hold(HoldReason.TABLE_FULL)
            return
        known = TrackedSegment(
            generation=event.generation,
            size_bytes=event.size_bytes,
            tiers=event.tiers,
            is_pinned=event.is_pinned,
            heat=first_heat(draft.now_ns, draft.config.heat_half_life_ns),
            touched_ns=draft.now_ns,
        )
    changed = known._replace(
        generation=event.generation,
        size_bytes=event.size_bytes,
        tiers=event.tiers,
        is_pinned=event.is_pinned,
    )
    moved = _moved(draft, known.tiers, event.tiers)
    if moved is not None:
        # The data plane moves segments by itself too: what it did is not undone at once.
        changed = changed._replace(moved=moved, moved_ns=draft.now_ns)
    draft.put(ref, changed)


def _moved(draft: Draft, before: frozenset[Tier], after: frozenset[Tier]) -> Direction | None:
    """Which way a segment went between fast tiers and others."""
    if any(tier in before and tier not in after for tier in draft.lying):
        return Direction.DEMOTE
    if any(tier in after and tier not in before for tier in draft.lying):
        return Direction.PROMOTE
    return None


def _touch_all(draft: Draft, owner: Owner, tick: int, touches: tuple[Touch, ...]) -> None:
    newest = draft.owners[owner.name].tick
    if newest is not None and tick < newest:
        return
    draft.owners[owner.name] = OwnerState(owner.boot, tick)
    for segment, mass in touches:
        ref = SegmentRef(owner.name, segment)
        known = draft.segments.get(ref)
        if mass < draft.config.touch_mass_min:
            draft.hold(HoldReason.BELOW_THRESHOLD)
        elif known is None:
            draft.hold(HoldReason.UNKNOWN_SEGMENT)
        elif known.touched_tick != tick:
            is_next = known.touched_tick == tick - 1
            draft.put(
                ref,
                known._replace(
                    heat=_warmed(draft, known),
                    touched_ns=draft.now_ns,
                    touched_tick=tick,
                    touches_in_row=known.touches_in_row + 1 if is_next else 1,
                ),
            )
            draft.touched.setdefault(ref)


def _warmed(draft: Draft, segment: TrackedSegment) -> float:
    """Heat of a segment that is touched now. A touch after it was idle begins another use."""
    passed_ns = draft.now_ns - segment.touched_ns
    if passed_ns < draft.config.eviction_threshold_ns:
        return prolong_use(segment.heat, passed_ns, draft.config.heat_half_life_ns)
    return add_use(segment.heat, draft.now_ns, draft.config.heat_half_life_ns)


def _end_move(draft: Draft, event: MoveEnded) -> None:
    command = draft.commands.get(event.command)
    if command is None:
        draft.hold(HoldReason.UNKNOWN_COMMAND)
        return
    before = _take_off(draft, command)
    if event.error is None:
        if command.target not in before.tiers:
            draft.change_free(command.target, -command.size_bytes)
        if command.source in before.tiers and command.source not in event.tiers:
            draft.change_free(command.source, command.size_bytes)
        after = before._replace(moved=command.direction, moved_ns=draft.now_ns)
        _make_room(draft, command)
    else:
        draft.hold(HoldReason.FAILED)
        after = before._replace(rests_until_ns=draft.now_ns + draft.config.hysteresis_ns)
        draft.lose_claims(command.id)
    draft.put(command.ref, after._replace(generation=event.generation, tiers=event.tiers))


def _take_off(draft: Draft, command: Command) -> TrackedSegment:
    """A command is under way no longer. Returns its segment."""
    draft.take_off(command.id)
    segment = draft.segments[command.ref]._replace(command=None)
    draft.put(command.ref, segment)
    return segment


def _make_room(draft: Draft, command: Command) -> None:
    """A demotion ended well: claims wait for it no longer."""
    for ref, claim in draft.claims.items():
        if command.id in claim.commands:
            draft.claims[ref] = Claim(claim.pair, claim.commands - {command.id}, claim.deadline_ns)
