import fcntl
import gc
import os
import struct
import zlib
from collections.abc import Callable
from pathlib import Path

import pytest

from h3kv.core.errors import HostMemoryError, RegionAddressError, StoreFormatError
from h3kv.machine import HugePages, detect_huge_pages, dma_heaps
from h3kv.memory.mapping import HUGE_PAGE_BYTES
from h3kv.memory.region import SHARED_KINDS, Region, RegionKind
from h3kv.memory.region_format import SEALS, TABLE_OFFSET, OpaqueGeometry, RegionGeometry, RegionIdentity, pack_header

GEOMETRY = RegionGeometry(block_bytes=8192, blocks=32)
TOKEN = bytes(range(16))
IDENTITY = RegionIdentity(1, "host", TOKEN)
NONE = HugePages(free_pages=0, shared=False, private=False)
ALL = (RegionKind.HUGETLB, RegionKind.MEMFD, RegionKind.ANONYMOUS)


def open_descriptors() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


def test_geometry_keeps_slots_at_multiples_of_4_kib_and_regions_whole_huge_pages() -> None:
    for blocks in (16, 256, 4096, 65_536):
        geometry = RegionGeometry(block_bytes=3 * 4096, blocks=blocks)
        assert geometry.data_offset % 4096 == 0
        assert geometry.data_offset >= TABLE_OFFSET + 16 * blocks
        assert geometry.size_bytes % HUGE_PAGE_BYTES == 0
        assert 0 <= geometry.size_bytes - geometry.data_offset - geometry.data_bytes < HUGE_PAGE_BYTES


def test_new_region_is_empty_and_says_why_it_has_no_huge_pages() -> None:
    region = Region.create(GEOMETRY, huge_pages=NONE)
    assert region.kind is RegionKind.MEMFD
    assert not region.has_huge_pages
    assert region.fallback_reason is not None
    assert "1 huge pages of 2 MiB are needed and 0 are free: raise vm.nr_hugepages" in region.fallback_reason
    assert "shmem_enabled" in region.fallback_reason
    assert region.slots.nbytes == region.data.numel() == GEOMETRY.data_bytes
    assert (region.address + GEOMETRY.data_offset) == region.data.data_ptr()
    assert region.address % HUGE_PAGE_BYTES == 0
    assert not region.table["blocks"].any()
    assert not any(region.slots)
    region.close()


def test_private_memory_is_taken_where_it_alone_has_huge_pages() -> None:
    if not detect_huge_pages().private:
        pytest.skip("this kernel gives private memory no huge pages")
    offered = HugePages(free_pages=0, shared=False, private=True)
    region = Region.create(GEOMETRY, kinds=ALL, huge_pages=offered)
    assert (region.kind, region.fd, region.has_huge_pages) == (RegionKind.ANONYMOUS, None, True)
    region.close()
    shared = Region.create(GEOMETRY, huge_pages=offered)
    assert shared.kind is RegionKind.MEMFD
    shared.close()


def test_huge_pages_that_were_set_aside_are_reserved_at_once() -> None:
    before = detect_huge_pages()
    pages = GEOMETRY.size_bytes // HUGE_PAGE_BYTES
    if before.free_pages < pages:
        pytest.skip("no huge pages of 2 MiB are set aside here")
    region = Region.create(GEOMETRY)
    assert (region.kind, region.has_huge_pages, region.fallback_reason) == (RegionKind.HUGETLB, True, None)
    assert detect_huge_pages().free_pages == before.free_pages - pages
    fd = region.fd
    assert fd is not None
    attached = Region.attach(fd)
    assert attached.kind is RegionKind.HUGETLB
    attached.slots[-1] = 5
    assert region.slots[-1] == 5
    attached.close()
    region.close()
    gc.collect()
    assert detect_huge_pages().free_pages == before.free_pages


