import gc
import os
from pathlib import Path

import pytest

from h3kv.core.errors import ConfigError, HostMemoryError, StaleHandleError, TierClosedError
from h3kv.core.layout import PageLayout, SlabLayout
from h3kv.core.types import DType, Fetch, Move, SegmentId, SlabKey, Tier
from h3kv.memory.region import Region, RegionKind
from h3kv.tiers.host import HostStore, HostStoreConfig

LAYOUT = SlabLayout(PageLayout(dtype=DType.BF16, head_dim=64), kv_heads=3)
UNIT_BYTES = 16 * 3 * 16_384
SHARED = (RegionKind.HUGETLB, RegionKind.MEMFD)
KEY = SlabKey(SegmentId(1), 0)


@pytest.mark.parametrize("capacity_bytes", [UNIT_BYTES, 2 * UNIT_BYTES - 1])
def test_capacity_is_rounded_down_to_whole_units(capacity_bytes: int) -> None:
    store = HostStore(LAYOUT, HostStoreConfig(capacity_bytes))
    assert store.tier is Tier.HOST
    assert store.statistics().capacity_bytes == UNIT_BYTES
    store.check_integrity()
    store.close()


@pytest.mark.parametrize("capacity_bytes", [0, UNIT_BYTES - 1])
def test_cap_below_one_unit_is_refused_with_the_sum(capacity_bytes: int) -> None:
    with pytest.raises(ConfigError, match=rf"16 blocks x 49152 bytes = {UNIT_BYTES} bytes") as caught:
        HostStore(LAYOUT, HostStoreConfig(capacity_bytes))
    assert caught.value.field == "host.kv_bytes"


def test_cap_beyond_the_machine_is_refused_before_anything_is_taken() -> None:
    with pytest.raises(HostMemoryError, match=r"host\.kv_bytes"):
        HostStore(LAYOUT, HostStoreConfig(1 << 50))


def test_slots_lie_in_the_one_buffer_for_io_and_suit_direct_io() -> None:
    store = HostStore(LAYOUT, HostStoreConfig(2 * UNIT_BYTES))
    ((address, size_bytes),) = store.buffers
    assert size_bytes == 2 * UNIT_BYTES
    for handle in store.reserve([4, 1, 16, 2]):
        assert store.address(handle) == address + LAYOUT.size_bytes(handle.slot)
        assert store.address(handle) % 4096 == 0
    store.check_integrity()
    store.close()


def test_view_writes_where_the_slot_lies() -> None:
    store = HostStore(LAYOUT, HostStoreConfig(UNIT_BYTES))
    _, handle = store.reserve([1, 2])
    store.view(handle)[:] = b"\x33" * LAYOUT.size_bytes(2)
    store.submit([Move(KEY, handle, None)])
    store.poll()
    target = bytearray(LAYOUT.size_bytes(2))
    store.submit([Fetch(KEY, handle, memoryview(target))])
    assert [completion.error for completion in store.poll()] == [None]
    assert set(target) == {0x33}
    store.release([handle])
    with pytest.raises(StaleHandleError):
        store.view(handle)
    store.check_integrity()
    store.close()


def test_whoever_attaches_to_the_region_sees_slots_generations_and_bytes() -> None:
    store = HostStore(LAYOUT, HostStoreConfig(UNIT_BYTES, SHARED))
    (old,) = store.reserve([4])
    store.release([old])
    (handle,) = store.reserve([4])
    store.view(handle)[:3] = b"abc"
    assert store.region.fd is not None
    attached = Region.attach(store.region.fd)
    entry = attached.table[handle.slot]
    assert (entry["generation"], entry["blocks"]) == (handle.generation, 4)
    assert handle.generation == old.generation + 1
    assert bytes(attached.slots[:3]) == b"abc"
    attached.close()
    store.check_integrity()
    store.close()


def test_close_gives_memory_and_descriptor_back() -> None:
    before = len(list(Path("/proc/self/fd").iterdir()))
    store = HostStore(LAYOUT, HostStoreConfig(UNIT_BYTES, SHARED))
    region = store.region
    (handle,) = store.reserve([1])
    assert region.fd is not None
    assert os.fstat(region.fd).st_size == region.size_bytes
    store.close()
    store.close()
    gc.collect()
    assert not region.is_mapped
    assert len(list(Path("/proc/self/fd").iterdir())) == before
    with pytest.raises(TierClosedError, match="open a new node"):
        store.view(handle)
    with pytest.raises(TierClosedError):
        _ = store.buffers
    store.check_integrity()
