"""Giving up room that no running sequence needs."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

from h3kv.core.types import SegmentId, Tier
from h3kv.engine.pool import KvPool
from h3kv.engine.segment import Segment
from h3kv.policy.eviction import Candidate, order_evictions

REASON: Final = "evicted"
"""Of the moves."""


@dataclass(frozen=True, slots=True)
class Evicted:
    """What was given up."""

    segments: int
    size_bytes: int


@dataclass(frozen=True, slots=True)
class EvictionBounds:
    """What may go."""

    now_ns: int
    """On the clock of the pool."""
    idle_ns: int = 0
    """Only what was not used for so long."""
    size_bytes: int | None = None
    """At most so many; None: all."""


def evict_cold(pool: KvPool, bounds: EvictionBounds, *, timeout_ns: int) -> Evicted:
    """Give up room in memory of segments that nobody uses, longest unused first.

    What the cold store lacks is written to it first. What finds no room there is given up, ends of documents first, and
    so is all of it where nothing can be written any more. What a store that is away, or slow, did not take stays.

    Args:
        pool: between two steps.
        bounds: of what goes.
        timeout_ns: for writing. What takes longer leaves memory later, unless a sequence wants it meanwhile, and is not
            counted.
    """
    chosen = _chosen(pool, bounds)
    if pool.segments.cold is not None:
        pool.placer.ask([segment.id for segment in chosen], Tier.NVME, reason=REASON)
        pool.placer.settle(timeout_ns)
    left = {segment.id for segment in chosen if segment.home_L is not None and not pool.placer.is_asked(segment.id)}
    for segment in _ends_first(pool, left):
        if _finds_no_room(pool, segment):
            pool.placer.give_up(segment)
    gone = [segment for segment in chosen if segment.home_L is None]
    return Evicted(len(gone), sum(_size_bytes(pool, segment) for segment in gone))


def _finds_no_room(pool: KvPool, segment: Segment) -> bool:
    """Whether the cold store will not take it: it is full, or broken, or there is none."""
    cold = pool.segments.cold
    return cold is None or cold.is_degraded or cold.statistics().free_bytes < _size_bytes(pool, segment)


def _size_bytes(pool: KvPool, segment: Segment) -> int:
    return segment.room_blocks * pool.layout.block_bytes


def _chosen(pool: KvPool, bounds: EvictionBounds) -> list[Segment]:
    """Idle segments in memory, longest unused first, as many as the bound allows."""
    idle = [
        segment
        for segment in pool.segments.sealed()
        if segment.home_L is not None
        and segment.pins == 0
        and segment.arrival is None
        and bounds.now_ns - segment.used_ns >= bounds.idle_ns
    ]
    chosen, taken = [], 0
    for segment in sorted(idle, key=lambda each: (each.used_ns, each.id)):
        size_bytes = _size_bytes(pool, segment)
        if bounds.size_bytes is None or taken + size_bytes <= bounds.size_bytes:
            chosen.append(segment)
            taken += size_bytes
    return chosen


def _ends_first(pool: KvPool, wanted: set[SegmentId]) -> Iterator[Segment]:
    """Those that may be forgotten altogether: nothing that stays continues them, and no copy is under way."""
    sealed = {segment.id: segment for segment in pool.segments.sealed()}
    candidates = [
        Candidate(
            each.id, each.parent, each.used_ns, pins=each.pins + each.holds + (each.id not in wanted) + each.is_copied
        )
        for each in sealed.values()
    ]
    return (sealed[number] for number in order_evictions(candidates))
