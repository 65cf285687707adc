"""What every store that outlives the process does with thousands of small reads.

Shapes: N reads.
"""

from __future__ import annotations

import abc
import time
from collections.abc import Sequence

import numpy as np
import pytest
from numpy.typing import NDArray

from h3kv.core.errors import SlabBusyError, StaleHandleError, TierClosedError, TierFullError
from h3kv.core.ports import BlockStore, FailedRead, PersistentStore
from h3kv.core.types import Fetch, SlotHandle
from h3kv.tiers.cold.ops import address_of
from h3kv.tiers.cold.unit_reads import AHEAD_IN_FLIGHT_MAX, UNIT_READ_DTYPE

from .store_suite import DEADLINE_S, StoreSuite, memory, settle, slab


def unit_reads(
    target: memoryview, slabs: Sequence[int], offsets: Sequence[int], *, size: int, first_tag: int = 1
) -> NDArray[np.void]:
    """Reads of one size each, whose bytes land one after the other: UNIT_READ_DTYPE [N]."""
    reads_N = np.zeros(len(slabs), dtype=UNIT_READ_DTYPE)
    reads_N["tag"] = first_tag + np.arange(reads_N.size)
    reads_N["target"] = address_of(target) + np.arange(reads_N.size) * size
    reads_N["slab"], reads_N["offset"], reads_N["size"] = slabs, offsets, size
    return reads_N


def end_units(store: PersistentStore, count: int) -> tuple[list[int], list[FailedRead]]:
    """Poll until so many reads have ended: tags of the good ones, and the others."""
    tags: list[int] = []
    failed: list[FailedRead] = []
    deadline = time.monotonic() + DEADLINE_S
    while len(tags) + len(failed) < count and time.monotonic() < deadline:
        store.wait_units(10_000_000, reads=count - len(tags) - len(failed))
        ended = store.poll_units()
        tags += ended.tags.tolist()
        failed += ended.failed
    assert len(tags) + len(failed) == count, f"{len(tags)} and {len(failed)} of {count} reads ended"
    return tags, failed


