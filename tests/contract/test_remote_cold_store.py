"""The cold store over a channel satisfies what the one of this process does."""

import contextlib
from collections.abc import Iterator
from pathlib import Path

import pytest

from h3kv.core.layout import CacheLayout
from h3kv.core.ports import BlockStore, PersistentStore
from h3kv.core.types import BlockKey, SegmentId, SegmentLabel
from h3kv.telemetry.recorder import Recorder
from h3kv.testing.served_cold_store import ServedColdStore, region_memory, slots_region
from h3kv.tiers.cold import ColdStore, ColdStoreConfig
from h3kv.tiers.cold.config import Wrap
from h3kv.tiers.cold.geometry import capacity_for

from .block_store import BlockStoreContract
from .store_suite import CODES_LAYOUT, memory_from
from .unit_reads import UnitReadsContract

FINGERPRINT = bytes(range(32))
MEMORY_UNITS = 64


class RemoteColdStoreContract(BlockStoreContract):
    churn_rounds = 200
    wrap: Wrap = "none"

    @pytest.fixture(autouse=True)
    def place(self, tmp_path: Path) -> Iterator[None]:
        self.folder = tmp_path
        region = slots_region(self.layout.block_bytes, MEMORY_UNITS)
        with contextlib.ExitStack() as stack:
            self.regions, self.stack = (region,), stack
            allocate = stack.enter_context(region_memory(region))
            stack.enter_context(memory_from(allocate))
            yield

    def label(self, segment: SegmentId) -> SegmentLabel | None:
        return SegmentLabel((BlockKey(segment.to_bytes(32, "little")),), BlockKey(bytes(32)))

    def make_persistent(self, units: int) -> PersistentStore:
        cache = CacheLayout(slab=self.layout, layers=1)
        config = ColdStoreConfig(capacity_bytes=capacity_for(cache, units=units), wrap=self.wrap)
        served = ServedColdStore(
            lambda bell: ColdStore.open(
                self.folder, cache, fingerprint=FINGERPRINT, config=config, telemetry=Recorder(), bell=bell
            ),
            self.regions,
        )
        self.stack.callback(served.close)
        return served.open_client()

    def make_store(self, units: int) -> BlockStore:
        return self.make_persistent(units)


class TestRemoteColdStore(RemoteColdStoreContract, UnitReadsContract):
    pass


class TestRemoteColdStoreOfCodes(TestRemoteColdStore):
    layout = CODES_LAYOUT


class TestRemoteWrappedColdStore(RemoteColdStoreContract):
    wrap = "lz4"
