"""What every store does when only a part of a slab is asked for."""

from __future__ import annotations

import pytest

from h3kv.core.types import Fetch

from .store_suite import StoreSuite, memory, payload, settle, slab


class SlabPartsContract(StoreSuite):
    """Fetches of whole pieces, the units that have a checksum in the cold store."""

    def test_first_pieces_can_be_fetched_alone(self) -> None:
        store, piece = self.make_store(units=1), self.layout.check_bytes
        (handle,) = store.reserve([4])
        self.put(store, self.move(1, handle))
        for pieces in (1, 3):
            target = memory((pieces + 1) * piece)
            store.submit([Fetch(slab(1), handle, target[: pieces * piece])])
            assert settle(store, 1)[0].error is None
            assert target[: pieces * piece] == payload(1, pieces * piece)
            assert not any(target[pieces * piece :]), "bytes after the target were written"
        store.check_integrity()
        store.close()

    def test_pieces_come_from_the_offset_that_is_asked_for(self) -> None:
        store, piece = self.make_store(units=1), self.layout.check_bytes
        first, handle = store.reserve([1, 4])
        move = self.move(2, handle)
        assert move.source is not None
        for number in range(move.source.nbytes // 8):
            move.source[8 * number : 8 * number + 8] = number.to_bytes(8, "little")
        self.put(store, self.move(1, first), move)
        last = handle.blocks * self.layout.block_bytes // piece - 1
        spans = [(0, 1), (1, 1), (2, 3), (last, 1), (last - 1, 2), (0, last + 1)]
        fetches = [Fetch(slab(2), handle, memory(count * piece), start * piece) for start, count in spans]
        store.submit(fetches)
        assert [completion.error for completion in settle(store, len(spans))] == [None] * len(spans)
        for fetch in fetches:
            end = fetch.offset_bytes + fetch.target.nbytes
            assert fetch.target == move.source[fetch.offset_bytes : end]
        store.check_integrity()
        store.close()

    def test_part_that_is_not_whole_pieces_of_the_slab_is_our_mistake(self) -> None:
        store, piece = self.make_store(units=1), self.layout.check_bytes
        (handle,) = store.reserve([2])
        self.put(store, self.move(1, handle))
        size = self.layout.size_bytes(2)
        for target_bytes, offset in [(piece, 512), (piece // 2, 0), (2 * piece, size - piece), (piece, -piece)]:
            with pytest.raises(AssertionError):
                store.submit([Fetch(slab(1), handle, memory(target_bytes), offset)])
        assert store.poll() == []
        store.check_integrity()
        store.close()
