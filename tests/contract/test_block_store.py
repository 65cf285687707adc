import pytest
import torch

from h3kv.core.ports import AddressableStore, BlockStore
from h3kv.core.types import Tier
from h3kv.memory.region import RegionKind
from h3kv.testing.fake_store import FakeStore
from h3kv.testing.faulty_store import FaultyStore
from h3kv.tiers.device import DeviceStore, DeviceStoreConfig
from h3kv.tiers.host import HostStore, HostStoreConfig

from .addressable_store import AddressableStoreContract
from .block_store import BlockStoreContract
from .store_suite import LAYOUT, UNIT_BLOCKS


def device_store(units: int, *, device: str = "cpu") -> DeviceStore:
    return DeviceStore(LAYOUT, DeviceStoreConfig(LAYOUT.size_bytes(units * UNIT_BLOCKS), device))


def host_store(units: int, *kinds: RegionKind) -> HostStore:
    return HostStore(LAYOUT, HostStoreConfig(LAYOUT.size_bytes(units * UNIT_BLOCKS), kinds))


class TestDeviceStore(AddressableStoreContract):
    def make_store(self, units: int) -> AddressableStore:
        return device_store(units)


class TestHostStore(AddressableStoreContract):
    churn_rounds = 100_000

    def make_store(self, units: int) -> AddressableStore:
        return host_store(units, RegionKind.HUGETLB, RegionKind.MEMFD)


class TestHostStoreInPrivateMemory(AddressableStoreContract):
    def make_store(self, units: int) -> AddressableStore:
        return host_store(units, RegionKind.ANONYMOUS)


class TestFakeStore(AddressableStoreContract):
    def make_store(self, units: int) -> AddressableStore:
        return FakeStore(LAYOUT, capacity_blocks=units * UNIT_BLOCKS)


class TestLateFakeStore(AddressableStoreContract):
    def make_store(self, units: int) -> AddressableStore:
        return FakeStore(LAYOUT, capacity_blocks=units * UNIT_BLOCKS, latency_polls=3, tier=Tier.HOST)


class TestFaultyStoreAtRateZero(AddressableStoreContract):
    def make_store(self, units: int) -> AddressableStore:
        return FaultyStore(device_store(units))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
class TestDeviceStoreOnTheGpu(BlockStoreContract):
    """The processor cannot reach its addresses, so those have no test here."""

    def make_store(self, units: int) -> BlockStore:
        return device_store(units, device="cuda")
