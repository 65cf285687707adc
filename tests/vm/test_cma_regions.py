"""Regions of contiguous memory from a DMA heap, and reads from an NVMe disk into them past all caches.

Runs in the virtual test machine only: `make test-vm VM=FOLDER`.
"""

from __future__ import annotations

import contextlib
import gc
import os
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from tests.integration.region_rig import SECOND, Child, Owner, filled
from tests.vm.machine import DEVICE, FACTS, SERIAL, in_machine_only, sectors_read

from h3kv.core.errors import StoreFormatError
from h3kv.core.layout import CacheLayout, PageLayout, SlabLayout
from h3kv.core.types import DType, Fetch, SlabKey
from h3kv.machine import dma_heaps
from h3kv.memory.dma_heap import allocate, dma_buffer_bytes
from h3kv.memory.leases import check_current
from h3kv.memory.region import SHARED_KINDS, Region, RegionKind
from h3kv.memory.region_format import RegionGeometry, RegionIdentity
from h3kv.memory.region_hub import HolderGone
from h3kv.testing.cold_segments import open_store, payload, restore, settle, write_segments
from h3kv.tiers.cold.format import format_store
from h3kv.tiers.cold.seam import crc32c
from h3kv.tiers.host import HostStore, HostStoreConfig
from h3kv.tiers.io import OK, OP_DTYPE, READ, IoEngine, describe

LAYOUT = CacheLayout(slab=SlabLayout(page=PageLayout(dtype=DType.BF16, head_dim=64), kv_heads=3), layers=6)
GEOMETRY = RegionGeometry(block_bytes=64 << 10, blocks=64)
TOKEN = bytes(range(16))


pytestmark = in_machine_only


def open_descriptors() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


@pytest.fixture(autouse=True)
def nothing_is_left_behind() -> Iterator[None]:
    gc.collect()
    descriptors = open_descriptors()
    yield
    gc.collect()
    assert open_descriptors() == descriptors


def make_region() -> Region:
    region = Region.create(GEOMETRY, identity=RegionIdentity(1, "host", TOKEN), kinds=SHARED_KINDS)
    assert (region.kind, region.fallback_reason) == (RegionKind.DMA_HEAP, None)
    return region


def test_contiguous_heap_is_found_and_the_system_heap_is_not_offered() -> None:
    names = [heap.name for heap in dma_heaps()]
    assert names == ["reserved"]
    assert sorted(path.name for path in Path("/dev/dma_heap").iterdir()) == ["reserved", "system"]


def test_region_lies_in_contiguous_memory_at_its_address_and_can_be_mapped_again() -> None:
    region = make_region()
    assert region.address == 0x3100_0000_0000
    assert not region.can_register
    assert not np.frombuffer(region.slots, dtype=np.uint64).any()
    region.slots[:3] = b"abc"
    assert region.fd is not None
    assert dma_buffer_bytes(region.fd) == GEOMETRY.size_bytes
    kept = os.dup(region.fd)
    region.close()
    gc.collect()
    attached = Region.attach(kept)
    assert (attached.kind, attached.geometry, attached.address) == (RegionKind.DMA_HEAP, GEOMETRY, 0x3100_0000_0000)
    assert bytes(attached.slots[:3]) == b"abc"
    attached.close()
    gc.collect()
    os.close(kept)


def test_contiguous_memory_goes_back_to_the_heap() -> None:
    geometry = RegionGeometry(block_bytes=1 << 20, blocks=64)
    for _ in range(12):
        # Together they are three times the heap.
        region = Region.create(geometry, kinds=SHARED_KINDS)
        assert region.kind is RegionKind.DMA_HEAP, region.fallback_reason
        region.close()
        gc.collect()


def test_buffer_that_is_no_region_is_refused() -> None:
    (heap,) = dma_heaps()
    fd = allocate(heap, 2 << 20)
    with pytest.raises(StoreFormatError, match="does not begin as a region"):
        Region.attach(fd)
    os.close(fd)


def test_more_than_the_heap_has_comes_from_elsewhere_and_the_reason_names_the_heap() -> None:
    geometry = RegionGeometry(block_bytes=1 << 20, blocks=512)
    region = Region.create(geometry, kinds=SHARED_KINDS)
    assert region.kind is RegionKind.MEMFD
    assert region.fallback_reason is not None
    assert region.fallback_reason.startswith("/dev/dma_heap/reserved refuses")
    assert "cma=" in region.fallback_reason
    region.close()


