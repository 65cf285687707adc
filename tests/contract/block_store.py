"""What every store of slabs must do. A subclass says how to make one; pytest then runs all of it."""

from __future__ import annotations

import abc
import ctypes
import itertools

import pytest

from h3kv.core.errors import SlabBusyError, StaleHandleError, TierClosedError, TierFullError
from h3kv.core.layout import PageLayout, SlabLayout
from h3kv.core.ports import BlockStore
from h3kv.core.types import Completion, DType, Move, SegmentId, SlabKey, SlotHandle

LAYOUT = SlabLayout(page=PageLayout(dtype=DType.FP32, head_dim=16), kv_heads=2)
UNIT_BLOCKS = 16
POLLS_MAX = 100
"""A move that has not ended after so many polls is lost."""


def slab(segment: int, layer: int = 0) -> SlabKey:
    return SlabKey(SegmentId(segment), layer)


def settle(store: BlockStore, moves: int) -> list[Completion]:
    """Poll until so many moves have ended."""
    ended: list[Completion] = []
    for _ in range(POLLS_MAX):
        ended += store.poll()
        if len(ended) >= moves:
            return ended
    pytest.fail(f"{moves - len(ended)} moves did not end")


def content(store: BlockStore, handle: SlotHandle, size_bytes: int) -> bytes:
    return ctypes.string_at(store.address(handle), size_bytes)


