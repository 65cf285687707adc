"""Memory of a DMA heap: contiguous pages that the kernel set aside at boot (CMA), given out as DMA buffers.

A DMA buffer can be mapped, passed on, and read into by direct I/O. It cannot be read or written by `read` and `write`,
cannot change its size, and must never be registered with io_uring: pinning pages of CMA for long does not return.
The layouts are those of the kernel's `linux/dma-heap.h` and `linux/dma-buf.h`.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from h3kv.memory.file_names import name_of

_ALLOCATION: Final = struct.Struct("<QIIQ")
"""len | fd | fd_flags | heap_flags."""
_ALLOCATE: Final = 0xC018_4800
"""DMA_HEAP_IOCTL_ALLOC."""
_ACCESS: Final = struct.Struct("<Q")
"""flags."""
_SYNC: Final = 0x4008_6200
"""DMA_BUF_IOCTL_SYNC."""
_SYNC_READ_WRITE: Final = 3
_SYNC_END: Final = 4


def allocate(heap: Path, size_bytes: int) -> int:
    """A descriptor of a new DMA buffer, zeroed, of whole pages.

    Args:
        heap: a device file in /dev/dma_heap.
        size_bytes: of the buffer. It is contiguous: a heap in pieces may refuse what its free bytes would hold.

    Raises:
        OSError: the heap cannot be opened, or has no room.
    """
    device = os.open(heap, os.O_RDWR | os.O_CLOEXEC)
    try:
        request = bytearray(_ALLOCATION.pack(size_bytes, 0, os.O_RDWR | os.O_CLOEXEC, 0))
        fcntl.ioctl(device, _ALLOCATE, request)
    finally:
        os.close(device)
    _, fd, _, _ = _ALLOCATION.unpack(request)
    return int(fd)


def dma_buffer_bytes(fd: int) -> int | None:
    """Size of the DMA buffer behind a descriptor; None where it is something else.

    The kernel names them so. The request to begin and end an access is one that other files do not answer.
    """
    try:
        with cpu_access(fd):
            return os.lseek(fd, 0, os.SEEK_END) if name_of(fd).startswith("/dmabuf:") else None
    except OSError:
        return None


@contextlib.contextmanager
def cpu_access(fd: int) -> Iterator[None]:
    """The processor's caches and the buffer agree inside: needed on machines where devices do not see the caches.

    Direct I/O keeps them agreeing by itself, as for any memory.

    Raises:
        OSError: not a DMA buffer.
    """
    fcntl.ioctl(fd, _SYNC, _ACCESS.pack(_SYNC_READ_WRITE))
    try:
        yield
    finally:
        fcntl.ioctl(fd, _SYNC, _ACCESS.pack(_SYNC_READ_WRITE | _SYNC_END))