def test_huge_pages_that_are_promised_but_not_there_lead_to_the_next_kind() -> None:
    free = detect_huge_pages().free_pages
    geometry = RegionGeometry(block_bytes=HUGE_PAGE_BYTES, blocks=16 * (free // 16 + 1))
    before = open_descriptors()
    region = Region.create(geometry, huge_pages=HugePages(free_pages=1 << 30, shared=False, private=False))
    assert region.kind is RegionKind.MEMFD
    assert region.fallback_reason is not None
    assert "vm.nr_hugepages" in region.fallback_reason
    region.close()
    assert open_descriptors() == before


def test_memory_is_committed_when_it_is_written() -> None:
    geometry = RegionGeometry(block_bytes=1 << 20, blocks=64)
    region = Region.create(geometry, huge_pages=NONE)
    assert region.fd is not None
    before = os.fstat(region.fd).st_blocks * 512
    region.slots[: 8 << 20] = bytes(8 << 20)
    grown = os.fstat(region.fd).st_blocks * 512 - before
    assert 8 << 20 <= grown < 16 << 20
    region.close()


def test_attached_region_shows_the_same_bytes_and_slots() -> None:
    region = Region.create(GEOMETRY, huge_pages=NONE)
    region.table["blocks"][4] = 4
    region.table["generation"][4] = 9
    region.slots[100:103] = b"abc"
    assert region.fd is not None
    attached = Region.attach(region.fd)
    assert attached.geometry == GEOMETRY
    assert attached.kind is RegionKind.MEMFD
    assert attached.fd != region.fd
    assert attached.table.tolist() == region.table.tolist()
    region.close()
    assert bytes(attached.slots[100:103]) == b"abc"
    attached.table["generation"][4] += 1
    attached.close()


def test_close_gives_memory_and_descriptor_back() -> None:
    before = open_descriptors()
    region = Region.create(GEOMETRY)
    part = region.slots[:10]
    region.close()
    region.close()
    assert region.fd is None
    assert open_descriptors() == before
    assert region.is_mapped, "a view is still in use"
    part[0] = 1
    del part
    gc.collect()
    assert not region.is_mapped


def test_many_regions_leave_nothing_behind() -> None:
    before = open_descriptors()
    for _ in range(50):
        region = Region.create(GEOMETRY)
        assert region.fd is not None
        Region.attach(region.fd).close()
        region.close()
    gc.collect()
    assert open_descriptors() == before


def test_more_than_the_machine_has_is_refused_with_both_numbers() -> None:
    before = open_descriptors()
    geometry = RegionGeometry(block_bytes=1 << 40, blocks=1024)
    for kinds in (ALL, ALL[:2]):
        with pytest.raises(HostMemoryError, match=r"host\.kv_bytes") as caught:
            Region.create(geometry, kinds=kinds)
        assert caught.value.needed_bytes == geometry.size_bytes
        assert caught.value.available_bytes is not None
    assert open_descriptors() == before


def test_size_of_a_region_cannot_be_changed_from_outside() -> None:
    region = Region.create(GEOMETRY, huge_pages=NONE)
    assert region.fd is not None
    for size_bytes in (4096, 2 * GEOMETRY.size_bytes):
        with pytest.raises(PermissionError):
            os.ftruncate(region.fd, size_bytes)
    region.close()


def crafted(content: bytes, *, size_bytes: int = GEOMETRY.size_bytes, seals: int = SEALS) -> int:
    fd = os.memfd_create("crafted", os.MFD_ALLOW_SEALING)
    os.ftruncate(fd, size_bytes)
    os.pwrite(fd, content, 0)
    if seals:
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, seals)
    return fd


def header(**changes: object) -> bytes:
    """A header with a valid crc and any contents."""
    fields: dict[str, object] = {
        "version": 2,
        "id": 0,
        "size": GEOMETRY.size_bytes,
        "block": 8192,
        "blocks": 32,
        "data": GEOMETRY.data_offset,
        "data_bytes": GEOMETRY.data_bytes,
        "address": 0,
        "purpose": b"",
        "token": b"",
    }
    packed = struct.pack("<8sIIQQQQQQ16s16s", b"H3REGION", *(fields | changes).values())
    return packed + struct.pack("<I", zlib.crc32(packed))


def flipped(content: bytes, at: int) -> bytes:
    return content[:at] + bytes([content[at] ^ 1]) + content[at + 1 :]


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: crafted(b""), "does not begin as a region does"),
        (lambda: crafted(b"H3", size_bytes=2), "does not begin as a region does"),
        (lambda: crafted(header(version=1)), "version 1, not 2"),
        (lambda: crafted(header(size=GEOMETRY.size_bytes + 4096)), "damaged"),
        (lambda: crafted(header(), size_bytes=2 * GEOMETRY.size_bytes), "damaged"),
        (lambda: crafted(header(), size_bytes=4096), "damaged"),
        (lambda: crafted(header(block=0)), "damaged"),
        (lambda: crafted(header(block=4000)), "damaged"),
        (lambda: crafted(header(block=1 << 60)), "damaged"),
        (lambda: crafted(header(blocks=0)), "damaged"),
        (lambda: crafted(header(blocks=31)), "damaged"),
        (lambda: crafted(header(blocks=1 << 60)), "damaged"),
        (lambda: crafted(header(data=0)), "damaged"),
        (lambda: crafted(header(id=1)), "damaged"),
        (lambda: crafted(header(data_bytes=4096)), "damaged"),
        (lambda: crafted(header(block=0, blocks=0)), "damaged"),
        (lambda: crafted(header(block=0, blocks=0, data=4096, data_bytes=0)), "damaged"),
        (lambda: crafted(header(address=0x7000_0000_0000)), "damaged"),
        (lambda: crafted(header(id=1, address=IDENTITY.address, token=TOKEN)), "damaged"),
        (lambda: crafted(header(id=1, address=IDENTITY.address, token=TOKEN, purpose=b"a b")), "damaged"),
        (lambda: crafted(header(id=1, address=IDENTITY.address, token=TOKEN, purpose=b"\xff")), "damaged"),
        (lambda: crafted(header(id=2, address=IDENTITY.address, token=TOKEN, purpose=b"host")), "damaged"),
        (lambda: crafted(header(id=99, address=IDENTITY.address, token=TOKEN, purpose=b"host")), "damaged"),
        (lambda: crafted(header(), seals=0), "not sealed"),
        (lambda: crafted(header(), seals=fcntl.F_SEAL_GROW), "not sealed"),
        (lambda: os.open("/dev/null", os.O_RDONLY), "pass a descriptor of one"),
        (lambda: os.pipe2(os.O_NONBLOCK)[0], "pass a descriptor of one"),
    ],
)
def test_malformed_header_is_refused(make: Callable[[], int], message: str) -> None:
    fd = make()
    before = open_descriptors()
    with pytest.raises(StoreFormatError, match=message):
        Region.attach(fd)
    assert open_descriptors() == before
    os.close(fd)