class UnitReadsContract(StoreSuite):
    """The part of `core.ports.PersistentStore` that retrieval uses."""

    @abc.abstractmethod
    def make_persistent(self, units: int) -> PersistentStore:
        """An empty store with room for so many slots of 16 blocks."""

    def make_store(self, units: int) -> BlockStore:
        """The same one."""
        return self.make_persistent(units)

    def filled(self, store: PersistentStore, blocks: Sequence[int]) -> tuple[tuple[SlotHandle, ...], list[bytes]]:
        """Slabs, all of whose words say where they are, and their bytes."""
        handles = tuple(store.reserve(blocks))
        moves = [self.move(number, handle) for number, handle in enumerate(handles, start=1)]
        for number, move in enumerate(moves):
            assert move.source is not None
            np.frombuffer(move.source, dtype=np.uint64)[:] = np.arange(move.source.nbytes // 8) + (number << 32)
        self.put(store, *moves)
        return handles, [bytes(move.source) for move in moves if move.source is not None]

    def test_many_small_reads_bring_the_bytes_that_were_asked_for(self) -> None:
        store, piece, chance = self.make_persistent(units=4), self.layout.check_bytes, np.random.default_rng(1)
        handles, contents = self.filled(store, [16, 4, 16, 1])
        count = 300
        slabs = chance.integers(0, 4, count).tolist()
        offsets = [int(chance.integers(0, len(contents[at]) // piece)) * piece for at in slabs]
        for turn in range(3):
            target = memory(count * piece)
            reads_N = unit_reads(target, slabs, offsets, size=piece, first_tag=1000 * turn)
            reads_N["is_ahead"] = chance.integers(0, 2, count)
            for part_N in np.array_split(reads_N, 2):
                store.read_units(handles, part_N.data)
            tags, failed = end_units(store, count)
            assert not failed
            assert sorted(tags) == reads_N["tag"].tolist()
            for number, (at, offset) in enumerate(zip(slabs, offsets, strict=True)):
                assert target[number * piece : (number + 1) * piece] == contents[at][offset : offset + piece]
        assert store.poll_units().tags.tolist() == []
        store.check_integrity()
        store.close()

    def test_reads_of_several_pieces_and_fetches_run_side_by_side(self) -> None:
        store, piece = self.make_persistent(units=1), self.layout.check_bytes
        handles, contents = self.filled(store, [8, 2])
        target, whole = memory(4 * piece), memory(2 * self.layout.block_bytes)
        store.read_units(list(handles), unit_reads(target, [0, 0], [0, 2 * piece], size=2 * piece).data)
        store.submit([Fetch(slab(2), handles[1], whole)])
        tags, failed = end_units(store, 2)
        assert sorted(tags) == [1, 2]
        assert not failed
        assert target == contents[0][: 4 * piece]
        assert settle(store, 1)[0].error is None
        assert whole == contents[1]
        store.check_integrity()
        store.close()

    def test_nothing_to_read_ends_at_once(self) -> None:
        store = self.make_persistent(units=1)
        store.read_units((), np.empty(0, dtype=UNIT_READ_DTYPE).data)
        store.wait_units(3_600_000_000_000)
        assert store.poll_units().failed == ()
        store.check_integrity()
        store.close()

    def test_slab_that_is_gone_or_not_there_yet_starts_nothing(self) -> None:
        store, piece = self.make_persistent(units=2), self.layout.check_bytes
        handles, contents = self.filled(store, [1, 1])
        target = memory(piece)
        reads_N = unit_reads(target, [0], [0], size=piece)
        store.read_units(handles, reads_N.data)
        end_units(store, 1)
        (written,) = store.reserve([1])
        move = self.move(9, written)
        store.submit([move])
        with pytest.raises(SlabBusyError):
            store.read_units((handles[0], written), reads_N.data)
        settle(store, 1)
        store.release(handles[1:])
        with pytest.raises(StaleHandleError):
            store.read_units(handles, reads_N.data)
        store.read_units(handles[:1], reads_N.data)
        assert end_units(store, 1) == ([1], [])
        assert target == contents[0][:piece]
        store.check_integrity()
        store.close()

    def test_reads_that_are_not_whole_pieces_of_a_slab_are_our_mistake(self) -> None:
        store, piece = self.make_persistent(units=1), self.layout.check_bytes
        handles, contents = self.filled(store, [2])
        target = memory(2 * piece)
        for index, offset, size, shift in [
            (0, 512, piece, 0),
            (0, 0, piece - 512, 0),
            (0, len(contents[0]), piece, 0),
            (1, 0, piece, 0),
            (0, 0, piece, 8),
            (0, 0, 0, 0),
        ]:
            reads_N = unit_reads(target, [index], [offset], size=size)
            reads_N["target"] += shift
            with pytest.raises(AssertionError):
                store.read_units(handles, reads_N.data)
        assert store.poll_units().tags.tolist() == []
        store.check_integrity()
        store.close()

    def test_room_is_handed_out_again_only_after_the_reads_of_it_ended(self) -> None:
        store, piece = self.make_persistent(units=1), self.layout.check_bytes
        handles, contents = self.filled(store, [16])
        target = memory(8 * piece)
        store.read_units(handles, unit_reads(target, [0] * 8, [at * piece for at in range(8)], size=piece).data)
        store.release(handles)
        deadline = time.monotonic() + DEADLINE_S
        taken: list[SlotHandle] = []
        while not taken and time.monotonic() < deadline:
            try:
                taken = store.reserve([16])
            except TierFullError:
                store.wait_units(10_000_000, reads=8)
                store.poll()
        assert sorted(end_units(store, 8)[0]) == list(range(1, 9))
        self.put(store, self.move(7, taken[0]))
        assert target == contents[0][: 8 * piece]
        store.check_integrity()
        store.close()

    def test_reads_ahead_beyond_what_the_engine_holds_all_end(self) -> None:
        store, piece = self.make_persistent(units=1), self.layout.check_bytes
        handles, contents = self.filled(store, [16])
        count = 2 * AHEAD_IN_FLIGHT_MAX + 50
        offsets = [number * piece % len(contents[0]) for number in range(count)]
        target = memory(count * piece)
        ahead_N = unit_reads(target, [0] * count, offsets, size=piece)
        ahead_N["is_ahead"] = 1
        store.read_units(handles, ahead_N.data)
        now = memory(piece)
        store.read_units(handles, unit_reads(now, [0], [piece], size=piece, first_tag=9999).data)
        tags, failed = end_units(store, count + 1)
        assert sorted(tags) == [*range(1, count + 1), 9999]
        assert not failed
        assert now == contents[0][piece : 2 * piece]
        assert all(
            target[at * piece : (at + 1) * piece] == contents[0][offset : offset + piece]
            for at, offset in enumerate(offsets)
        )
        store.check_integrity()
        store.close()

    def test_store_closes_with_reads_in_flight_and_held_back(self) -> None:
        store, piece = self.make_persistent(units=1), self.layout.check_bytes
        handles, _ = self.filled(store, [1])
        count = 2 * AHEAD_IN_FLIGHT_MAX
        target = memory(count * piece)
        reads_N = unit_reads(target, [0] * count, [0] * count, size=piece)
        reads_N["is_ahead"] = 1
        store.read_units(handles, reads_N.data)
        store.close()
        with pytest.raises(TierClosedError):
            store.read_units(handles, reads_N.data)
        with pytest.raises(TierClosedError):
            store.poll_units()
