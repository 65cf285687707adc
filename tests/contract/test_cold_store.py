from pathlib import Path

import pytest

from h3kv.core.errors import ConfigError
from h3kv.core.layout import CacheLayout
from h3kv.core.ports import BlockStore, PersistentStore
from h3kv.core.types import BlockKey, SegmentId, SegmentLabel
from h3kv.telemetry.recorder import Recorder
from h3kv.testing.faulty_files import FaultPlan, FaultyFiles
from h3kv.testing.faulty_store import FaultyStore
from h3kv.tiers.cold import ColdStore, ColdStoreConfig
from h3kv.tiers.cold.config import Wrap
from h3kv.tiers.cold.geometry import capacity_for
from h3kv.tiers.cold.seam import EngineFactory
from h3kv.tiers.io import Backend

from .block_store import BlockStoreContract
from .store_suite import CODES_LAYOUT
from .unit_reads import UnitReadsContract

FINGERPRINT = bytes(range(32))


class ColdStoreContract(BlockStoreContract):
    churn_rounds = 200

    @pytest.fixture(autouse=True)
    def place(self, tmp_path: Path) -> None:
        self.folder = tmp_path

    def label(self, segment: SegmentId) -> SegmentLabel | None:
        return SegmentLabel((BlockKey(segment.to_bytes(32, "little")),), BlockKey(bytes(32)))

    def open(
        self, units: int, *, backend: Backend = "auto", engine: EngineFactory | None = None, wrap: Wrap = "none"
    ) -> ColdStore:
        cache = CacheLayout(slab=self.layout, layers=1)
        config = ColdStoreConfig(capacity_bytes=capacity_for(cache, units=units), backend=backend, wrap=wrap)
        return ColdStore.open(
            self.folder, cache, fingerprint=FINGERPRINT, config=config, telemetry=Recorder(), engine=engine
        )


class UnwrappedColdStoreContract(UnitReadsContract, ColdStoreContract):
    pass


class TestColdStoreOnTheRing(UnwrappedColdStoreContract):
    def make_persistent(self, units: int) -> PersistentStore:
        try:
            return self.open(units, backend="io_uring")
        except ConfigError as error:
            pytest.skip(str(error))


class TestColdStoreOfCodesOnTheRing(TestColdStoreOnTheRing):
    layout = CODES_LAYOUT


class TestColdStoreOnThreads(UnwrappedColdStoreContract):
    def make_persistent(self, units: int) -> PersistentStore:
        return self.open(units, backend="threads")


class TestColdStoreOnFaultyFilesAtRateZero(UnwrappedColdStoreContract):
    def make_persistent(self, units: int) -> PersistentStore:
        return self.open(units, engine=lambda files: FaultyFiles(files, FaultPlan()))


class TestFaultyColdStoreAtRateZero(UnwrappedColdStoreContract):
    def make_persistent(self, units: int) -> PersistentStore:
        return FaultyStore(self.open(units))


class TestWrappedColdStore(ColdStoreContract):
    def make_store(self, units: int) -> BlockStore:
        return self.open(units, wrap="lz4")


class TestWrappedColdStoreOfCodes(TestWrappedColdStore):
    layout = CODES_LAYOUT
