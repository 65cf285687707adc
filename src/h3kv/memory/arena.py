"""The bytes behind a store: one range of memory, addressed by offset.

On the CPU it is an anonymous mapping: page aligned, committed by the kernel when first touched, and marked for huge
pages, since attention walks it in long runs. A cap may therefore be generous: what no token has filled costs nothing.
"""

from __future__ import annotations

import contextlib
import mmap

import torch
from torch import Tensor

from h3kv.core.errors import HostMemoryError
from h3kv.core.units import describe_size
from h3kv.machine import detect


def _refusal(size_bytes: int, available_bytes: int, device: torch.device) -> HostMemoryError:
    return HostMemoryError(
        f"the key-value cache asks for {describe_size(size_bytes)} on {device}, where {describe_size(available_bytes)} "
        "are available: lower device.kv_bytes or free memory",
        needed_bytes=size_bytes,
        available_bytes=available_bytes,
    )


def _main_memory(size_bytes: int, device: torch.device) -> Tensor:
    available_bytes = detect().memory_available_bytes
    if size_bytes > available_bytes:
        raise _refusal(size_bytes, available_bytes, device)
    try:
        memory = mmap.mmap(-1, size_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except OSError as error:
        raise _refusal(size_bytes, available_bytes, device) from error
    # A kernel without transparent huge pages refuses the hint; small pages work as well, only slower.
    with contextlib.suppress(OSError):
        memory.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(memory, dtype=torch.uint8)


def _device_memory(size_bytes: int, device: torch.device) -> Tensor:
    try:
        return torch.empty(size_bytes, dtype=torch.uint8, device=device)
    except torch.OutOfMemoryError as error:
        available_bytes, _ = torch.cuda.mem_get_info(device)
        raise _refusal(size_bytes, available_bytes, device) from error


def allocate_arena(size_bytes: int, device: torch.device) -> Tensor:
    """Memory of so many bytes, as a uint8 tensor that owns it. It starts at a multiple of 4 KiB on the CPU.

    Raises:
        HostMemoryError: the system or the device refuses that much.
    """
    return _main_memory(size_bytes, device) if device.type == "cpu" else _device_memory(size_bytes, device)
