"""Where the memory of a region comes from: the kinds in the order in which they are wanted, and why one was not had."""

from __future__ import annotations

import enum
import fcntl
import os
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from h3kv.core.errors import HostMemoryError, RegionAddressError
from h3kv.core.units import describe_size
from h3kv.machine import HugePages, binding_limit, detect, dma_heaps
from h3kv.memory.dma_heap import allocate
from h3kv.memory.mapping import HUGE_PAGE_BYTES, Mapping
from h3kv.memory.region_format import SEALS


class RegionKind(enum.StrEnum):
    """What a region is made of."""

    DMA_HEAP = "dma_heap"
    """A DMA buffer of contiguous memory that was set aside at boot. Never registered with an I/O engine."""
    HUGETLB = "hugetlb"
    """A memfd of huge pages that were set aside: reserved when it is made."""
    MEMFD = "memfd"
    """A memfd of the page cache; huge pages where the kernel gives them to shared memory."""
    ANONYMOUS = "anonymous"
    """Private memory: cannot be passed to another process; huge pages where the kernel gives them to private memory."""


SHARED_KINDS: Final = (RegionKind.DMA_HEAP, RegionKind.HUGETLB, RegionKind.MEMFD)
"""What a region that other processes map may be made of, best first."""


@dataclass(frozen=True, slots=True)
class RegionMemory:
    """Memory for a region."""

    mapping: Mapping
    kind: RegionKind
    fd: int | None
    """Owned by whoever has this; None for private memory."""
    has_huge_pages: bool


@dataclass(frozen=True, slots=True)
class Wanted:
    """How much is asked for, and where."""

    size_bytes: int
    address: int | None
    purpose: str


_CURE_SHARED: Final = (
    "the kernel gives shared memory no huge pages: "
    "write 'advise' into /sys/kernel/mm/transparent_hugepage/shmem_enabled"
)
_CURE_PRIVATE: Final = (
    "the kernel gives private memory no huge pages: write 'madvise' into /sys/kernel/mm/transparent_hugepage/enabled"
)
_CURE_DMA: Final = (
    "there is no DMA heap of contiguous memory in /dev/dma_heap: "
    "start the kernel with cma=SIZE and give this process the device"
)


def obtain(wanted: Wanted, kinds: Collection[RegionKind], offered: HugePages) -> tuple[RegionMemory, str | None]:
    """Memory of the first of these kinds that is better than a plain memfd, else a plain memfd.

    Returns:
        The memory, and why it is not of a kind named before it.

    Raises:
        HostMemoryError: the machine has too little memory left.
        RegionAddressError: something else lies at the address.
    """
    reasons: list[str] = []
    for kind in kinds:
        match kind:
            case RegionKind.DMA_HEAP:
                memory, reason = _from_dma_heaps(wanted, dma_heaps())
            case RegionKind.HUGETLB:
                memory, reason = _from_huge_pages(wanted, offered)
            case RegionKind.MEMFD:
                memory, reason = (_from_memfd(wanted, offered), "") if offered.shared else (None, _CURE_SHARED)
            case RegionKind.ANONYMOUS:
                memory, reason = (_private(wanted), "") if offered.private else (None, _CURE_PRIVATE)
        if memory is not None:
            return memory, "; ".join(reasons) or None
        reasons.append(reason)
    return _from_memfd(wanted, offered), "; ".join(reasons) or None


def map_at(size_bytes: int, fd: int | None, *, address: int | None, purpose: str) -> Mapping:
    """A mapping of a region, or RegionAddressError where its address is taken, else HostMemoryError."""
    try:
        return Mapping(size_bytes, fd=fd, address=address)
    except FileExistsError as error:
        raise _taken(Wanted(size_bytes, address, purpose)) from error
    except OSError as error:
        raise _refusal(Wanted(size_bytes, address, purpose)) from error


