from h3kv.core.ports import BlockStore
from h3kv.testing.fake_store import FakeStore
from h3kv.testing.faulty_store import FaultyStore
from h3kv.tiers.device import DeviceStore, DeviceStoreConfig

from .block_store import LAYOUT, UNIT_BLOCKS, BlockStoreContract


def device_store(units: int) -> DeviceStore:
    return DeviceStore(LAYOUT, DeviceStoreConfig(capacity_bytes=LAYOUT.size_bytes(units * UNIT_BLOCKS)))


class TestDeviceStore(BlockStoreContract):
    def make_store(self, units: int) -> BlockStore:
        return device_store(units)


class TestFakeStore(BlockStoreContract):
    def make_store(self, units: int) -> BlockStore:
        return FakeStore(LAYOUT, capacity_blocks=units * UNIT_BLOCKS)


class TestLateFakeStore(BlockStoreContract):
    def make_store(self, units: int) -> BlockStore:
        return FakeStore(LAYOUT, capacity_blocks=units * UNIT_BLOCKS, latency_polls=3)


class TestFaultyStoreAtRateZero(BlockStoreContract):
    def make_store(self, units: int) -> BlockStore:
        return FaultyStore(device_store(units))
