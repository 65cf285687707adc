import mmap
from pathlib import Path

import pytest
import torch

from h3kv.core.errors import HostMemoryError
from h3kv.memory.arena import allocate_arena

CPU = torch.device("cpu")


def test_arena_is_page_aligned_zeroed_bytes() -> None:
    arena = allocate_arena(1 << 16, CPU)
    assert arena.dtype == torch.uint8
    assert arena.shape == (1 << 16,)
    assert arena.data_ptr() % 4096 == 0
    assert not arena.any()
    arena[-1] = 7
    assert arena[-1] == 7


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1]) * mmap.PAGESIZE


def test_memory_is_committed_when_it_is_written() -> None:
    before = resident_bytes()
    arena = allocate_arena(256 << 20, CPU)
    assert resident_bytes() - before < 16 << 20
    arena[: 64 << 20] = 1
    assert 64 << 20 <= resident_bytes() - before < 96 << 20


def test_more_than_the_machine_has_is_refused_with_both_numbers() -> None:
    with pytest.raises(HostMemoryError) as caught:
        allocate_arena(1 << 50, CPU)
    assert caught.value.needed_bytes == 1 << 50
    assert caught.value.available_bytes is not None
    assert "device.kv_bytes" in str(caught.value)
