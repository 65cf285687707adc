"""Where each block is, kept in this process."""

from __future__ import annotations

from collections.abc import Sequence

from h3kv.core.types import BlockKey, BlockLocation, SegmentId


class MemoryDirectory:
    """Satisfies `Directory`.

    Two segments may hold equal blocks, when two sequences computed the same tokens at the same time. `find` names the
    one published first; the other takes its place when that one is withdrawn.
    """

    def __init__(self) -> None:
        self._places: dict[BlockKey, list[BlockLocation]] = {}

    def find(self, keys: Sequence[BlockKey]) -> list[BlockLocation]:
        """See `Directory.find`."""
        found: list[BlockLocation] = []
        for key in keys:
            places = self._places.get(key)
            if places is None:
                break
            found.append(places[0])
        return found

    def publish(self, keys: Sequence[BlockKey], segment: SegmentId) -> None:
        """See `Directory.publish`. Publishing the same again changes nothing."""
        for index, key in enumerate(keys):
            places = self._places.setdefault(key, [])
            location = BlockLocation(segment, index)
            if location not in places:
                places.append(location)

    def withdraw(self, keys: Sequence[BlockKey], segment: SegmentId) -> None:
        """See `Directory.withdraw`. Unknown keys are ignored."""
        for key in keys:
            places = [place for place in self._places.get(key, []) if place.segment != segment]
            if places:
                self._places[key] = places
            else:
                self._places.pop(key, None)

    def __len__(self) -> int:
        return len(self._places)
