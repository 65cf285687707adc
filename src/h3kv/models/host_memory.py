"""Errors for a model that does not fit into memory, before and while it is loaded."""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Iterator
from typing import Final

import torch

from h3kv.core.errors import HostMemoryError
from h3kv.core.units import describe_size

CURE: Final = "free memory, raise the container's limit, or choose a smaller model or dtype (bf16)"

_SIGNS = ("DefaultCPUAllocator", os.strerror(errno.ENOMEM))
"""What torch's allocator, and what a failed mapping, write into their errors."""


def check_memory(needed_bytes: int, available_bytes: int, purpose: str) -> None:
    """Refuse before anything is allocated.

    Raises:
        HostMemoryError: `purpose` needs more than is available.
    """
    if needed_bytes > available_bytes:
        sizes = f"{describe_size(needed_bytes)} but {describe_size(available_bytes)} are available"
        raise HostMemoryError(
            f"{purpose} needs {sizes}; {CURE}",
            needed_bytes=needed_bytes,
            available_bytes=available_bytes,
        )


@contextlib.contextmanager
def memory_errors(purpose: str, needed_bytes: int) -> Iterator[None]:
    """Turn failures to allocate into HostMemoryError while the context lasts."""
    try:
        yield
    except (MemoryError, RuntimeError) as error:
        if not is_out_of_memory(error):
            raise
        raise HostMemoryError(
            f"out of memory in {purpose}, which needs {describe_size(needed_bytes)}; {CURE}",
            needed_bytes=needed_bytes,
            available_bytes=None,
        ) from error


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an allocation or a mapping failed. Torch raises bare RuntimeErrors that only their text tells apart."""
    return isinstance(error, MemoryError | torch.OutOfMemoryError) or any(sign in str(error) for sign in _SIGNS)
