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