@pytest.mark.parametrize("backend", ["io_uring", "threads"])
def test_disk_is_read_into_contiguous_memory_past_the_page_cache(backend: str) -> None:
    size_bytes = 1 << 20
    content = np.random.default_rng(5).integers(0, 256, size_bytes, dtype=np.uint8)
    with DEVICE.open("r+b", buffering=0) as disk:
        disk.seek(8 << 20)
        disk.write(content)
        os.fsync(disk.fileno())
    region = make_region()
    file = os.open(DEVICE, os.O_RDONLY | os.O_DIRECT | os.O_CLOEXEC)
    crcs = np.array(
        [crc32c(content[start : start + 4096].tobytes()) for start in range(0, size_bytes, 4096)], dtype=np.uint32
    )
    before = sectors_read()
    with contextlib.closing(IoEngine.open([file], depth=32, backend=backend)) as engine:
        ops = np.zeros(16, dtype=OP_DTYPE)
        for number, op in enumerate(ops):
            part = number * (size_bytes // 16)
            op["tag"], op["kind"], op["size"] = number, READ, size_bytes // 16
            op["offset"] = (8 << 20) + part
            op["address"] = region.address + GEOMETRY.data_offset + part
            op["crcs"], op["page_bytes"] = crcs[part // 4096 :].ctypes.data, 4096
        engine.submit(ops)
        engine.wait(30 * SECOND, results=16)
        results = engine.poll()
        assert [describe(result) for result in results if result["status"] != OK] == []
        assert len(results) == 16
        assert (engine.backend, engine.fixed_buffers) == (backend, False)
    assert (sectors_read() - before) * 512 >= size_bytes
    assert (np.frombuffer(region.slots, dtype=np.uint8, count=size_bytes) == content).all()
    os.close(file)
    region.close()


def test_slabs_of_the_cold_store_land_in_slots_of_contiguous_memory() -> None:
    with DEVICE.open("r+b", buffering=0) as disk:
        size = disk.seek(0, os.SEEK_END)
        for offset in (0, size - (1 << 20)):
            disk.seek(offset)
            disk.write(bytes(1 << 20))
        os.fsync(disk.fileno())
    format_store(DEVICE, lambda files: IoEngine.open(files, depth=32), capacity_bytes=None, area_bytes=None, yes=SERIAL)
    slab_bytes = LAYOUT.slab.size_bytes(16)
    host = HostStore(LAYOUT.slab, HostStoreConfig(LAYOUT.layers * slab_bytes, SHARED_KINDS))
    assert host.region.kind is RegionKind.DMA_HEAP
    assert host.buffers == [], "memory of a DMA heap is never registered"
    capacity = int((FACTS / "size").read_text()) * 512
    with contextlib.closing(open_store(DEVICE, capacity_bytes=capacity, layout=LAYOUT)) as store:
        write_segments(store, [(1, 16)], layout=LAYOUT)
    with contextlib.closing(open_store(DEVICE, capacity_bytes=capacity, layout=LAYOUT)) as store:
        handles = host.reserve([16] * LAYOUT.layers)
        before = sectors_read()
        (segment,) = restore(store).values()
        fetches = [
            Fetch(SlabKey(segment.segment, layer), source, host.view(target))
            for layer, (source, target) in enumerate(zip(segment.handles_L, handles, strict=True))
        ]
        store.submit(fetches)
        assert [each.error for each in settle(store, len(fetches))] == [None] * len(fetches)
        assert (sectors_read() - before) * 512 >= len(fetches) * slab_bytes
        for layer, handle in enumerate(handles):
            assert bytes(host.view(handle)) == bytes(payload(1, layer, slab_bytes))
        store.check_integrity()
        del fetches
    host.check_integrity()
    host.close()


def test_contiguous_region_is_shared_and_adopted_by_a_restarted_owner(tmp_path: Path) -> None:
    socket_path = tmp_path / "regions.sock"
    owner = Owner(socket_path)
    assert owner.host.kind is RegionKind.DMA_HEAP
    child = Child("holder", socket_path, 1)
    try:
        holder = owner.connect(child)
        handles = filled(owner, child, holder, mark=77)
        owner.stop()
        assert child.do("await_end", timeout_s=60) == {"ended": True}
        child.tell("connect", timeout_s=60)
        owner = Owner(socket_path, token=b"n" * 16, adopt_s=60)
        assert [region.kind for region in owner.adopted] == [RegionKind.DMA_HEAP, RegionKind.MEMFD]
        owner.events()
        assert child.answer()["outcome"] == "kept"
        assert child.do("check", mark=77) == {"intact": True}
        for handle in handles:
            check_current(owner.host.table, handle)
    finally:
        child.kill()
    assert owner.events() == [HolderGone(holder, "holder-1")]
    owner.leases.reclaim(holder)
    owner.stop()
