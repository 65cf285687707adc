"""Whose each segment of the cold store is: a client's, or nobody's until a client asks what was kept."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from dataclasses import dataclass

from h3kv.core.errors import AccessDeniedError, StaleHandleError
from h3kv.core.types import SegmentId, SegmentLabel, SlabKey, SlotHandle, StoredSegment
from h3kv.tiers.cold import ColdStore


@dataclass(slots=True, eq=False)
class OwnedSegment:
    """A segment, or room for one."""

    segment: SegmentId
    handles_L: tuple[SlotHandle, ...]
    holder: int | None
    label: SegmentLabel | None = None
    left: int = 0
    """Handles that were not released."""
    is_written: bool = False
    """Whether it is visible."""


class Ownership:
    """Knows each handle that was given out, and to whom. Not thread-safe.

    Args:
        store: whose segments they are. What it kept from earlier belongs to nobody.
    """

    def __init__(self, store: ColdStore) -> None:
        self._store = store
        self._numbers = itertools.count(1)
        self._by_slot: dict[int, OwnedSegment] = {}
        self._listing: list[StoredSegment] = []
        self._reader: int | None = None
        for kept in store.restore(self.next_number):
            self._add(OwnedSegment(kept.segment, kept.handles_L, None, kept.label, is_written=True))

    def next_number(self) -> SegmentId:
        """Of a segment of this process."""
        return SegmentId(next(self._numbers))

    def give(self, holder: int, handles_L: tuple[SlotHandle, ...]) -> OwnedSegment:
        """Room that was reserved for a holder."""
        owned = OwnedSegment(self.next_number(), handles_L, holder)
        self._add(owned)
        return owned

    def find(self, holder: int, handle: SlotHandle) -> tuple[OwnedSegment, int]:
        """The segment and layer of a holder's handle.

        Raises:
            StaleHandleError: it is not this holder's, or no more.
        """
        owned = self._by_slot.get(handle.slot)
        if owned is not None and owned.holder == holder:
            layer = (handle.slot - owned.handles_L[0].slot) // owned.handles_L[0].blocks
            if owned.handles_L[layer] == handle:
                return owned, layer
        raise StaleHandleError(
            f"{handle.tier} slot {handle.slot} (generation {handle.generation}) is not this client's: look it up again"
        )

    def release(self, holder: int, handles: Iterable[SlotHandle], *, is_erased: bool = False) -> None:
        """A holder gives slabs back, or has them erased. What is not its own is passed over: it went before."""
        gone: list[SlotHandle] = []
        for handle in handles:
            try:
                owned, _ = self.find(holder, handle)
            except StaleHandleError:
                continue
            del self._by_slot[handle.slot]
            owned.left -= 1
            gone.append(handle)
        if gone and is_erased:
            self._store.erase(gone)
        elif gone:
            self._store.release(gone)

    def list_kept(self, holder: int) -> list[StoredSegment]:
        """What was kept from earlier and is this holder's from now on, oldest first. The same list each time.

        Raises:
            AccessDeniedError: another client owns it.
        """
        if self._reader is None:
            self._reader = holder
            kept = self._unowned()
            for owned in kept:
                owned.holder = holder
            self._listing = [StoredSegment(each.segment, _label(each), each.handles_L) for each in kept]
        if self._reader != holder:
            raise AccessDeniedError(f"client {self._reader} owns what the cold store kept: end it first")
        return self._listing

    def let_go(self, holder: int) -> None:
        """A holder has gone: what is written under a label stays, for the next one; the rest goes."""
        mine = [owned for owned in self._segments() if owned.holder == holder]
        for owned in mine:
            if owned.label is not None and owned.left == len(owned.handles_L):
                # On its way or there. What does not arrive goes then.
                owned.holder = None
            else:
                self.release(holder, [each for each in owned.handles_L if self._by_slot.get(each.slot) is owned])
        if self._reader == holder:
            self._reader, self._listing = None, []

    def end_writing(self, owned: OwnedSegment, error: Exception | None) -> None:
        """A segment was written, or was not."""
        owned.is_written = error is None
        if owned.holder is not None:
            return
        if error is not None:
            self.drop(owned)
            return
        twins = [each for each in self._unowned() if each is not owned and _label(each).keys == _label(owned).keys]
        for twin in twins:
            self.drop(twin)

    def drop(self, owned: OwnedSegment) -> int:
        """Give up a segment of nobody. Its blocks."""
        assert owned.holder is None
        handles = [each for each in owned.handles_L if self._by_slot.get(each.slot) is owned]
        for handle in handles:
            del self._by_slot[handle.slot]
        self._store.release(handles)
        return owned.handles_L[0].blocks

    def unowned(self) -> list[OwnedSegment]:
        """Segments of nobody, oldest first."""
        return self._unowned()

    def check_integrity(self) -> None:
        """Assert that every handle of the store is known here."""
        for owned in self._segments():
            for handle in owned.handles_L:
                if self._by_slot.get(handle.slot) is owned:
                    self._store.written_bytes(handle)
            if owned.is_written and owned.left == len(owned.handles_L):
                found = self._store.lookup(SlabKey(owned.segment, 0))
                assert found in (None, owned.handles_L[0]), "a segment lies elsewhere"

    def _add(self, owned: OwnedSegment) -> None:
        owned.left = len(owned.handles_L)
        self._by_slot.update((handle.slot, owned) for handle in owned.handles_L)

    def _segments(self) -> list[OwnedSegment]:
        return list({id(owned): owned for owned in self._by_slot.values()}.values())

    def _unowned(self) -> list[OwnedSegment]:
        kept = [owned for owned in self._segments() if owned.holder is None and owned.is_written]
        return sorted(kept, key=lambda owned: owned.segment)


def _label(owned: OwnedSegment) -> SegmentLabel:
    assert owned.label is not None
    return owned.label
