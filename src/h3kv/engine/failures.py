"""What went wrong in one request, as an error of our tree."""

from __future__ import annotations

import re

import torch

from h3kv.core.errors import H3Error, HostMemoryError, InternalError


def failure_of(error: Exception) -> H3Error:
    """The error with which the request ends: our own as it is, any other as the cause of one of ours."""
    if isinstance(error, H3Error):
        return error
    failure = _out_of_memory(error) if _is_out_of_memory(error) else _unexpected(error)
    failure.__cause__ = error
    return failure


def _is_out_of_memory(error: Exception) -> bool:
    # On the CPU, torch's allocator has no exception of its own.
    return isinstance(error, MemoryError | torch.OutOfMemoryError) or (
        isinstance(error, RuntimeError) and "DefaultCPUAllocator" in str(error)
    )


def _out_of_memory(error: Exception) -> HostMemoryError:
    asked = re.search(r"allocate (\d+) bytes", str(error))
    return HostMemoryError(
        f"out of memory while a request ran ({_line(error)}): free memory, or lower engine.chunk_tokens or "
        "device.kv_bytes",
        needed_bytes=int(asked[1]) if asked else None,
        available_bytes=None,
    )


def _unexpected(error: Exception) -> InternalError:
    return InternalError(
        f"the request ended with an unexpected {type(error).__name__} ({_line(error)}): report it; "
        "H3_DEBUG=1 shows where it happened"
    )


def _line(error: Exception) -> str:
    return " ".join(str(error).split()) or "without a message"
