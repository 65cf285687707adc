"""What every store does with slots that are given to `erase`."""

from __future__ import annotations

import time
from typing import cast

import pytest

from h3kv.core.errors import StaleHandleError, TierFullError
from h3kv.core.ports import BlockStore, PersistentStore
from h3kv.core.types import Completion, Fetch

from .store_suite import DEADLINE_S, StoreSuite, memory, payload, settle, slab


def is_erasing(store: BlockStore) -> bool:
    """Whether anything given to `erase` may still be there. In memory nothing is."""
    return hasattr(store, "erasing") and cast(PersistentStore, store).erasing > 0


def end_erasing(store: BlockStore) -> list[Completion]:
    """Poll until nothing is being erased; what else has ended."""
    ended: list[Completion] = []
    deadline = time.monotonic() + DEADLINE_S
    while is_erasing(store):
        assert time.monotonic() < deadline, "what was given to `erase` is still there"
        store.wait(10_000_000)
        ended += store.poll()
    return ended


class ErasingContract(StoreSuite):
    """The part of `core.ports.BlockStore` that documents are deleted with."""

    def test_erased_slots_are_hidden_and_stale_at_once_and_free_in_the_end(self) -> None:
        store = self.make_store(units=1)
        gone, kept = store.reserve([4, 2])
        self.put(store, self.move(1, gone), self.move(2, kept))
        store.erase([gone])
        assert store.lookup(slab(1)) is None
        with pytest.raises(StaleHandleError):
            store.submit([Fetch(slab(1), gone, memory(self.layout.check_bytes))])
        with pytest.raises(StaleHandleError):
            store.erase([gone])
        assert end_erasing(store) == []
        assert store.statistics().used_bytes == self.room_bytes(2)
        self.check_content(store, 2, kept)
        store.check_integrity()
        store.close()

    def test_erase_gives_back_all_or_nothing(self) -> None:
        store = self.make_store(units=1)
        kept, gone = store.reserve([1, 1])
        self.put(store, self.move(1, kept))
        store.release([gone])
        with pytest.raises(StaleHandleError):
            store.erase([kept, gone])
        assert not is_erasing(store)
        self.check_content(store, 1, kept)
        store.check_integrity()
        store.close()

    def test_erasing_nothing_ends(self) -> None:
        store = self.make_store(units=1)
        store.erase([])
        assert end_erasing(store) == []
        store.check_integrity()
        store.close()

    def test_room_that_was_erased_is_written_again(self) -> None:
        store = self.make_store(units=1)
        for number in range(1, 5):
            (handle,) = store.reserve([16])
            self.put(store, self.move(number, handle))
            self.check_content(store, number, handle)
            store.erase([handle])
            end_erasing(store)
        store.check_integrity()
        store.close()

    def test_slot_erased_in_flight_never_becomes_visible(self) -> None:
        store = self.make_store(units=1)
        gone, kept = store.reserve([1, 1])
        store.submit([self.move(1, gone), self.move(2, kept)])
        store.erase([gone])
        ended = settle(store, 2)
        errors = {completion.move.key: completion.error for completion in ended}
        assert isinstance(errors[slab(1)], StaleHandleError)
        assert errors[slab(2)] is None
        end_erasing(store)
        assert store.lookup(slab(1)) is None
        self.check_content(store, 2, kept)
        store.check_integrity()
        store.close()

    def test_fetch_of_a_slab_that_is_erased_meanwhile_gives_the_old_bytes_or_an_error(self) -> None:
        store = self.make_store(units=1)
        (old,) = store.reserve([16])
        self.put(store, self.move(1, old))
        fetch = Fetch(slab(1), old, memory(self.layout.size_bytes(16)))
        store.submit([fetch])
        store.erase([old])
        (completion,) = settle(store, 1)
        if completion.error is None:
            assert fetch.target == payload(1, self.layout.size_bytes(16))
        else:
            assert isinstance(completion.error, StaleHandleError)
        end_erasing(store)
        with pytest.raises(TierFullError):
            store.reserve([16, 16])
        assert len(store.reserve([16])) == 1
        store.check_integrity()
        store.close()
