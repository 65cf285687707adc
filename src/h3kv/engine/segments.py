"""Segments in a store: opened, sealed, shared under pins, evicted.

    OPEN --seal--> SEALING --every move ended well--> SEALED --evict--> gone
      |               |
      |               +--a move failed or could not start--> PRIVATE --last unpin--> gone
      +--last unpin--> gone

An OPEN or PRIVATE segment serves the sequence that opened it. A SEALED one is immutable, its keys are in the directory,
and it stays after its last unpin until its room is needed.
"""

from __future__ import annotations

import contextlib
import enum
from collections.abc import Sequence
from dataclasses import dataclass

from h3kv.core.errors import TierFullError
from h3kv.core.layout import CacheLayout
from h3kv.core.ports import BlockStore, Directory, Telemetry
from h3kv.core.types import BlockKey, Completion, Move, SegmentId, SlabKey, SlotHandle, StoreStatistics, Tier
from h3kv.policy.eviction import Candidate, order_evictions
from h3kv.telemetry import names


class Phase(enum.Enum):
    """Where a segment is in its life."""

    OPEN = enum.auto()
    SEALING = enum.auto()
    SEALED = enum.auto()
    PRIVATE = enum.auto()


@dataclass(slots=True, eq=False)
class Segment:
    """Consecutive blocks of one sequence, with one slot in each layer. The table that made it alone changes it."""

    id: SegmentId
    room_blocks: int
    """Blocks that fit: the size of each slot, and what tells where a KV head's pages begin in it."""
    handles_L: tuple[SlotHandle, ...]
    addresses_L: tuple[int, ...]
    """First byte of each layer's slot; the same for the segment's whole life."""
    phase: Phase = Phase.OPEN
    pins: int = 1
    parent: SegmentId | None = None
    """The segment that this one continues."""
    keys: tuple[BlockKey, ...] = ()
    """Of the blocks that are filled, once it is sealed."""
    last_used: int = 0
    moves_in_flight: int = 0
    move_failed: bool = False


@dataclass(frozen=True, slots=True)
class SegmentStatistics:
    """What the table holds at one moment."""

    segments: int
    sealed: int
    pins: int
    pinned_bytes: int
    evicted_total: int