@pytest.mark.parametrize("at", range(len(pack_header(GEOMETRY))))
def test_any_flipped_byte_of_the_header_is_refused(at: int) -> None:
    assert pack_header(GEOMETRY) == header()
    fd = crafted(flipped(header(), at))
    with pytest.raises(StoreFormatError):
        Region.attach(fd)
    os.close(fd)


@pytest.mark.parametrize("slots", [{0: 3}, {0: 32}, {1: 2}, {4: 8}, {0: 4, 2: 1}, {16: 16, 24: 1}, {31: 1 << 31}])
def test_malformed_slot_table_is_refused(slots: dict[int, int]) -> None:
    region = Region.create(GEOMETRY, huge_pages=NONE)
    for offset, blocks in slots.items():
        region.table["blocks"][offset] = blocks
    assert region.fd is not None
    before = open_descriptors()
    with pytest.raises(StoreFormatError, match="slot table"):
        Region.attach(region.fd)
    assert open_descriptors() == before
    region.close()


def test_slot_table_with_a_holder_inside_of_a_unit_is_refused() -> None:
    region = Region.create(GEOMETRY, huge_pages=NONE)
    region.table["holder"][16] = 3
    assert region.fd is not None
    Region.attach(region.fd).close()
    region.table["holder"][17] = 3
    with pytest.raises(StoreFormatError, match="holders inside"):
        Region.attach(region.fd)
    region.close()


def test_shared_region_lies_at_the_address_of_its_number_and_says_what_it_is() -> None:
    region = Region.create(GEOMETRY, identity=IDENTITY, kinds=SHARED_KINDS, huge_pages=NONE)
    assert region.address == IDENTITY.address == 0x3100_0000_0000
    assert region.identity == IDENTITY
    assert region.fd is not None
    region.slots[:3] = b"abc"
    kept = os.dup(region.fd)
    with pytest.raises(RegionAddressError, match="must lie at 0x310000000000"):
        Region.attach(kept)
    with pytest.raises(RegionAddressError, match="must lie at 0x310000000000"):
        Region.create(GEOMETRY, identity=IDENTITY, huge_pages=NONE)
    region.close()
    gc.collect()
    attached = Region.attach(kept)
    os.close(kept)
    assert (attached.address, attached.identity) == (IDENTITY.address, IDENTITY)
    assert bytes(attached.slots[:3]) == b"abc"
    attached.close()


def test_region_without_slots_holds_data_of_any_form() -> None:
    geometry = OpaqueGeometry(data_bytes=8192)
    region = Region.create(geometry, identity=RegionIdentity(3, "table", TOKEN), huge_pages=NONE)
    assert region.slots.nbytes == 8192
    assert region.data.data_ptr() == region.address + 4096
    region.slots[-1] = 9
    kept = os.dup(region.fd or -1)
    region.close()
    gc.collect()
    attached = Region.attach(kept)
    os.close(kept)
    assert attached.geometry == geometry
    assert attached.slots[-1] == 9
    attached.close()


def test_reason_names_every_better_kind_that_was_not_had() -> None:
    if dma_heaps():
        pytest.skip("this machine has a DMA heap")
    region = Region.create(GEOMETRY, kinds=SHARED_KINDS, huge_pages=NONE)
    assert region.kind is RegionKind.MEMFD
    assert region.can_register
    assert region.fallback_reason is not None
    assert [part.split(":")[0][:24] for part in region.fallback_reason.split("; ")] == [
        "there is no DMA heap of ",
        "1 huge pages of 2 MiB ar",
        "the kernel gives shared ",
    ]
    region.close()