class BlockStoreContract(abc.ABC):
    """The conformance suite of `core.ports.BlockStore`."""

    @abc.abstractmethod
    def make_store(self, units: int) -> BlockStore:
        """An empty store of so many units of 16 blocks."""

    def test_new_store_is_empty(self) -> None:
        store = self.make_store(units=2)
        statistics = store.statistics()
        assert statistics.tier is store.tier
        assert statistics.capacity_bytes == LAYOUT.size_bytes(2 * UNIT_BLOCKS)
        assert statistics.free_bytes == statistics.capacity_bytes
        assert statistics.slabs_visible == statistics.moves_total == statistics.bytes_moved_total == 0
        assert store.poll() == []
        assert store.lookup(slab(1)) is None
        store.check_integrity()

    @pytest.mark.parametrize(("blocks", "room"), [(1, 1), (2, 2), (3, 4), (5, 8), (9, 16), (16, 16)])
    def test_sizes_are_rounded_up_to_extent_classes(self, blocks: int, room: int) -> None:
        store = self.make_store(units=1)
        (handle,) = store.reserve([blocks])
        assert handle.blocks == room
        assert handle.tier is store.tier
        assert store.statistics().used_bytes == LAYOUT.size_bytes(room)
        store.check_integrity()

    def test_reserve_takes_all_or_nothing(self) -> None:
        store = self.make_store(units=1)
        with pytest.raises(TierFullError) as caught:
            store.reserve([8, 4, 4, 1])
        assert caught.value.needed_bytes == LAYOUT.size_bytes(17)
        assert caught.value.free_bytes == LAYOUT.size_bytes(16)
        assert store.statistics().used_bytes == 0
        assert len(store.reserve([8, 4, 4])) == 3
        store.check_integrity()

    def test_reserve_of_nothing_gives_nothing(self) -> None:
        store = self.make_store(units=1)
        assert store.reserve([]) == []
        store.check_integrity()

    def test_slots_do_not_overlap(self) -> None:
        store = self.make_store(units=2)
        handles = store.reserve([1, 4, 2, 8, 1, 16])
        spans = sorted((store.address(h), store.address(h) + LAYOUT.size_bytes(h.blocks)) for h in handles)
        assert all(end <= start for (_, end), (start, _) in itertools.pairwise(spans))
        for number, handle in enumerate(handles):
            ctypes.memset(store.address(handle), number + 1, LAYOUT.size_bytes(handle.blocks))
        for number, handle in enumerate(handles):
            size_bytes = LAYOUT.size_bytes(handle.blocks)
            assert content(store, handle, size_bytes) == bytes([number + 1]) * size_bytes
        store.check_integrity()

    def test_reserved_slot_is_not_visible(self) -> None:
        store = self.make_store(units=1)
        store.reserve([1])
        assert store.statistics().slabs_visible == 0
        assert store.poll() == []
        store.check_integrity()

    def test_slab_is_visible_only_after_its_completion_was_polled(self) -> None:
        store = self.make_store(units=1)
        (handle,) = store.reserve([1])
        move = Move(slab(1), handle, memoryview(b"\x07" * LAYOUT.block_bytes))
        store.submit([move])
        assert store.lookup(slab(1)) is None
        assert settle(store, moves=1) == [Completion(move, None)]
        assert store.lookup(slab(1)) == handle
        assert content(store, handle, LAYOUT.block_bytes) == b"\x07" * LAYOUT.block_bytes
        assert store.statistics().slabs_visible == 1
        assert store.statistics().moves_total == 1
        assert store.statistics().bytes_moved_total == LAYOUT.block_bytes
        store.check_integrity()

    def test_bytes_written_in_place_are_published_unchanged(self) -> None:
        store = self.make_store(units=1)
        (handle,) = store.reserve([2])
        ctypes.memset(store.address(handle), 0x5A, LAYOUT.size_bytes(2))
        store.submit([Move(slab(1), handle, None)])
        settle(store, moves=1)
        assert store.lookup(slab(1)) == handle
        assert content(store, handle, LAYOUT.size_bytes(2)) == b"\x5a" * LAYOUT.size_bytes(2)
        assert store.statistics().bytes_moved_total == 0
        store.check_integrity()

    def test_source_shorter_than_the_slot_leaves_the_rest(self) -> None:
        store = self.make_store(units=1)
        (handle,) = store.reserve([1])
        ctypes.memset(store.address(handle), 9, LAYOUT.block_bytes)
        store.submit([Move(slab(1), handle, memoryview(b"abc"))])
        settle(store, moves=1)
        assert content(store, handle, 5) == b"abc\x09\x09"
        store.check_integrity()

    def test_completions_come_oldest_first(self) -> None:
        store = self.make_store(units=1)
        handles = store.reserve([1, 1, 1, 1])
        moves = [Move(slab(9 - number), handle, None) for number, handle in enumerate(handles)]
        store.submit(moves[:3])
        store.submit(moves[3:])
        assert [completion.move for completion in settle(store, moves=4)] == moves
        assert store.poll() == []
        store.check_integrity()

    def test_key_in_flight_or_visible_is_refused(self) -> None:
        store = self.make_store(units=1)
        first, second, third = store.reserve([1, 1, 1])
        store.submit([Move(slab(1), first, None)])
        with pytest.raises(SlabBusyError):
            store.submit([Move(slab(2), third, None), Move(slab(1), second, None)])
        settle(store, moves=1)
        with pytest.raises(SlabBusyError):
            store.submit([Move(slab(2), third, None), Move(slab(1), second, None)])
        store.submit([Move(slab(2), third, None)])
        settle(store, moves=1)
        assert store.lookup(slab(2)) == third
        store.check_integrity()

    def test_one_slot_holds_one_slab(self) -> None:
        store = self.make_store(units=1)
        (handle,) = store.reserve([1])
        with pytest.raises(SlabBusyError):
            store.submit([Move(slab(1), handle, None), Move(slab(2), handle, None)])
        store.submit([Move(slab(1), handle, None)])
        settle(store, moves=1)
        with pytest.raises(SlabBusyError):
            store.submit([Move(slab(2), handle, None)])
        assert store.lookup(slab(2)) is None
        store.check_integrity()

    def test_stale_target_starts_nothing(self) -> None:
        store = self.make_store(units=1)
        kept, gone = store.reserve([1, 1])
        store.release([gone])
        with pytest.raises(StaleHandleError):
            store.submit([Move(slab(1), kept, None), Move(slab(2), gone, None)])
        assert store.poll() == []
        store.submit([Move(slab(1), kept, None)])
        settle(store, moves=1)
        store.check_integrity()

    def test_release_hides_the_slab_and_stales_the_handle(self) -> None:
        store = self.make_store(units=1)
        (handle,) = store.reserve([4])
        store.submit([Move(slab(1), handle, None)])
        settle(store, moves=1)
        store.release([handle])
        assert store.lookup(slab(1)) is None
        assert store.statistics().used_bytes == 0
        with pytest.raises(StaleHandleError):
            store.address(handle)
        with pytest.raises(StaleHandleError):
            store.release([handle])
        store.check_integrity()

    def test_release_gives_back_all_or_nothing(self) -> None:
        store = self.make_store(units=1)
        kept, gone = store.reserve([1, 1])
        store.release([gone])
        with pytest.raises(StaleHandleError):
            store.release([kept, gone])
        with pytest.raises(StaleHandleError):
            store.release([kept, kept])
        assert store.statistics().used_bytes == LAYOUT.block_bytes
        store.address(kept)
        store.check_integrity()

    def test_reused_room_does_not_revive_an_old_handle(self) -> None:
        store = self.make_store(units=1)
        (old,) = store.reserve([16])
        store.release([old])
        (new,) = store.reserve([16])
        assert new != old
        with pytest.raises(StaleHandleError):
            store.address(old)
        store.address(new)
        store.check_integrity()

    def test_slot_released_in_flight_never_becomes_visible(self) -> None:
        store = self.make_store(units=1)
        gone, kept = store.reserve([1, 1])
        store.submit([Move(slab(1), gone, None), Move(slab(2), kept, None)])
        store.release([gone])
        ended = {completion.move.key: completion.error for completion in settle(store, moves=2)}
        assert isinstance(ended[slab(1)], StaleHandleError)
        assert ended[slab(2)] is None
        assert store.lookup(slab(1)) is None
        assert store.lookup(slab(2)) == kept
        (again,) = store.reserve([1])
        store.submit([Move(slab(1), again, None)])
        settle(store, moves=1)
        assert store.lookup(slab(1)) == again
        store.check_integrity()

    def test_everything_released_leaves_room_for_the_largest_slots(self) -> None:
        store = self.make_store(units=2)
        handles = store.reserve([1] * 32)
        store.release(handles[::2])
        store.release(handles[1::2])
        assert len(store.reserve([16, 16])) == 2
        store.check_integrity()

    def test_closed_store_refuses_and_closes_again(self) -> None:
        store = self.make_store(units=1)
        (handle,) = store.reserve([1])
        store.close()
        store.close()
        with pytest.raises(TierClosedError):
            store.reserve([1])
        with pytest.raises(TierClosedError):
            store.address(handle)
        with pytest.raises(TierClosedError):
            store.submit([])
        with pytest.raises(TierClosedError):
            store.poll()
        with pytest.raises(TierClosedError):
            store.lookup(slab(1))
        with pytest.raises(TierClosedError):
            store.release([handle])
