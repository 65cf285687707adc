"""Giving up room that no running sequence needs."""

from __future__ import annotations

from dataclasses import dataclass

from h3kv.engine.pool import KvPool
from h3kv.engine.segment import Segment


@dataclass(frozen=True, slots=True)
class Evicted:
    """What was given up."""

    segments: int
    size_bytes: int


def evict_cold(pool: KvPool, *, size_bytes: int | None) -> Evicted:
    """Give up room in memory of segments that nobody uses, longest unused first.

    What the cold store lacks is written to it first; what cannot be written is given up.

    Args:
        pool: between two steps.
        size_bytes: at most so many; None: all.
    """
    block_bytes = pool.layout.block_bytes
    before = _idle(pool)
    blocks_max = sum(segment.room_blocks for segment in before)
    if size_bytes is not None:
        blocks_max = min(blocks_max, size_bytes // block_bytes)
    gone: list[Segment] = []
    while (left := blocks_max - sum(segment.room_blocks for segment in gone)) > 0:
        free_blocks = pool.segments.free_blocks()
        # Which one goes next is the policy's choice: the largest must fit.
        largest = max((segment.room_blocks for segment in _idle(pool)), default=left + 1)
        if largest > left or not pool.placer.make_room(free_blocks + 1, waits=True):
            break
        kept = {segment.id for segment in _idle(pool)}
        gone = [segment for segment in before if segment.id not in kept]
    return Evicted(len(gone), block_bytes * sum(segment.room_blocks for segment in gone))


def _idle(pool: KvPool) -> list[Segment]:
    """Segments that lie in memory though no sequence uses them."""
    return [segment for segment in pool.segments.sealed() if segment.home_L is not None and segment.pins == 0]
