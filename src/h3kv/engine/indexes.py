"""Where the indexes of clustered segments lie in memory.

slabs in HOST             the index is read behind the pages of each slab
slabs on NVMe alone       a copy lies in the index region while a running sequence uses the segment
                          kept when the slabs leave HOST, or read back when a sequence takes the segment up
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from h3kv.attention.native import copy_pages
from h3kv.core.errors import H3Error, SlabUnavailableError
from h3kv.core.layout import CacheLayout
from h3kv.core.limits import SEGMENT_BLOCKS_MAX
from h3kv.core.ports import Clock, PersistentStore
from h3kv.core.types import Completion, Fetch, SlabKey
from h3kv.core.units import NS_PER_S
from h3kv.engine.interrupts import check_interrupt
from h3kv.engine.segment import Segment
from h3kv.tiers.index_store import IndexStore

WAIT_NS = 30 * NS_PER_S
"""Longest time that reading indexes back may take."""


@dataclass(slots=True, eq=False)
class _Loading:
    """The index of a segment on its way from the cold store."""

    segment: Segment
    fetches_left: int
    error: Exception | None = None


class SegmentIndexes:
    """Not thread-safe.

    Args:
        layout: of the model's KV.
        store: room for indexes without their slabs; the caller closes it. None where there is no cold store.
        cold: where they are read from.
        clock: bounds waiting.
    """

    def __init__(
        self, layout: CacheLayout, store: IndexStore | None, cold: PersistentStore | None, *, clock: Clock
    ) -> None:
        self._slab = layout.slab
        self._cold = cold
        self._clock = clock
        self._loading: dict[SlabKey, tuple[_Loading, Fetch]] = {}
        self.store = store

    def is_clustered(self, room_blocks: int) -> bool:
        """Whether segments in room for so many blocks are clustered when they are sealed in main memory."""
        return self._slab.page.encoding.is_clustered and room_blocks == SEGMENT_BLOCKS_MAX

    def addresses(self, segment: Segment) -> tuple[int, ...] | None:
        """First byte of each layer's index in memory; None where it is not there, or there is none."""
        if not segment.clustered_blocks:
            return None
        if segment.addresses_L is not None:
            offset = self._slab.index_offset(segment.room_blocks)
            return tuple(address + offset for address in segment.addresses_L)
        return segment.index.addresses_L if segment.index is not None and segment.has_index else None

    def keep(self, segment: Segment) -> None:
        """Before its slabs leave HOST: copy the index of a segment that is retrieved from to where it stays."""
        addresses_L = self.addresses(segment)
        if self.store is None or addresses_L is None or segment.index is not None or segment.retrieving == 0:
            return
        if self.store.used_slots == self.store.slots:
            return
        segment.index = self.store.reserve()
        sources_L = np.array(addresses_L, dtype=np.uint64)
        targets_L = np.array(segment.index.addresses_L, dtype=np.uint64)
        copy_pages(sources_L, targets_L, size_bytes=self._slab.index_bytes(segment.room_blocks))
        segment.has_index = True

    def load(self, segments: Sequence[Segment], *, poll: Callable[[], None]) -> None:
        """Have the indexes of these segments in memory, where there are any.

        Args:
            segments: pinned by the caller.
            poll: takes notice of what the cold store has ended, and passes ended fetches to `end_fetch`.

        Raises:
            TierFullError: the index region is full.
            SlabCorruptError: an index is damaged.
            SlabUnavailableError: an index cannot be read, or does not come in time.
        """
        wanted = [one for one in segments if one.clustered_blocks and self.addresses(one) is None]
        loads = [self._under_way(segment) or self._start(segment) for segment in wanted]
        self._wait(loads, poll)
        for load in loads:
            if load.error is not None or load.fetches_left:
                key = SlabKey(load.segment.id, 0)
                raise load.error or SlabUnavailableError(f"the index of segment {key} did not come in time", key=key)

    def drain(self, *, poll: Callable[[], None]) -> None:
        """Wait until nothing is written into the index region any more, as long as a read may take."""
        self._wait([load for load, _ in self._loading.values()], poll)

    def end_fetch(self, completion: Completion) -> bool:
        """Take notice of a fetch that ended. Returns whether it was one of these."""
        load, fetch = self._loading.get(completion.move.key, (None, None))
        if load is None or fetch is not completion.move:
            return False
        del self._loading[completion.move.key]
        load.fetches_left -= 1
        load.error = load.error or completion.error
        if load.fetches_left == 0 and load.error is None:
            load.segment.has_index = True
            load.segment.version += 1
        if load.fetches_left == 0 and (load.segment.pins == 0 or load.error is not None):
            self.release(load.segment)
        return True

    def release(self, segment: Segment) -> None:
        """Give its slot in the index region back, if it has one and nothing is being read into it."""
        is_loading = any(load.segment is segment for load, _ in self._loading.values())
        if segment.index is None or self.store is None or is_loading:
            return
        self.store.release(segment.index)
        segment.index, segment.has_index = None, False
        segment.version += 1

    def check_integrity(self, segments: Sequence[Segment]) -> None:
        """Assert that every slot belongs to one of these segments, or to one that is still read into."""
        if self.store is None:
            return
        self.store.check_integrity()
        loading = {id(load.segment): load.segment for load, _ in self._loading.values()}
        owners = {id(segment): segment for segment in segments} | loading
        held = sum(segment.index is not None for segment in owners.values())
        assert self.store.used_slots == held, "the index region holds slots that no segment owns"

    def _under_way(self, segment: Segment) -> _Loading | None:
        return next((load for load, _ in self._loading.values() if load.segment is segment), None)

    def _wait(self, loads: Sequence[_Loading], poll: Callable[[], None]) -> None:
        """Until all of their fetches have ended, well or not, or the time is over."""
        deadline_ns = self._clock.now_ns() + WAIT_NS
        while any(load.fetches_left for load in loads):
            check_interrupt()
            left_ns = deadline_ns - self._clock.now_ns()
            if left_ns <= 0:
                return
            assert self._cold is not None
            self._cold.wait(min(left_ns, NS_PER_S))
            poll()

    def _start(self, segment: Segment) -> _Loading:
        """Begin to read the index of a segment that lies in the cold store."""
        if self.store is None or self._cold is None or segment.cold_L is None:
            key = SlabKey(segment.id, 0)
            raise SlabUnavailableError(f"the index of segment {key} is nowhere: it is computed again", key=key)
        if segment.index is None:
            segment.index = self.store.reserve()
        size_bytes, offset = self._slab.index_bytes(segment.room_blocks), self._slab.index_offset(segment.room_blocks)
        fetches = [
            Fetch(SlabKey(segment.id, layer), handle, view[:size_bytes], offset)
            for layer, (handle, view) in enumerate(zip(segment.cold_L, self.store.views(segment.index), strict=True))
        ]
        load = _Loading(segment, len(fetches))
        self._loading.update((fetch.key, (load, fetch)) for fetch in fetches)
        try:
            self._cold.submit(fetches)
        except H3Error as error:
            for fetch in fetches:
                del self._loading[fetch.key]
            load.fetches_left, load.error = 0, error
            self.release(segment)
        return load
