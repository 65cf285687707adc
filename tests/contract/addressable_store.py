"""What every store in memory must do besides."""

from __future__ import annotations

import abc
import ctypes
import itertools

import pytest

from h3kv.core.errors import StaleHandleError, TierClosedError
from h3kv.core.ports import AddressableStore
from h3kv.core.types import Move

from .block_store import BlockStoreContract
from .store_suite import settle, slab


class AddressableStoreContract(BlockStoreContract):
    """The conformance suite of `core.ports.AddressableStore`."""

    @abc.abstractmethod
    def make_store(self, units: int) -> AddressableStore:
        """See `BlockStoreContract.make_store`."""

    def test_addresses_do_not_overlap_and_suit_direct_io(self) -> None:
        store = self.make_store(units=2)
        handles = store.reserve([1, 4, 2, 8, 1, 16])
        spans = sorted((store.address(h), store.address(h) + self.layout.size_bytes(h.blocks)) for h in handles)
        assert all(end <= start for (_, end), (start, _) in itertools.pairwise(spans))
        store.check_integrity()
        store.close()

    def test_bytes_written_in_place_are_published_unchanged(self) -> None:
        store = self.make_store(units=1)
        (handle,) = store.reserve([2])
        ctypes.memset(store.address(handle), 0x5A, self.layout.size_bytes(2))
        store.submit([Move(slab(1), handle, None)])
        settle(store, 1)
        assert store.lookup(slab(1)) == handle
        assert self.read(store, slab(1), handle, self.layout.size_bytes(2)) == b"\x5a" * self.layout.size_bytes(2)
        assert store.statistics().moves_total == 1
        assert store.statistics().bytes_moved_total == 0
        store.check_integrity()
        store.close()

    def test_copied_bytes_lie_at_the_address_and_leave_the_rest(self) -> None:
        store = self.make_store(units=1)
        (handle,) = store.reserve([1])
        ctypes.memset(store.address(handle), 9, self.layout.block_bytes)
        self.put(store, Move(slab(1), handle, memoryview(b"abc")))
        assert ctypes.string_at(store.address(handle), 5) == b"abc\x09\x09"
        store.check_integrity()
        store.close()

    def test_stale_handles_have_no_address(self) -> None:
        store = self.make_store(units=1)
        (old,) = store.reserve([16])
        store.release([old])
        (new,) = store.reserve([16])
        with pytest.raises(StaleHandleError):
            store.address(old)
        store.address(new)
        store.close()
        with pytest.raises(TierClosedError):
            store.address(new)
