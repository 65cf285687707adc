"""KV of documents in a pool: what holds it there, and how it goes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Final

from h3kv.core.reach import Reach, join
from h3kv.core.types import BlockKey
from h3kv.engine.pool import KvPool
from h3kv.engine.segment import Phase, Segment

ERASED_BYTES: Final = 16 << 20
"""What one call erases in memory, or one segment: it takes milliseconds, in which no token comes."""
ERASED_SEGMENTS: Final = 256
"""What one call gives up, wherever it lies: the same."""


class DocumentKv:
    """Used by the owner of the pool alone, between two steps.

    Args:
        pool: which keeps the KV.
    """

    def __init__(self, pool: KvPool) -> None:
        self._pool = pool
        self._table = pool.segments
        self._held: dict[str, list[Segment]] = {}
        self._marked: dict[str, frozenset[BlockKey]] = {}
        # How many documents have a key marked: several begin alike.
        self._marks: Counter[BlockKey] = Counter()
        self.is_behind = False
        """Whether the last call left something that could be erased at once."""

    def places(self) -> Mapping[BlockKey, Segment]:
        """Where each block is that can be found: for several documents between the same two steps."""
        return {key: segment for segment in self._table.sealed() for key in segment.keys}

    def find(
        self, keys: Sequence[BlockKey], *, places: Mapping[BlockKey, Segment] | None = None
    ) -> list[Segment] | None:
        """Segments that hold all of these blocks; None where one is nowhere."""
        places = self.places() if places is None else places
        found = [places.get(key) for key in keys]
        segments = {segment.id: segment for segment in found if segment is not None}
        return None if None in found else list(segments.values())

    def mark(self, reaches: Mapping[str, Reach]) -> None:
        """Have zeros over all that documents reach wherever it leaves, also over what is sealed until `unmark`.

        Args:
            reaches: by document. It takes the place of an earlier one.
        """
        for document, reach in reaches.items():
            self.unmark(document)
            self._marked[document] = keys = reach.own | reach.ends
            self._marks.update(keys)
            self._table.marked |= keys
        for segment in self._reached(join(reaches.values(), ())):
            segment.is_erased = True

    def unmark(self, document: str) -> None:
        """What is sealed from now on is not a document's any more. Nothing where it was not marked."""
        keys = self._marked.pop(document, frozenset())
        self._marks.subtract(keys)
        gone = {key for key in keys if not self._marks[key]}
        for key in gone:
            del self._marks[key]
        self._table.marked -= gone

    def hold(
        self, document: str, keys: Sequence[BlockKey], *, places: Mapping[BlockKey, Segment] | None = None
    ) -> bool:
        """Have a document's blocks stay in some tier until `let_go`.

        Returns:
            Whether they do. They do not where one is nowhere, or where running requests may come to need the room.
        """
        if self.holds(document):
            return True
        self.let_go(document)
        segments = self.find(keys, places=places)
        if segments is None:
            return False
        # What is in use already counts once.
        blocks = sum(segment.room_blocks for segment in segments if not segment.holds)
        if blocks > self._pool.capacity.spare_blocks:
            return False
        for segment in segments:
            self._table.hold(segment)
        self._held[document] = segments
        return True

    def holds(self, document: str) -> bool:
        """Whether all of a document's blocks stay. Segments may be lost under it: then it has to be read again."""
        segments = self._held.get(document)
        return segments is not None and all(segment.holds for segment in segments)

    def let_go(self, document: str) -> None:
        """A document's blocks need not stay any more. Nothing where they did not."""
        for segment in self._held.pop(document, ()):
            if self._table.find(segment.id) is segment:
                self._table.let_go(segment)

    def erase(self, reach: Reach) -> bool:
        """Have what a document reaches gone: found by nobody from now on, zeros over it as soon as nobody reads it.

        Repeated, it finds what was sealed since. A document that is marked stays so.

        Returns:
            As `go_on`.
        """
        for segment in self._reached(reach):
            self._table.withdraw(segment)
        return self.go_on()

    def go_on(self) -> bool:
        """Give up more of what is to be erased. To be repeated.

        Returns:
            Whether nothing is left of any document that is being erased.
        """
        free = [each for each in self._withdrawn() if each.phase is Phase.SEALED and each.pins == 0]
        here = [segment for segment in free if self._table.find(segment.id) is segment]
        left_bytes, left_segments = ERASED_BYTES, ERASED_SEGMENTS
        while here and left_bytes > 0 and left_segments > 0:
            segment = here.pop()
            left_segments -= 1
            left_bytes -= segment.room_blocks * self._table.layout.block_bytes if segment.home_L else 0
            self._table.give_up(segment)
        self.is_behind = bool(here)
        cold = self._table.cold
        return not self._withdrawn() and (cold is None or cold.erasing == 0)

    def await_earlier(self) -> None:
        """Count what an earlier process of ours had begun to erase, as if it had begun here."""
        if self._table.cold is not None:
            self._table.cold.erase(())

    def check_integrity(self) -> None:
        """Assert that segments are held for documents alone, once for each."""
        counts: dict[int, int] = {}
        for segments in self._held.values():
            for segment in segments:
                counts[id(segment)] = counts.get(id(segment), 0) + 1
        for segment in self._table.everywhere():
            assert segment.holds in {0, counts.get(id(segment), 0)}, f"segment {segment.id} is held by nobody"

    def _withdrawn(self) -> list[Segment]:
        """Segments of deleted documents that still lie somewhere."""
        return [segment for segment in self._table.everywhere() if segment.is_withdrawn]

    def _reached(self, reach: Reach) -> list[Segment]:
        """Segments that hold KV of a document. Cost: about a microsecond for each segment that there is."""
        starts = reach.own | reach.ends
        behind: dict[BlockKey, list[Segment]] = {}
        waiting: list[Segment] = []
        for segment in self._table.everywhere():
            if segment.label is not None:
                behind.setdefault(segment.label.parent, []).append(segment)
                if segment.label.parent in starts or not reach.own.isdisjoint(segment.label.keys):
                    waiting.append(segment)
        found: set[BlockKey] = set()
        reached: dict[int, Segment] = {}
        while waiting:
            segment = waiting.pop()
            assert segment.label is not None
            if segment.id not in reached and reach.covers(segment.label.parent, segment.label.keys, found):
                reached[segment.id] = segment
                waiting += [child for key in segment.keys if key in found for child in behind.get(key, ())]
        return list(reached.values())
