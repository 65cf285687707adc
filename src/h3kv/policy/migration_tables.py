"""Tables by segment that a step shares with the step before, but for the parts that it changes.

    table       shard 0        shard 1        ...   shard 2047         segments by their number modulo 2048
                   |              |                     |
    next table  shard 0 (same) shard 1 (copied) ...  shard 2047 (same)

A step that changes k segments copies at most k shards, and 2,048 references to the others.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, MutableMapping
from typing import Final, Generic, NamedTuple, TypeVar

from h3kv.core.types import SegmentId

SHARDS: Final = 2048
"""64 segments in each where as many are known as may be (131,072)."""

Value = TypeVar("Value")


class SegmentRef(NamedTuple):
    """Names a segment on the node. Numbers of segments are unique within a process only."""

    owner: str
    segment: SegmentId


class SegmentTable(Mapping[SegmentRef, Value], Generic[Value]):
    """What is known of segments, never changed. Iterated in an order that depends on nothing but its history."""

    __slots__ = ("_count", "shards")

    def __init__(self, shards: tuple[dict[SegmentRef, Value], ...] | None = None, count: int = 0) -> None:
        empty: dict[SegmentRef, Value] = {}
        self.shards = (empty,) * SHARDS if shards is None else shards
        """For `TableDraft` alone. Nobody writes to a shard that a table has."""
        self._count = count

    def __getitem__(self, ref: SegmentRef) -> Value:
        return self.shards[ref.segment % SHARDS][ref]

    def __iter__(self) -> Iterator[SegmentRef]:
        for shard in self.shards:
            yield from shard

    def __len__(self) -> int:
        return self._count


class TableDraft(MutableMapping[SegmentRef, Value], Generic[Value]):
    """A table while it is changed. The one that it began as stays as it was."""

    __slots__ = ("_copied", "_count", "_shards")

    def __init__(self, table: SegmentTable[Value]) -> None:
        self._shards = list(table.shards)
        self._count = len(table)
        self._copied: set[int] = set()
        """Shards that are this draft's own."""

    def __getitem__(self, ref: SegmentRef) -> Value:
        return self._shards[ref.segment % SHARDS][ref]

    def __setitem__(self, ref: SegmentRef, value: Value) -> None:
        shard = self._writable(ref)
        before = len(shard)
        shard[ref] = value
        self._count += len(shard) - before

    def __delitem__(self, ref: SegmentRef) -> None:
        if ref not in self._shards[ref.segment % SHARDS]:
            raise KeyError(ref)
        del self._writable(ref)[ref]
        self._count -= 1

    def __iter__(self) -> Iterator[SegmentRef]:
        for shard in self._shards:
            yield from shard

    def __len__(self) -> int:
        return self._count

    @property
    def filled(self) -> list[dict[SegmentRef, Value]]:
        """Shards in which something lies, to be read: faster than looking each segment up."""
        return [shard for shard in self._shards if shard]

    def freeze(self) -> SegmentTable[Value]:
        """The table as it is now. The draft is at its end: changes would change the table too."""
        return SegmentTable(tuple(self._shards), self._count)

    def _writable(self, ref: SegmentRef) -> dict[SegmentRef, Value]:
        number = ref.segment % SHARDS
        if number not in self._copied:
            self._shards[number] = dict(self._shards[number])
            self._copied.add(number)
        return self._shards[number]
