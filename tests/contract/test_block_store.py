import pytest
import torch

from h3kv.core.layout import SlabLayout
from h3kv.core.ports import AddressableStore, BlockStore
from h3kv.core.types import Tier
from h3kv.memory.leases import LeasedRoom, LeaseTable
from h3kv.memory.region import Region, RegionKind
from h3kv.memory.region_format import RegionGeometry
from h3kv.testing.fake_store import FakeStore
from h3kv.testing.faulty_store import FaultyStore
from h3kv.tiers.device import DeviceStore, DeviceStoreConfig
from h3kv.tiers.host import HostStore, HostStoreConfig, SharedHostStore

from .addressable_store import AddressableStoreContract
from .block_store import BlockStoreContract
from .store_suite import CODES_LAYOUT, LAYOUT, UNIT_BLOCKS


def device_store(units: int, *, device: str = "cpu", layout: SlabLayout = LAYOUT) -> DeviceStore:
    return DeviceStore(layout, DeviceStoreConfig(layout.size_bytes(units * UNIT_BLOCKS), device))


def host_store(units: int, *kinds: RegionKind, layout: SlabLayout = LAYOUT) -> HostStore:
    return HostStore(layout, HostStoreConfig(layout.size_bytes(units * UNIT_BLOCKS), kinds))


class TestDeviceStore(AddressableStoreContract):
    def make_store(self, units: int) -> AddressableStore:
        return device_store(units, layout=self.layout)


class TestDeviceStoreOfCodes(TestDeviceStore):
    layout = CODES_LAYOUT


class TestHostStore(AddressableStoreContract):
    churn_rounds = 100_000

    def make_store(self, units: int) -> AddressableStore:
        return host_store(units, RegionKind.HUGETLB, RegionKind.MEMFD, layout=self.layout)


class TestHostStoreOfCodes(TestHostStore):
    layout = CODES_LAYOUT
    churn_rounds = 2_000


class TestHostStoreInPrivateMemory(AddressableStoreContract):
    def make_store(self, units: int) -> AddressableStore:
        return host_store(units, RegionKind.ANONYMOUS, layout=self.layout)


class TestSharedHostStore(AddressableStoreContract):
    """Room is leased unit by unit, as it is needed."""

    churn_rounds = 20_000

    def make_store(self, units: int) -> AddressableStore:
        geometry = RegionGeometry(self.layout.block_bytes, units * UNIT_BLOCKS)
        region = Region.create(geometry)
        leases = LeaseTable(region.table)
        room = LeasedRoom(Tier.HOST, region.table, lambda wanted: leases.lease(2, wanted) or [])
        return SharedHostStore(self.layout, region, room)


class TestSharedHostStoreOfCodes(TestSharedHostStore):
    layout = CODES_LAYOUT
    churn_rounds = 2_000


class TestFakeStore(AddressableStoreContract):
    def make_store(self, units: int) -> AddressableStore:
        return FakeStore(self.layout, capacity_blocks=units * UNIT_BLOCKS)


class TestFakeStoreOfCodes(TestFakeStore):
    layout = CODES_LAYOUT


class TestLateFakeStore(AddressableStoreContract):
    def make_store(self, units: int) -> AddressableStore:
        return FakeStore(self.layout, capacity_blocks=units * UNIT_BLOCKS, latency_polls=3, tier=Tier.HOST)


class TestFaultyStoreAtRateZero(AddressableStoreContract):
    def make_store(self, units: int) -> AddressableStore:
        return FaultyStore(device_store(units, layout=self.layout))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
class TestDeviceStoreOnTheGpu(BlockStoreContract):
    """The processor cannot reach its addresses, so those have no test here."""

    def make_store(self, units: int) -> BlockStore:
        return device_store(units, device="cuda", layout=self.layout)