def _from_dma_heaps(wanted: Wanted, heaps: Collection[Path]) -> tuple[RegionMemory | None, str]:
    reasons = []
    for heap in heaps:
        try:
            fd = allocate(heap, wanted.size_bytes)
        except OSError as error:
            cure = "give this process the device" if isinstance(error, PermissionError) else "raise the kernel's cma="
            reasons.append(f"{heap} refuses {describe_size(wanted.size_bytes)} ({error.strerror}): {cure}")
            continue
        try:
            mapping = Mapping(wanted.size_bytes, fd=fd, address=wanted.address)
        except FileExistsError as error:
            os.close(fd)
            raise _taken(wanted) from error
        except OSError as error:
            os.close(fd)
            reasons.append(f"memory of {heap} cannot be mapped ({error.strerror})")
            continue
        if mapping.can_pin():
            return RegionMemory(mapping, RegionKind.DMA_HEAP, fd, has_huge_pages=False), ""
        del mapping
        os.close(fd)
        reasons.append(f"this kernel does not let direct I/O reach memory of {heap}")
    return None, "; ".join(reasons) or _CURE_DMA


def _from_huge_pages(wanted: Wanted, offered: HugePages) -> tuple[RegionMemory | None, str]:
    pages = -(-wanted.size_bytes // HUGE_PAGE_BYTES)
    cure = (
        f"{pages} huge pages of 2 MiB are needed and {offered.free_pages} are free: raise vm.nr_hugepages or "
        "vm.nr_overcommit_hugepages by the difference"
    )
    if offered.free_pages < pages:
        return None, cure
    fd: int | None = None
    try:
        fd = os.memfd_create("h3-region", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING | os.MFD_HUGETLB | os.MFD_HUGE_2MB)
        os.ftruncate(fd, wanted.size_bytes)
        # All pages are taken now: a cgroup that allows fewer would otherwise end the process at a later write.
        os.posix_fallocate(fd, 0, wanted.size_bytes)
        mapping = Mapping(wanted.size_bytes, fd=fd, address=wanted.address)
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, SEALS)
    except OSError as error:
        if fd is not None:
            os.close(fd)
        if isinstance(error, FileExistsError):
            raise _taken(wanted) from error
        return None, f"{cure} ({error.strerror})"
    return RegionMemory(mapping, RegionKind.HUGETLB, fd, has_huge_pages=True), ""


def _from_memfd(wanted: Wanted, offered: HugePages) -> RegionMemory:
    _check_available(wanted)
    fd = os.memfd_create("h3-region", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.ftruncate(fd, wanted.size_bytes)
        mapping = map_at(wanted.size_bytes, fd, address=wanted.address, purpose=wanted.purpose)
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, SEALS)
    except BaseException:
        os.close(fd)
        raise
    return RegionMemory(mapping, RegionKind.MEMFD, fd, has_huge_pages=mapping.advise_huge_pages() and offered.shared)


def _private(wanted: Wanted) -> RegionMemory:
    _check_available(wanted)
    mapping = map_at(wanted.size_bytes, None, address=wanted.address, purpose=wanted.purpose)
    return RegionMemory(mapping, RegionKind.ANONYMOUS, None, has_huge_pages=mapping.advise_huge_pages())


def _check_available(wanted: Wanted) -> None:
    if wanted.size_bytes > detect().memory_available_bytes:
        raise _refusal(wanted)


def _taken(wanted: Wanted) -> RegionAddressError:
    assert wanted.address is not None
    return RegionAddressError(
        f"the {wanted.purpose} region must lie at {wanted.address:#x} in every process, where something else lies in "
        "this one: let go of the region that was mapped before, or map it before libraries that take addresses there",
        region=wanted.purpose,
        address=wanted.address,
    )


def _refusal(wanted: Wanted) -> HostMemoryError:
    available_bytes = detect().memory_available_bytes
    limit = binding_limit()
    if wanted.size_bytes <= available_bytes:
        place = "" if wanted.address is None else f" at {wanted.address:#x}"
        cause = f"and the kernel refuses to map that much{place}: raise the limit on addresses (`ulimit -v`), or"
    else:
        allowed = "" if limit is None else f" (the container's limit in {limit.file} is {describe_size(limit.bytes)})"
        cause = f"where {describe_size(available_bytes)} are available{allowed}:"
    return HostMemoryError(
        f"the {wanted.purpose} tier asks for {describe_size(wanted.size_bytes)}, {cause} lower host.kv_bytes or free "
        "memory",
        needed_bytes=wanted.size_bytes,
        available_bytes=available_bytes,
    )
