"""Which sealed segments to give up first."""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from h3kv.core.types import SegmentId


@dataclass(frozen=True, slots=True)
class Candidate:
    """What the choice needs to know about one sealed segment."""

    segment: SegmentId
    parent: SegmentId | None
    """The segment that holds the block before its first one. Without it this one cannot be found."""
    last_used: int
    """Tick of the last pin or unpin; larger is newer."""
    pins: int


def order_evictions(candidates: Iterable[Candidate]) -> Iterator[SegmentId]:
    """All segments that may go, in the order in which they should: least recently used first.

    A segment comes after all that continue it, so that a document loses its end before its beginning and what stays
    can still be found. Pinned segments, and all that they continue, do not come. Equal ticks: the younger segment
    first.

    Cost: O(n) to start, O(log n) for each segment taken.
    """
    by_id = {candidate.segment: candidate for candidate in candidates}
    children = dict.fromkeys(by_id, 0)
    for candidate in by_id.values():
        if candidate.parent in children:
            children[candidate.parent] += 1

    def may_go(segment: SegmentId) -> bool:
        return children[segment] == 0 and by_id[segment].pins == 0

    heap = [(by_id[segment].last_used, -segment) for segment in by_id if may_go(segment)]
    heapq.heapify(heap)
    while heap:
        _, negative = heapq.heappop(heap)
        segment = SegmentId(-negative)
        yield segment
        parent = by_id[segment].parent
        if parent is None or parent not in children:
            continue
        children[parent] -= 1
        if may_go(parent):
            heapq.heappush(heap, (by_id[parent].last_used, -parent))
