import gc
import mmap
import os
from pathlib import Path

import pytest

from h3kv.memory.mapping import HUGE_PAGE_BYTES, Mapping


def mapped_ranges() -> list[tuple[int, int]]:
    lines = Path("/proc/self/maps").read_text(encoding="utf-8").splitlines()
    spans = [line.split()[0].split("-") for line in lines]
    return [(int(start, 16), int(end, 16)) for start, end in spans]


def is_mapped(address: int) -> bool:
    return any(start <= address < end for start, end in mapped_ranges())


@pytest.mark.parametrize("size_bytes", [1, mmap.PAGESIZE, HUGE_PAGE_BYTES, HUGE_PAGE_BYTES + 5])
def test_private_mapping_is_aligned_zeroed_and_writable_to_its_end(size_bytes: int) -> None:
    mapping = Mapping(size_bytes, fd=None)
    view = mapping.view()
    assert mapping.address % HUGE_PAGE_BYTES == 0
    assert view.nbytes == size_bytes
    assert not any(view[:: max(1, size_bytes // 64)])
    view[-1] = 7
    assert view[-1] == 7


def test_two_mappings_of_a_file_show_the_same_bytes_after_it_was_closed() -> None:
    fd = os.memfd_create("test")
    os.ftruncate(fd, 2 * mmap.PAGESIZE)
    first, second = Mapping(2 * mmap.PAGESIZE, fd=fd), Mapping(2 * mmap.PAGESIZE, fd=fd)
    os.close(fd)
    assert first.address != second.address
    first.view()[4097] = 42
    assert second.view()[4097] == 42


def test_memory_lasts_until_the_last_view_is_gone() -> None:
    mapping = Mapping(HUGE_PAGE_BYTES, fd=None)
    is_alive, address = mapping.watch(), mapping.address
    part = mapping.view()[4096:8192]
    del mapping
    gc.collect()
    assert is_alive()
    part[0] = 1
    del part
    gc.collect()
    assert not is_alive()
    assert not is_mapped(address)


def test_no_addresses_are_left_behind() -> None:
    before = sum(end - start for start, end in mapped_ranges())
    for _ in range(20):
        Mapping(64 * HUGE_PAGE_BYTES, fd=None)
    gc.collect()
    assert sum(end - start for start, end in mapped_ranges()) - before < 64 * HUGE_PAGE_BYTES


def test_bad_descriptor_is_an_error_of_the_system() -> None:
    before = len(mapped_ranges())
    with pytest.raises(OSError, match="Bad file descriptor"):
        Mapping(mmap.PAGESIZE, fd=10_000)
    assert len(mapped_ranges()) == before


ADDRESS = 0x4F00_0000_0000
"""In the last window of shared regions."""


@pytest.mark.parametrize("is_shared", [False, True])
def test_mapping_lies_at_the_address_that_was_asked_for_or_nowhere(is_shared: bool) -> None:
    fd = None
    if is_shared:
        fd = os.memfd_create("test")
        os.ftruncate(fd, HUGE_PAGE_BYTES)
    before = len(mapped_ranges())
    mapping = Mapping(HUGE_PAGE_BYTES, fd=fd, address=ADDRESS)
    assert mapping.address == ADDRESS
    mapping.view()[-1] = 3
    with pytest.raises(FileExistsError):
        Mapping(HUGE_PAGE_BYTES, fd=fd, address=ADDRESS)
    with pytest.raises(FileExistsError):
        Mapping(2 * HUGE_PAGE_BYTES, fd=None, address=ADDRESS - HUGE_PAGE_BYTES)
    assert mapping.view()[-1] == 3
    assert mapping.can_pin()
    del mapping
    gc.collect()
    assert not is_mapped(ADDRESS)
    if fd is not None:
        os.close(fd)
    assert len(mapped_ranges()) == before


def test_memory_that_the_kernel_cannot_reach_is_told_apart() -> None:
    """A file that ends before its mapping has no pages to be reached."""
    fd = os.memfd_create("test")
    mapping = Mapping(mmap.PAGESIZE, fd=fd)
    assert not mapping.can_pin()
    os.close(fd)
