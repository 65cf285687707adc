"""Ranges of addresses over shared or private memory, aligned for huge pages.

The standard `mmap` module can neither place a mapping nor keep it for a view that somebody still holds. Both matter
here, so the system calls are made directly.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import weakref
from collections.abc import Callable
from typing import Final

HUGE_PAGE_BYTES: Final = 2 << 20
"""The huge page of x86-64, and of arm64 with 4 KiB pages."""

_NONE: Final = 0
_READ_WRITE: Final = mmap.PROT_READ | mmap.PROT_WRITE
_PRIVATE: Final = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
_MAP_FIXED: Final = 0x10
_MAP_FIXED_NOREPLACE: Final = 0x100000
_FAILED: Final = ctypes.c_void_p(-1).value

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]
_libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
_libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]


class _Span(ctypes.Structure):
    """`struct iovec`."""

    _fields_ = (("base", ctypes.c_void_p), ("size", ctypes.c_size_t))


_libc.process_vm_readv.restype = ctypes.c_ssize_t
_libc.process_vm_readv.argtypes = [
    ctypes.c_int,
    ctypes.c_void_p,
    ctypes.c_ulong,
    ctypes.c_void_p,
    ctypes.c_ulong,
    ctypes.c_ulong,
]


class Mapping:
    """Readable and writable memory at a multiple of 2 MiB. It is unmapped when this and the last view of it are gone.

    Args:
        size_bytes: of the range.
        fd: file whose first bytes it shows; private memory, zero at first, where None. May be closed afterwards.
        address: where it must lie, a multiple of 2 MiB; anywhere where None.

    Raises:
        OSError: the system refuses it. FileExistsError: something lies at that address already.
    """

    def __init__(self, size_bytes: int, *, fd: int | None, address: int | None = None) -> None:
        self.size_bytes = size_bytes
        self.address = _map_aligned(size_bytes, fd) if address is None else _map_at(address, size_bytes, fd)
        self._array = (ctypes.c_ubyte * size_bytes).from_address(self.address)
        # Every view holds the array, so the range outlives them all.
        self._finalizer = weakref.finalize(self._array, _unmap, self.address, size_bytes)
        self._finalizer.atexit = False

    def advise_huge_pages(self) -> bool:
        """Ask for huge pages as the memory is touched. False where the kernel has none to give."""
        return bool(_libc.madvise(self.address, self.size_bytes, mmap.MADV_HUGEPAGE) == 0)

    def can_pin(self) -> bool:
        """Whether the kernel can reach the pages for direct I/O.

        Some drivers map their memory as bare page frames, which direct I/O refuses with EFAULT. Reading this process's
        own memory through the kernel takes hold of pages in the same way, and moves nothing but one byte.
        """
        target = (ctypes.c_ubyte * 1)()
        local = _Span(ctypes.addressof(target), 1)
        remote = _Span(self.address, 1)
        if _libc.process_vm_readv(os.getpid(), ctypes.byref(local), 1, ctypes.byref(remote), 1, 0) == 1:
            return True
        # Where a sandbox forbids the call, nothing is known against the memory.
        return ctypes.get_errno() != errno.EFAULT

    def view(self) -> memoryview:
        """All bytes, writable."""
        return memoryview(self._array).cast("B")

    def watch(self) -> Callable[[], bool]:
        """A function that tells whether the range is still mapped, and does not keep it so."""
        finalizer = self._finalizer
        return lambda: finalizer.alive


def _map_aligned(size_bytes: int, fd: int | None) -> int:
    """Reserve more addresses than needed, map over the aligned part, give the rest back."""
    span_bytes = size_bytes + HUGE_PAGE_BYTES
    base = _map(None, span_bytes, _NONE if fd is not None else _READ_WRITE, flags=_PRIVATE, fd=-1)
    address = -(-base // HUGE_PAGE_BYTES) * HUGE_PAGE_BYTES
    end = address + -(-size_bytes // mmap.PAGESIZE) * mmap.PAGESIZE
    try:
        if fd is not None:
            _map(address, size_bytes, _READ_WRITE, flags=mmap.MAP_SHARED | _MAP_FIXED, fd=fd)
    except OSError:
        _unmap(base, span_bytes)
        raise
    if address > base:
        _unmap(base, address - base)
    if base + span_bytes > end:
        _unmap(end, base + span_bytes - end)
    return address


def _map_at(address: int, size_bytes: int, fd: int | None) -> int:
    """Map at this address or not at all."""
    assert address % HUGE_PAGE_BYTES == 0
    flags = _PRIVATE if fd is None else mmap.MAP_SHARED
    found = _map(address, size_bytes, _READ_WRITE, flags=flags | _MAP_FIXED_NOREPLACE, fd=-1 if fd is None else fd)
    if found != address:
        # Kernels before 4.17 do not know the flag and take the address for a wish.
        _unmap(found, size_bytes)
        raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST))
    return found


def _map(address: int | None, size_bytes: int, protection: int, *, flags: int, fd: int) -> int:
    found = _libc.mmap(address, size_bytes, protection, flags, fd, 0)
    if found is None or found == _FAILED:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))
    return int(found)


def _unmap(address: int, size_bytes: int) -> None:
    status = _libc.munmap(address, size_bytes)
    assert status == 0, f"munmap of {size_bytes} bytes: {os.strerror(ctypes.get_errno())}"
