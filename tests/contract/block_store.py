"""What every store of slabs must do. A subclass says how to make one; pytest then runs all of it.

A store that outlives the process overrides `label` and `room_bytes`, and makes its stores with one layer, so that each
size given to `reserve` is a segment of its own. Sources and targets are page-aligned and
whole pieces (`check_bytes`) long.
"""

from __future__ import annotations

import contextlib
import random
import time
from collections.abc import Sequence

import pytest

from h3kv.core.errors import SlabBusyError, StaleHandleError, TierClosedError, TierFullError
from h3kv.core.types import Completion, Fetch, Move, SlotHandle

from .erasing_store import ErasingContract
from .slab_parts import SlabPartsContract
from .store_suite import DEADLINE_S, memory, payload, settle, slab


class BlockStoreContract(ErasingContract, SlabPartsContract):
    """The conformance suite of `core.ports.BlockStore`."""

    def test_new_store_is_empty(self) -> None:
        store = self.make_store(units=2)
        statistics = store.statistics()
        assert statistics.tier is store.tier
        assert statistics.capacity_bytes == self.room_bytes(16, 16)
        assert statistics.free_bytes == statistics.capacity_bytes
        assert statistics.slabs_visible == statistics.moves_total == statistics.bytes_moved_total == 0
        assert store.poll() == []
        assert store.lookup(slab(1)) is None
        store.check_integrity()
        store.close()

    @pytest.mark.parametrize(("blocks", "room"), [(1, 1), (2, 2), (3, 4), (5, 8), (9, 16), (16, 16)])
    def test_sizes_are_rounded_up_to_extent_classes(self, blocks: int, room: int) -> None:
        store = self.make_store(units=1)
        (handle,) = store.reserve([blocks])
        assert handle.blocks == room
        assert handle.tier is store.tier
        assert store.statistics().used_bytes == self.room_bytes(blocks)
        store.check_integrity()
        store.close()

    def test_reserve_takes_all_or_nothing(self) -> None:
        store = self.make_store(units=1)
        with pytest.raises(TierFullError) as caught:
            store.reserve([8, 4, 16])
        assert caught.value.needed_bytes == self.room_bytes(8, 4, 16)
        assert caught.value.free_bytes == store.statistics().capacity_bytes
        assert store.statistics().used_bytes == 0
        assert len(store.reserve([16])) == 1
        store.check_integrity()
        store.close()

    def test_reserve_of_nothing_gives_nothing(self) -> None:
        store = self.make_store(units=1)
        assert store.reserve([]) == []
        store.submit([])
        store.release([])
        store.check_integrity()
        store.close()

    def test_slots_do_not_overlap(self) -> None:
        store = self.make_store(units=3)
        handles = store.reserve([1, 4, 2, 8, 1, 16])
        self.put(store, *(self.move(number, handle) for number, handle in enumerate(handles, start=1)))
        for number, handle in enumerate(handles, start=1):
            self.check_content(store, number, handle)
        store.check_integrity()
        store.close()

    def test_reserved_slot_is_not_visible(self) -> None:
        store = self.make_store(units=1)
        store.reserve([1])
        assert store.statistics().slabs_visible == 0
        assert store.poll() == []
        store.check_integrity()
        store.close()

    def test_slab_is_visible_only_after_its_completion_was_polled(self) -> None:
        store = self.make_store(units=1)
        (handle,) = store.reserve([1])
        move = self.move(1, handle)
        store.submit([move])
        assert store.lookup(slab(1)) is None
        assert settle(store, 1) == [Completion(move, None)]
        assert store.lookup(slab(1)) == handle
        self.check_content(store, 1, handle)
        assert store.statistics().slabs_visible == 1
        assert store.statistics().moves_total == 1
        assert store.statistics().bytes_moved_total == self.layout.block_bytes
        store.check_integrity()
        store.close()

    def test_source_shorter_than_the_slot_is_kept(self) -> None:
        store = self.make_store(units=1)
        (handle,) = store.reserve([4])
        self.put(store, self.move(1, handle, blocks=2))
        size_bytes = self.layout.size_bytes(2)
        assert self.read(store, slab(1), handle, size_bytes) == bytes(payload(1, size_bytes))
        store.check_integrity()
        store.close()

    def test_many_fetches_of_one_slab_may_be_in_flight(self) -> None:
        store = self.make_store(units=1)
        first, second = store.reserve([2, 4])
        self.put(store, self.move(1, first), self.move(2, second))
        fetches = [
            Fetch(slab(number), handle, memory(self.layout.size_bytes(2)))
            for number, handle in [(1, first), (2, second), (1, first), (1, first)]
        ]
        store.submit(fetches)
        ended = settle(store, len(fetches))
        assert all(completion.error is None for completion in ended)
        assert sorted(id(completion.move) for completion in ended) == sorted(map(id, fetches))
        for fetch in fetches:
            assert fetch.target == payload(fetch.key.segment, self.layout.size_bytes(2))
        assert store.lookup(slab(1)) == first
        store.check_integrity()
        store.close()

    def test_fetch_of_a_slab_that_is_not_visible_starts_nothing(self) -> None:
        store = self.make_store(units=1)
        kept, other = store.reserve([1, 1])
        target = memory(self.layout.block_bytes)
        for key in (slab(1), slab(2)):
            with pytest.raises(SlabBusyError):
                store.submit([self.move(1, kept), Fetch(key, other, target)])
        assert store.poll() == []
        self.put(store, self.move(1, kept))
        with pytest.raises(SlabBusyError):
            store.submit([Fetch(slab(2), kept, target)])
        assert not any(target)
        store.check_integrity()
        store.close()

    def test_completions_of_one_poll_come_oldest_first(self) -> None:
        store = self.make_store(units=1)
        handles = store.reserve([1, 1, 1, 1])
        moves = [self.move(9 - number, handle) for number, handle in enumerate(handles)]
        store.submit(moves[:3])
        store.submit(moves[3:])
        order = {id(move): number for number, move in enumerate(moves)}
        ended = 0
        deadline = time.monotonic() + DEADLINE_S
        while ended < len(moves) and time.monotonic() < deadline:
            numbers = [order[id(completion.move)] for completion in store.poll()]
            assert numbers == sorted(numbers)
            ended += len(numbers)
            if not numbers:
                store.wait(10_000_000)
        assert ended == len(moves)
        assert store.poll() == []
        store.check_integrity()
        store.close()

    def test_key_in_flight_or_visible_is_refused(self) -> None:
        store = self.make_store(units=1)
        first, second, third = store.reserve([1, 1, 1])
        store.submit([self.move(1, first)])
        with pytest.raises(SlabBusyError):
            store.submit([self.move(2, third), self.move(1, second)])
        settle(store, 1)
        with pytest.raises(SlabBusyError):
            store.submit([self.move(2, third), self.move(1, second)])
        self.put(store, self.move(2, third))
        assert store.lookup(slab(2)) == third
        store.check_integrity()
        store.close()

    def test_one_slot_holds_one_slab(self) -> None:
        store = self.make_store(units=1)
        (handle,) = store.reserve([1])
        with pytest.raises(SlabBusyError):
            store.submit([self.move(1, handle), self.move(2, handle)])
        self.put(store, self.move(1, handle))
        with pytest.raises(SlabBusyError):
            store.submit([self.move(2, handle)])
        assert store.lookup(slab(2)) is None
        self.check_content(store, 1, handle)
        store.check_integrity()
        store.close()

    def test_stale_target_starts_nothing(self) -> None:
        store = self.make_store(units=1)
        kept, gone = store.reserve([1, 1])
        store.release([gone])
        with pytest.raises(StaleHandleError):
            store.submit([self.move(1, kept), self.move(2, gone)])
        assert store.poll() == []
        self.put(store, self.move(1, kept))
        store.check_integrity()
        store.close()

    def test_release_hides_the_slab_and_stales_the_handle(self) -> None:
        store = self.make_store(units=1)
        (handle,) = store.reserve([4])
        self.put(store, self.move(1, handle))
        store.release([handle])
        assert store.lookup(slab(1)) is None
        assert store.statistics().used_bytes == 0
        assert store.statistics().slabs_visible == 0
        with pytest.raises(StaleHandleError):
            store.submit([Fetch(slab(1), handle, memory(self.layout.check_bytes))])
        with pytest.raises(StaleHandleError):
            store.release([handle])
        store.check_integrity()
        store.close()

    def test_release_gives_back_all_or_nothing(self) -> None:
        store = self.make_store(units=1)
        kept, gone = store.reserve([1, 1])
        self.put(store, self.move(1, kept))
        store.release([gone])
        with pytest.raises(StaleHandleError):
            store.release([kept, gone])
        with pytest.raises(StaleHandleError):
            store.release([kept, kept])
        assert store.statistics().used_bytes == self.room_bytes(1)
        self.check_content(store, 1, kept)
        store.check_integrity()
        store.close()

    def test_reused_room_does_not_revive_an_old_handle(self) -> None:
        store = self.make_store(units=1)
        (old,) = store.reserve([16])
        self.put(store, self.move(1, old))
        store.release([old])
        (new,) = store.reserve([16])
        assert new != old
        self.put(store, self.move(2, new))
        for key in (slab(1), slab(2)):
            with pytest.raises(StaleHandleError):
                store.submit([Fetch(key, old, memory(self.layout.check_bytes))])
        self.check_content(store, 2, new)
        store.check_integrity()
        store.close()

    def test_slot_released_in_flight_never_becomes_visible(self) -> None:
        store = self.make_store(units=1)
        gone, kept = store.reserve([1, 1])
        store.submit([self.move(1, gone), self.move(2, kept)])
        store.release([gone])
        ended = {completion.move.key: completion.error for completion in settle(store, 2)}
        assert isinstance(ended[slab(1)], StaleHandleError)
        assert ended[slab(2)] is None
        assert store.lookup(slab(1)) is None
        assert store.lookup(slab(2)) == kept
        (again,) = store.reserve([1])
        self.put(store, self.move(1, again))
        assert store.lookup(slab(1)) == again
        store.check_integrity()
        store.close()

    def test_room_released_under_a_fetch_gives_the_old_bytes_or_an_error(self) -> None:
        store = self.make_store(units=1)
        (old,) = store.reserve([16])
        self.put(store, self.move(1, old))
        fetch = Fetch(slab(1), old, memory(self.layout.size_bytes(16)))
        store.submit([fetch])
        store.release([old])
        assert store.lookup(slab(1)) is None
        ended: list[Completion] = []
        deadline = time.monotonic() + DEADLINE_S
        handles: Sequence[SlotHandle] = []
        # The room may come back only after the fetch ended.
        while not handles and time.monotonic() < deadline:
            try:
                handles = store.reserve([16])
            except TierFullError:
                store.wait(10_000_000)
                ended += store.poll()
        (new,) = handles
        store.submit([self.move(2, new)])
        ended += settle(store, 2 - len(ended))
        errors = {completion.move.key: completion.error for completion in ended}
        assert errors[slab(2)] is None
        if errors[slab(1)] is None:
            assert fetch.target == payload(1, self.layout.size_bytes(16))
        else:
            assert isinstance(errors[slab(1)], StaleHandleError)
        self.check_content(store, 2, new)
        store.check_integrity()
        store.close()

    def test_everything_released_leaves_room_for_the_largest_slots(self) -> None:
        store = self.make_store(units=2)
        handles: list[SlotHandle] = []
        with contextlib.suppress(TierFullError):
            while True:
                handles += store.reserve([1])
        store.release(handles[::2])
        store.release(handles[1::2])
        assert len(store.reserve([16, 16])) == 2
        store.check_integrity()
        store.close()

    def test_wait_ends_at_once_where_nothing_is_in_flight(self) -> None:
        store = self.make_store(units=1)
        store.wait(3_600_000_000_000)
        (handle,) = store.reserve([1])
        self.put(store, self.move(1, handle))
        store.wait(3_600_000_000_000)
        assert store.poll() == []
        store.check_integrity()
        store.close()

    def test_slots_that_are_overwritten_never_give_another_segments_bytes(self) -> None:
        """Segments come and go in few slots; every handle ever given is used again and again."""
        store = self.make_store(units=1)
        chance = random.Random(7)
        live: dict[int, SlotHandle] = {}
        stale: list[tuple[int, SlotHandle]] = []
        source, target = memory(self.layout.check_bytes), memory(self.layout.check_bytes)
        for number in range(1, self.churn_rounds + 1):
            if len(live) == 4:
                gone = chance.choice(list(live))
                stale = [*stale[-31:], (gone, live[gone])]
                store.release([live.pop(gone)])
            (live[number],) = store.reserve([chance.choice([1, 1, 2, 4])])
            source[:] = number.to_bytes(8, "little") * (self.layout.check_bytes // 8)
            key = slab(number)
            self.put(store, Move(key, live[number], source, self.label(key.segment)))
            reader = chance.choice(list(live))
            store.submit([Fetch(slab(reader), live[reader], target)])
            assert settle(store, 1)[0].error is None
            expected = reader.to_bytes(8, "little") * (self.layout.check_bytes // 8)
            assert bytes(target) == expected, f"another segment's bytes in round {number}"
            if stale:
                gone, handle = chance.choice(stale)
                with pytest.raises(StaleHandleError):
                    store.submit([Fetch(slab(gone), handle, target)])
        store.check_integrity()
        store.close()

    def test_closed_store_refuses_and_closes_again(self) -> None:
        store = self.make_store(units=1)
        (handle,) = store.reserve([1])
        store.close()
        store.close()
        with pytest.raises(TierClosedError):
            store.reserve([1])
        with pytest.raises(TierClosedError):
            store.submit([])
        with pytest.raises(TierClosedError):
            store.poll()
        with pytest.raises(TierClosedError):
            store.wait(0)
        with pytest.raises(TierClosedError):
            store.lookup(slab(1))
        with pytest.raises(TierClosedError):
            store.release([handle])