class SegmentTable:
    """All segments of one store. It alone reserves and releases there. Not thread-safe.

    Args:
        store: where slabs lie; the caller closes it.
        layout: geometry of the model's KV.
        directory: where the keys of sealed segments are published.
        telemetry: receives evictions and failed seals.
    """

    def __init__(self, store: BlockStore, layout: CacheLayout, *, directory: Directory, telemetry: Telemetry) -> None:
        self.layout = layout
        self._store = store
        self._directory = directory
        self._telemetry = telemetry
        self._segments: dict[SegmentId, Segment] = {}
        self._next_id = 1
        self._tick = 0
        self._evicted_total = 0

    @property
    def tier(self) -> Tier:
        """Where these segments lie."""
        return self._store.tier

    def tier_statistics(self) -> StoreStatistics:
        """Occupancy of the store."""
        return self._store.statistics()

    @property
    def is_settled(self) -> bool:
        """Whether no seal is under way. A segment that is being sealed can be neither found nor evicted."""
        return all(segment.phase is not Phase.SEALING for segment in self._segments.values())

    def open(self, sizes: Sequence[int]) -> list[Segment]:
        """New segments with room for so many blocks each, all or nothing, pinned once. Evicts what it must.

        Args:
            sizes: extent classes, in blocks.

        Raises:
            TierFullError: pinned segments leave too little room. Then nothing was evicted, unless the free room lies
                in too small pieces, which only trying shows.
        """
        handles = self._reserve(sizes)
        opened: list[Segment] = []
        try:
            for at, blocks in enumerate(sizes):
                handles_L = tuple(handles[at * self.layout.layers : (at + 1) * self.layout.layers])
                addresses_L = tuple(self._store.address(handle) for handle in handles_L)
                opened.append(Segment(SegmentId(self._next_id), blocks, handles_L, addresses_L))
                self._next_id += 1
            self._segments.update((segment.id, segment) for segment in opened)
        except BaseException:
            for segment in opened:
                self._segments.pop(segment.id, None)
            self._store.release(handles)
            raise
        return opened

    def seal(self, segment: Segment, keys: Sequence[BlockKey], *, parent: Segment | None) -> None:
        """Make the first `len(keys)` blocks of an open segment immutable, and shared as soon as its moves end.

        The room stays as it is, since a slab's stride is its room. A move that fails, or a store that refuses them,
        leaves the segment to its owner; neither is raised.

        Args:
            segment: open; its blocks' bytes are all written.
            keys: at least one, first block first.
            parent: the segment that holds the block before, if there is one.
        """
        assert segment.phase is Phase.OPEN, f"segment {segment.id} is {segment.phase.name}"
        assert 1 <= len(keys) <= segment.room_blocks
        segment.keys = tuple(keys)
        segment.parent = None if parent is None else parent.id
        segment.phase = Phase.SEALING
        segment.moves_in_flight = len(segment.handles_L)
        moves = [Move(SlabKey(segment.id, layer), handle, None) for layer, handle in enumerate(segment.handles_L)]
        try:
            self._store.submit(moves)
        except Exception:  # noqa: BLE001  (a prefix that is not shared is only computed again: serving goes on)
            self._give_up_seal(segment)
            return
        except BaseException:
            self._give_up_seal(segment)
            raise
        self.poll()

    def poll(self) -> None:
        """Take notice of moves that ended."""
        for completion in self._store.poll():
            self._end_move(completion)

    def pin(self, segment: SegmentId, *, keys: Sequence[BlockKey]) -> Segment | None:
        """The sealed segment, kept from eviction until it is unpinned; None when it is gone or begins otherwise.

        Args:
            segment: as the directory named it: a hint.
            keys: what the first blocks must be.
        """
        found = self._segments.get(segment)
        if found is None or found.phase is not Phase.SEALED or found.keys[: len(keys)] != tuple(keys):
            return None
        found.pins += 1
        self._touch(found)
        return found

    def unpin(self, segment: Segment) -> None:
        """Give a pin back. A segment that nobody can share goes with its last pin."""
        assert segment.pins > 0, f"segment {segment.id} is not pinned"
        segment.pins -= 1
        self._touch(segment)
        if segment.pins == 0 and segment.phase in {Phase.OPEN, Phase.PRIVATE}:
            self._remove(segment)

    def evict_all(self) -> int:
        """Give up every segment that is not pinned. Returns how many."""
        victims = self._victims()
        for victim in victims:
            self._evict(victim)
        return len(victims)

    def statistics(self) -> SegmentStatistics:
        """Contents and totals now."""
        segments = self._segments.values()
        return SegmentStatistics(
            segments=len(segments),
            sealed=sum(segment.phase is Phase.SEALED for segment in segments),
            pins=sum(segment.pins for segment in segments),
            pinned_bytes=self.layout.block_bytes * sum(s.room_blocks for s in segments if s.pins),
            evicted_total=self._evicted_total,
        )

    def check_integrity(self) -> None:
        """Assert that the store's room belongs to these segments, and that what is shared can be found and read."""
        self._store.check_integrity()
        reserved = self.layout.block_bytes * sum(segment.room_blocks for segment in self._segments.values())
        assert self._store.statistics().used_bytes == reserved, "the store holds slots that no segment owns"
        for segment in self._segments.values():
            assert segment.addresses_L == tuple(self._store.address(handle) for handle in segment.handles_L)
            assert segment.pins > 0 or segment.phase in {Phase.SEALING, Phase.SEALED}, f"segment {segment.id} leaked"
            is_sealing = segment.phase is Phase.SEALING
            assert is_sealing == (segment.moves_in_flight > 0), f"segment {segment.id} waits for no move"
            if segment.phase is Phase.SEALED:
                for layer, handle in enumerate(segment.handles_L):
                    assert self._store.lookup(SlabKey(segment.id, layer)) == handle

    def _reserve(self, sizes: Sequence[int]) -> list[SlotHandle]:
        """Slots for all layers of segments of these sizes, segment by segment."""
        slots = [blocks for blocks in sizes for _ in range(self.layout.layers)]
        needed_bytes = self.layout.block_bytes * sum(sizes)
        if needed_bytes <= self._store.statistics().free_bytes:
            # Refused where the free room lies in too small pieces.
            with contextlib.suppress(TierFullError):
                return self._store.reserve(slots)
        victims = self._victims()
        evictable_bytes = sum(self.layout.block_bytes * victim.room_blocks for victim in victims)
        self._check_room(needed_bytes, evictable_bytes)
        while True:
            # First as many victims as the sum asks for, then one by one while the room lies in too small pieces.
            while victims and self._store.statistics().free_bytes < needed_bytes:
                self._evict(victims.pop(0))
            try:
                return self._store.reserve(slots)
            except TierFullError:
                if not victims:
                    raise
                self._evict(victims.pop(0))

    def _check_room(self, needed_bytes: int, evictable_bytes: int) -> None:
        statistics = self._store.statistics()
        if needed_bytes > statistics.free_bytes + evictable_bytes:
            raise TierFullError(
                f"{needed_bytes} bytes are needed; of {statistics.capacity_bytes} bytes {statistics.free_bytes} are "
                f"free, {evictable_bytes} can be evicted, and the rest is pinned by running requests: wait for one to "
                "end, or raise device.kv_bytes",
                tier=statistics.tier,
                needed_bytes=needed_bytes,
                free_bytes=statistics.free_bytes + evictable_bytes,
            )

    def _victims(self) -> list[Segment]:
        """Segments that may go, first one first."""
        candidates = [
            Candidate(segment=segment.id, parent=segment.parent, last_used=segment.last_used, pins=segment.pins)
            for segment in self._segments.values()
            if segment.phase is Phase.SEALED
        ]
        return [self._segments[segment] for segment in order_evictions(candidates)]

    def _evict(self, segment: Segment) -> None:
        self._directory.withdraw(segment.keys, segment.id)
        self._remove(segment)
        self._evicted_total += 1
        self._telemetry.count(names.EVICTED_SEGMENTS, tier=self.tier)

    def _remove(self, segment: Segment) -> None:
        del self._segments[segment.id]
        self._store.release(segment.handles_L)

    def _end_move(self, completion: Completion) -> None:
        segment = self._segments.get(completion.move.key.segment)
        if segment is None or segment.phase is not Phase.SEALING:
            # Its seal was given up while the store took the moves.
            return
        segment.moves_in_flight -= 1
        segment.move_failed |= completion.error is not None
        if segment.moves_in_flight > 0:
            return
        if segment.move_failed:
            self._give_up_seal(segment)
            return
        segment.phase = Phase.SEALED
        self._directory.publish(segment.keys, segment.id)

    def _give_up_seal(self, segment: Segment) -> None:
        """Leave a segment to its owner, whose last pin takes it away."""
        segment.phase = Phase.PRIVATE
        segment.moves_in_flight = 0
        self._telemetry.count(names.FAILED_SEALS, tier=self.tier)
        if segment.pins == 0:
            self._remove(segment)

    def _touch(self, segment: Segment) -> None:
        self._tick += 1
        segment.last_used = self._tick
