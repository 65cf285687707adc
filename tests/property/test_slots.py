"""The stores in memory against the fake one: the same calls, the same answers, for any order of them."""

import ctypes

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, initialize, invariant, multiple, rule

from h3kv.core.errors import SlabBusyError, StaleHandleError, TierFullError
from h3kv.core.layout import PageLayout, SlabLayout
from h3kv.core.ports import AddressableStore
from h3kv.core.types import DType, Fetch, Move, SegmentId, SlabKey, SlotHandle
from h3kv.memory.region import RegionKind
from h3kv.testing.fake_store import FakeStore
from h3kv.tiers.device import DeviceStore, DeviceStoreConfig
from h3kv.tiers.host import HostStore, HostStoreConfig

LAYOUT = SlabLayout(PageLayout(dtype=DType.FP32, head_dim=16), kv_heads=1)
KEYS = st.builds(SlabKey, st.integers(1, 4).map(SegmentId), st.integers(0, 1))
SIZES = st.integers(1, 16)

Pair = tuple[SlotHandle, SlotHandle]
"""One slot in both stores: of the store under test, of the fake one."""


class Slots(RuleBasedStateMachine):
    live = Bundle("live")
    stale = Bundle("stale")

    def make_store(self, capacity_bytes: int) -> AddressableStore:
        return DeviceStore(LAYOUT, DeviceStoreConfig(capacity_bytes))

    def teardown(self) -> None:
        if hasattr(self, "store"):
            self.store.close()

    @initialize(units=st.integers(1, 3))
    def start(self, units: int) -> None:
        self.store = self.make_store(LAYOUT.size_bytes(16 * units))
        self.fake = FakeStore(LAYOUT, capacity_blocks=16 * units, tier=self.store.tier)
        self.content: dict[Pair, int] = {}
        self.fetched: list[tuple[bytearray, int]] = []
        self.marks = 0

    @rule(target=live, sizes=st.lists(SIZES, max_size=4))
    def reserve(self, sizes: list[int]) -> object:
        try:
            handles = self.store.reserve(sizes)
        except TierFullError:
            # Room in pieces: the fake one, which has none, may still have succeeded.
            return multiple()
        pairs = list(zip(handles, self.fake.reserve(sizes), strict=True))
        for handle, fake in pairs:
            self.marks += 1
            self.content[handle, fake] = self.marks % 256
            ctypes.memset(self.store.address(handle), self.marks % 256, LAYOUT.size_bytes(handle.blocks))
        return multiple(*pairs)

    @rule(target=stale, pair=consumes(live))
    def release(self, pair: Pair) -> Pair:
        self.store.release([pair[0]])
        self.fake.release([pair[1]])
        del self.content[pair]
        return pair

    @rule(key=KEYS, pair=live)
    def submit(self, key: SlabKey, pair: Pair) -> None:
        try:
            self.store.submit([Move(key, pair[0], None)])
        except SlabBusyError:
            with pytest.raises(SlabBusyError):
                self.fake.submit([Move(key, pair[1], None)])
        else:
            self.fake.submit([Move(key, pair[1], None)])

    @rule(key=KEYS, pair=live, blocks=st.integers(0, 2))
    def fetch(self, key: SlabKey, pair: Pair, blocks: int) -> None:
        size_bytes = LAYOUT.size_bytes(min(blocks, pair[0].blocks))
        target = bytearray(size_bytes)
        try:
            self.store.submit([Fetch(key, pair[0], memoryview(target))])
        except SlabBusyError:
            with pytest.raises(SlabBusyError):
                self.fake.submit([Fetch(key, pair[1], memoryview(bytearray(size_bytes)))])
        else:
            self.fake.submit([Fetch(key, pair[1], memoryview(bytearray(size_bytes)))])
            self.fetched.append((target, self.content[pair]))

    @rule()
    def poll(self) -> None:
        ended = [(each.move.key, type(each.error)) for each in self.store.poll()]
        assert ended == [(each.move.key, type(each.error)) for each in self.fake.poll()]
        for target, mark in self.fetched:
            assert bytes(target) == bytes([mark]) * len(target)
        self.fetched.clear()

    @rule(key=KEYS)
    def lookup(self, key: SlabKey) -> None:
        found, expected = self.store.lookup(key), self.fake.lookup(key)
        assert (found is None) == (expected is None)
        assert found is None or (found, expected) in self.content

    @rule(pair=stale)
    def stale_handles_are_refused(self, pair: Pair) -> None:
        with pytest.raises(StaleHandleError):
            self.store.address(pair[0])
        with pytest.raises(StaleHandleError):
            self.store.release([pair[0]])
        with pytest.raises(StaleHandleError):
            self.store.submit([Move(SlabKey(SegmentId(9), 0), pair[0], None)])
        with pytest.raises(StaleHandleError):
            self.store.submit([Fetch(SlabKey(SegmentId(9), 0), pair[0], memoryview(bytearray(8)))])

    @invariant()
    def both_agree_and_no_slot_was_overwritten(self) -> None:
        self.store.check_integrity()
        self.fake.check_integrity()
        assert self.store.statistics() == self.fake.statistics()
        for (handle, _), mark in self.content.items():
            address, size_bytes = self.store.address(handle), LAYOUT.size_bytes(handle.blocks)
            assert ctypes.string_at(address, 1) == ctypes.string_at(address + size_bytes - 1, 1) == bytes([mark])


class SlotsInARegion(Slots):
    """What the region's table says must follow the handles."""

    def make_store(self, capacity_bytes: int) -> AddressableStore:
        self.host = HostStore(LAYOUT, HostStoreConfig(capacity_bytes, (RegionKind.MEMFD,)))
        return self.host

    @invariant()
    def table_names_exactly_the_live_slots(self) -> None:
        if not hasattr(self, "host"):
            return
        entries = self.host.region.table
        handles = {handle.slot: handle for handle, _ in self.content}
        assert {slot: entries["blocks"][slot] for slot in entries["blocks"].nonzero()[0]} == {
            slot: handle.blocks for slot, handle in handles.items()
        }
        assert all(entries["generation"][slot] == handle.generation for slot, handle in handles.items())
        for handle in handles.values():
            view = self.host.view(handle)
            assert view.nbytes == LAYOUT.size_bytes(handle.blocks)


TestSlots = Slots.TestCase
TestSlots.settings = settings(max_examples=50, stateful_step_count=40)
TestSlotsInARegion = SlotsInARegion.TestCase
TestSlotsInARegion.settings = settings(max_examples=30, stateful_step_count=40)
