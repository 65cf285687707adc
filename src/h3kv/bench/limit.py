"""The physical limit of decode: how fast this machine reads memory."""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor

from h3kv import _native
from h3kv.bench.measure import seconds_of
from h3kv.memory.arena import allocate_arena

GIB: Final = 1 << 30


def huge_buffer(size_bytes: int) -> Tensor:
    """Zeroed uint8 memory of the same kind as a KV cache's, committed before anything is timed."""
    return allocate_arena(size_bytes, torch.device("cpu")).fill_(0)


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
