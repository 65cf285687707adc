"""Errors for a model that does not fit into memory, before and while it is loaded."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch

from h3kv.core.errors import HostMemoryError
from h3kv.core.units import describe_size

_CURE = "free memory, raise the container's limit, or choose a smaller model or dtype (bf16)"


def check_memory(needed_bytes: int, available_bytes: int, purpose: str) -> None:
    """Refuse before anything is allocated.

    Raises:
        HostMemoryError: `purpose` needs more than is available.
    """
    if needed_bytes > available_bytes:
        sizes = f"{describe_size(needed_bytes)} but {describe_size(available_bytes)} are available"
        raise HostMemoryError(
            f"{purpose} needs {sizes}; {_CURE}",
            needed_bytes=needed_bytes,
            available_bytes=available_bytes,
        )


@contextlib.contextmanager
def memory_errors(purpose: str, needed_bytes: int) -> Iterator[None]:
    """Turn failures to allocate into HostMemoryError while the context lasts."""
    try:
        yield
    except (MemoryError, RuntimeError) as error:
        if not _is_out_of_memory(error):
            raise
        raise HostMemoryError(
            f"out of memory in {purpose}, which needs {describe_size(needed_bytes)}; {_CURE}",
            needed_bytes=needed_bytes,
            available_bytes=None,
        ) from error


def _is_out_of_memory(error: MemoryError | RuntimeError) -> bool:
    """Torch's CPU allocator raises a bare RuntimeError that only its text tells apart."""
    return isinstance(error, MemoryError | torch.OutOfMemoryError) or "DefaultCPUAllocator" in str(error)
