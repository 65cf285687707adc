"""Segments in the tiers: opened, sealed, shared under pins, moved, given up.

    OPEN --seal--> SEALING --every move ended well--> SEALED --its last copy is dropped--> gone
      |               |                                  |
      |               |                                  +--it cannot be read--> LOST --last unpin--> gone
      |               +--a move failed or could not start--> PRIVATE --last unpin--> gone
      +--last unpin--> gone

A segment is opened in its home, the tier in memory where its bytes are written. An OPEN or PRIVATE one serves the
sequence that opened it. A SEALED one is immutable and may lie in its home, in the cold store, or in both; its keys, if
it has any, are in the directory, and it stays after its last unpin until its room is needed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from h3kv.core.layout import CacheLayout
from h3kv.core.ports import AddressableStore, Clock, Directory, PersistentStore, Telemetry
from h3kv.core.types import (
    BlockKey,
    Completion,
    Move,
    SegmentId,
    SegmentLabel,
    SlabKey,
    StoredSegment,
    Tier,
)
from h3kv.engine.home_room import HomeRoom
from h3kv.engine.indexes import SegmentIndexes
from h3kv.engine.segment import (
    Phase,
    RoomMaker,
    Segment,
    SegmentStatistics,
    count_segments,
    return_slots,
)
from h3kv.policy import placement as policy
from h3kv.telemetry import names


class SegmentTable:
    """All segments of one node. Not thread-safe.

    Args:
        home: where segments are written and read in place; the caller closes it.
        cold: where segments outlive the process; the caller closes it. None: nowhere.
        layout: geometry of the model's KV.
        directory: where the keys of sealed segments are published.
        telemetry: receives failed seals.
        indexes: of clustered segments.
        clock: for when segments were used.
        apart_blocks: room of the home tier that others reserved, in blocks of one layer.
    """

    def __init__(
        self,
        home: AddressableStore,
        layout: CacheLayout,
        *,
        directory: Directory,
        telemetry: Telemetry,
        indexes: SegmentIndexes,
        clock: Clock,
        cold: PersistentStore | None = None,
        apart_blocks: int = 0,
    ) -> None:
        self.layout = layout
        self.home = home
        self.cold = cold
        self.indexes = indexes
        self._directory = directory
        self._telemetry = telemetry
        self._clock = clock
        self._apart_bytes = layout.slab.size_bytes(apart_blocks)
        self._segments: dict[SegmentId, Segment] = {}
        # Removed, while a copy or an arrival still uses their slots in the home.
        self._leaving: dict[SegmentId, Segment] = {}
        self._next_id = 1
        self._room = HomeRoom(home, layout)
        self.marked: set[BlockKey] = set()
        """Blocks of documents: whatever holds or continues one is erased wherever it leaves."""
        self.held_blocks = 0
        """Of segments that documents hold, wherever they lie."""
        self._forget_pages: Callable[[SegmentId], None] = lambda _: None
        self._events: list[policy.Event] = []
        # Segments that changed since someone asked; None: nobody ever did.
        self._changed: dict[SegmentId, None] | None = None

    @property
    def tier(self) -> Tier:
        """The home of these segments."""
        return self.home.tier

    @property
    def is_settled(self) -> bool:
        """Whether no seal is under way. A segment that is being sealed can be neither found nor given up."""
        return all(segment.phase is not Phase.SEALING for segment in self._segments.values())

    def free_blocks(self) -> int:
        """Blocks of the home over all layers that nobody holds. They may lie apart."""
        return self._room.free_blocks()

    def serve_room(self, room_maker: RoomMaker) -> None:
        """See `HomeRoom.serve`."""
        self._room.serve(room_maker)

    def serve_pages(self, forget: Callable[[SegmentId], None]) -> None:
        """Say who keeps single pages: it hears when a segment leaves the cold store."""
        self._forget_pages = forget

    def take_events(self) -> list[policy.Event]:
        """What happened to sealed segments since the last call, for the policy."""
        events, self._events = self._events, []
        return events

    def take_changed(self) -> list[SegmentId]:
        """Segments that appeared, moved, were pinned, unpinned or removed since the last call; at first, all."""
        changed = self._segments if self._changed is None else self._changed
        self._changed = {}
        return list(changed)

    def note_changed(self, segment: Segment) -> None:
        """What others are told of a segment has changed."""
        if self._changed is not None:
            self._changed[segment.id] = None

    def find(self, segment: SegmentId) -> Segment | None:
        """The segment of this number, while it is there."""
        return self._segments.get(segment)

    def sealed(self) -> list[Segment]:
        """All sealed segments, oldest first."""
        return [segment for segment in self._segments.values() if segment.phase is Phase.SEALED]

    def open(self, sizes: Sequence[int], *, waits: bool = True) -> list[Segment]:
        """New segments with room for so many blocks each, all or nothing, pinned once.

        Args:
            sizes: extent classes, in blocks.
            waits: for room that comes free when a copy to the cold store has ended.

        Raises:
            TierFullError: what cannot be moved or given up leaves too little room. Then nothing was, unless the free
                room lies in too small pieces, which only trying shows.
        """
        handles = self._room.reserve(sizes, waits=waits)
        opened: list[Segment] = []
        try:
            for at, blocks in enumerate(sizes):
                handles_L = tuple(handles[at * self.layout.layers : (at + 1) * self.layout.layers])
                addresses_L = tuple(self.home.address(handle) for handle in handles_L)
                opened.append(Segment(self.number(), blocks, handles_L, addresses_L))
            self._segments.update((segment.id, segment) for segment in opened)
        except BaseException:
            for segment in opened:
                self._segments.pop(segment.id, None)
            self.home.release(handles)
            raise
        return opened

    def number(self) -> SegmentId:
        """A number for a segment, never given before."""
        self._next_id += 1
        return SegmentId(self._next_id - 1)

    def adopt(self, stored: Sequence[StoredSegment]) -> None:
        """Take over what the cold store kept from earlier processes: sealed, shared, not pinned."""
        place_of: dict[BlockKey, SegmentId] = {}
        for kept in stored:
            place_of.update(dict.fromkeys(kept.label.keys, kept.segment))
        for kept in stored:
            segment = Segment(kept.segment, kept.handles_L[0].blocks, None, None, kept.handles_L, Phase.SEALED, pins=0)
            segment.label = kept.label
            segment.clustered_blocks = len(kept.label.keys) if self.indexes.is_clustered(segment.room_blocks) else 0
            segment.parent = place_of.get(kept.label.parent)
            self._segments[segment.id] = segment
            self._directory.publish(segment.keys, segment.id)
            self._appear(segment)

    def seal(self, segment: Segment, label: SegmentLabel | None, *, parent: Segment | None) -> None:
        """Make the filled blocks of an open segment immutable; shared as soon as its moves end, if it has a label.

        The room stays as it is, since a slab's stride is its room. A move that fails, or a store that refuses them,
        leaves the segment to its owner; neither is raised.

        Args:
            segment: open; its blocks' bytes are all written.
            label: of the filled blocks; None keeps the segment to its owner, though it may move.
            parent: the segment that holds the block before, if there is one.
        """
        assert segment.phase is Phase.OPEN, f"segment {segment.id} is {segment.phase.name}"
        assert label is None or 1 <= len(label.keys) <= segment.room_blocks
        assert segment.home_L is not None
        segment.continue_from(parent, label, marked=self.marked)
        segment.phase = Phase.SEALING
        segment.moves_in_flight = len(segment.home_L)
        moves = [Move(SlabKey(segment.id, layer), handle, None, label) for layer, handle in enumerate(segment.home_L)]
        try:
            self.home.submit(moves)
        except Exception:  # noqa: BLE001  (a prefix that is not shared is only computed again: serving goes on)
            self._give_up_seal(segment)
            return
        except BaseException:
            self._give_up_seal(segment)
            raise
        self.poll()

    def poll(self) -> None:
        """Take notice of moves in the home that ended."""
        for completion in self.home.poll():
            self._end_move(completion)

    def pin(self, segment: SegmentId, *, keys: Sequence[BlockKey]) -> Segment | None:
        """The sealed segment, kept until it is unpinned; None when it is gone or begins otherwise.

        Args:
            segment: as the directory named it: a hint.
            keys: what the first blocks must be.
        """
        found = self._segments.get(segment)
        if found is None or found.phase is not Phase.SEALED or found.keys[: len(keys)] != tuple(keys):
            return None
        found.pins += 1
        self.note_changed(found)
        self._events += [policy.SegmentTouched(found.id), policy.SegmentPinned(found.id)]
        return found

    def unpin(self, segment: Segment) -> None:
        """Give a pin back. A segment that nobody can share goes with its last pin, a withdrawn one with `give_up`."""
        assert segment.pins > 0, f"segment {segment.id} is not pinned"
        segment.pins -= 1
        self.note_changed(segment)
        if segment.pins == 0:
            segment.used_ns = self._clock.now_ns()
            self.indexes.release(segment)
        if segment.phase is Phase.SEALED:
            self._events += [policy.SegmentTouched(segment.id), policy.SegmentUnpinned(segment.id)]
        if segment.pins > 0:
            return
        if segment.phase in {Phase.OPEN, Phase.PRIVATE, Phase.LOST}:
            self._remove(segment)
        elif segment.phase is Phase.SEALED and segment.label is None and not segment.is_withdrawn:
            # Zeros over all that a long request had take longer than others may wait between two steps.
            self.give_up(segment)

    def hold(self, segment: Segment) -> None:
        """Have a sealed segment stay until it is let go, in any tier."""
        assert segment.phase is Phase.SEALED
        segment.holds += 1
        if segment.holds == 1:
            self.held_blocks += segment.room_blocks
            self._events.append(policy.SegmentHeld(segment.id))

    def let_go(self, segment: Segment) -> None:
        """Undo one `hold`. Nothing where the segment was lost or withdrawn meanwhile: that ended all of them."""
        if segment.holds == 1:
            self._end_holds(segment)
        elif segment.holds:
            segment.holds -= 1

    def withdraw(self, segment: Segment) -> None:
        """Nobody finds a segment any more, nor what continues it; with `give_up` it goes erased."""
        if not segment.is_withdrawn:
            segment.is_erased = segment.is_withdrawn = True
            self._end_holds(segment)
            self._directory.withdraw(segment.keys, segment.id)
            segment.label = None
            self.note_changed(segment)

    def everywhere(self) -> list[Segment]:
        """All segments, also those that were removed while a copy or an arrival uses their slots."""
        return [*self._segments.values(), *self._leaving.values()]

    def give_up(self, segment: Segment) -> None:
        """Forget a sealed segment that nobody pins, wherever it lies."""
        assert segment.phase is Phase.SEALED and segment.pins == 0 and segment.holds == 0
        self._forget(segment)
        self._remove(segment)

    def lose(self, segment: Segment) -> None:
        """A sealed segment cannot be read any more: nobody finds it, and whoever pins it has to compute it again."""
        if segment.phase is not Phase.SEALED:
            return
        self._forget(segment)
        self._end_holds(segment)
        segment.phase = Phase.LOST
        segment.change_place()
        self.release_cold(segment)
        if segment.pins == 0:
            self._remove(segment)

    @property
    def leaving_blocks(self) -> int:
        """Blocks of the home that come free when the copies of removed segments have ended."""
        return sum(segment.room_blocks for segment in self._leaving.values())

    def end_leaving(self, segment: Segment) -> None:
        """The copy or arrival of a segment has ended: give its slots back if it was removed meanwhile."""
        if self._leaving.pop(segment.id, None) is not None:
            self.release_home(segment)

    def release_home(self, segment: Segment) -> None:
        """Give its slots in the home back, if it has any. The index of a segment that is in use stays in memory."""
        if segment.home_L is not None:
            self.indexes.keep(segment)
            return_slots(self.home, segment, segment.home_L)
            segment.home_L = segment.addresses_L = None
            segment.change_place()
            self.note_changed(segment)

    def release_cold(self, segment: Segment) -> None:
        """Give its slots in the cold store back, if it has any."""
        if segment.cold_L is not None and self.cold is not None:
            return_slots(self.cold, segment, segment.cold_L)
            segment.cold_L = None
            self._forget_pages(segment.id)
            segment.change_place()
            self.note_changed(segment)

    def statistics(self) -> SegmentStatistics:
        """Contents now."""
        return count_segments(list(self._segments.values()), self.layout)

    def check_integrity(self) -> None:
        """Assert that the home's room belongs to these segments, and that what is shared can be found and read."""
        self.home.check_integrity()
        self.indexes.check_integrity(list(self._segments.values()))
        rooms = sum(s.room_blocks * ((s.home_L is not None) + (s.arrival is not None)) for s in self.everywhere())
        reserved = self.layout.block_bytes * rooms + self._apart_bytes
        reserved += self.layout.block_bytes * self._room.refused_blocks
        assert self.home.statistics().used_bytes == reserved, "the home holds slots that no segment owns"
        assert self.held_blocks == sum(s.room_blocks for s in self._segments.values() if s.holds)
        for segment in self._segments.values():
            if segment.home_L is not None:
                assert segment.addresses_L == tuple(self.home.address(handle) for handle in segment.home_L)
            assert segment.pins > 0 or segment.phase in {Phase.SEALING, Phase.SEALED}, f"segment {segment.id} leaked"
            assert segment.holds == 0 or segment.phase is Phase.SEALED, f"segment {segment.id} is held and gone"
            is_sealing = segment.phase is Phase.SEALING
            assert is_sealing == (segment.moves_in_flight > 0), f"segment {segment.id} waits for no move"
            if segment.phase is Phase.SEALED:
                assert segment.home_L is not None or segment.cold_L is not None, f"segment {segment.id} lies nowhere"
                for layer, handle in enumerate(segment.home_L or ()):
                    assert self.home.lookup(SlabKey(segment.id, layer)) == handle

    def _end_holds(self, segment: Segment) -> None:
        if segment.holds:
            segment.holds = 0
            self.held_blocks -= segment.room_blocks
            self._events.append(policy.SegmentLetGo(segment.id))

    def _forget(self, segment: Segment) -> None:
        self._directory.withdraw(segment.keys, segment.id)
        self.note_changed(segment)
        self._events.append(policy.SegmentGone(segment.id))

    def _remove(self, segment: Segment) -> None:
        del self._segments[segment.id]
        self.release_cold(segment)
        if segment.is_copied or segment.arrival is not None:
            self._leaving[segment.id] = segment
        else:
            self.release_home(segment)

    def _end_move(self, completion: Completion) -> None:
        segment = self._segments.get(completion.move.key.segment)
        if segment is None or segment.phase is not Phase.SEALING:
            # Its seal was given up while the store took the moves, or it came back into its home.
            return
        segment.moves_in_flight -= 1
        segment.move_failed |= completion.error is not None
        if segment.moves_in_flight > 0:
            return
        if segment.move_failed:
            self._give_up_seal(segment)
            return
        segment.phase = Phase.SEALED
        if segment.label is not None:
            self._directory.publish(segment.keys, segment.id)
        self._appear(segment)
        self._events += [policy.SegmentPinned(segment.id)] * segment.pins

    def _appear(self, segment: Segment) -> None:
        segment.used_ns = self._clock.now_ns()
        self.note_changed(segment)
        self._events.append(policy.SegmentAppeared(segment.id, segment.parent, segment.room_blocks, segment.tiers))

    def _give_up_seal(self, segment: Segment) -> None:
        """Leave a segment to its owner, whose last pin takes it away."""
        segment.phase = Phase.PRIVATE
        segment.label = None
        segment.moves_in_flight = 0
        self._telemetry.count(names.FAILED_SEALS, tier=self.tier)
        if segment.pins == 0:
            self._remove(segment)
