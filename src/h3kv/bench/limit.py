"""The physical limit of decode: how fast this machine reads memory."""

from __future__ import annotations

import mmap
from typing import Final

import torch
from torch import Tensor

from h3kv import _native
from h3kv.bench.measure import seconds_of

GIB: Final = 1 << 30


def huge_buffer(size_bytes: int) -> Tensor:
    """Zeroed uint8 CPU memory in huge pages where the system gives them, so that address translation costs nothing."""
    memory = mmap.mmap(-1, size_bytes)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        memory.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(memory, dtype=torch.uint8).fill_(0)


class ReadLimit:
    """Reads a buffer with every read kernel; the fastest counts. 1 GiB never fits a cache."""

    def __init__(self, buffer: Tensor | None = None) -> None:
        self._buffer = huge_buffer(GIB) if buffer is None else buffer

    def bytes_per_second(self) -> float:
        """Bandwidth of the best kernel on all threads, now."""
        return max(self._measure(variant) for variant in range(_native.READ_VARIANTS))

    def _measure(self, variant: int) -> float:
        size_bytes = self._buffer.numel()
        threads = torch.get_num_threads()
        return size_bytes / seconds_of(lambda: _native.read_all(self._buffer.data_ptr(), size_bytes, variant, threads))
