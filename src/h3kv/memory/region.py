"""A region: one piece of memory that holds slots and, before them, all that another process needs to know of them.

`region_format` draws it.
"""

from __future__ import annotations

import enum
import fcntl
import os
from collections.abc import Collection
from typing import Final

import numpy as np
import torch
from torch import Tensor

from h3kv.core.errors import HostMemoryError
from h3kv.core.units import describe_size
from h3kv.machine import HugePages, detect, detect_huge_pages
from h3kv.memory.mapping import HUGE_PAGE_BYTES, Mapping
from h3kv.memory.region_format import (
    SEALS,
    SLOT_DTYPE,
    TABLE_OFFSET,
    RegionGeometry,
    SlotTableView,
    name_of,
    pack_header,
    validate_header,
    validate_table,
)


class RegionKind(enum.StrEnum):
    """What a region is made of."""

    HUGETLB = "hugetlb"
    """A memfd of huge pages that were set aside: reserved when it is made."""
    MEMFD = "memfd"
    """A memfd of the page cache; huge pages where the kernel gives them to shared memory."""
    ANONYMOUS = "anonymous"
    """Private memory: cannot be passed to another process; huge pages where the kernel gives them to private memory."""


class Region:
    """Memory with a header and a slot table in it; made by `create` or `attach`.

    The mapping lasts until `close` was called and the last view of it is gone, so a view can never dangle.
    """

    def __init__(self, mapping: Mapping, geometry: RegionGeometry, *, kind: RegionKind, fd: int | None) -> None:
        self.geometry = geometry
        self.kind = kind
        self.size_bytes = mapping.size_bytes
        self.address = mapping.address
        self.has_huge_pages = kind is RegionKind.HUGETLB
        self.fallback_reason: str | None = None
        """Why it is not made of huge pages that were set aside, and what to do about it."""
        self._fd = fd
        self._mapping: Mapping | None = mapping
        self._watch = mapping.watch()

    @classmethod
    def create(
        cls,
        geometry: RegionGeometry,
        *,
        kinds: Collection[RegionKind] = (RegionKind.HUGETLB, RegionKind.MEMFD),
        huge_pages: HugePages | None = None,
    ) -> Region:
        """A new region, its slots zero and free: of the first of `kinds` that has huge pages, else a plain memfd.

        Memory that was not set aside is committed as it is first written, as all of a process's memory is.

        Args:
            geometry: how to divide it.
            kinds: what is acceptable, best first.
            huge_pages: what the machine offers; asked now where None.

        Raises:
            HostMemoryError: the machine has too little memory left.
        """
        offered = detect_huge_pages() if huge_pages is None else huge_pages
        reasons: list[str] = []
        region: Region | None = None
        for kind in kinds:
            match kind:
                case RegionKind.HUGETLB:
                    region, reason = _create_hugetlb(geometry, offered)
                case RegionKind.MEMFD:
                    region, reason = _create_memfd(geometry, offered) if offered.shared else (None, _CURE_SHARED)
                case RegionKind.ANONYMOUS:
                    region, reason = _create_anonymous(geometry) if offered.private else (None, _CURE_PRIVATE)
            if region is not None:
                break
            reasons.append(reason)
        if region is None:
            region, _ = _create_memfd(geometry, offered)
        region.fallback_reason = "; ".join(reasons) or None
        region.write_header()
        return region

    @classmethod
    def attach(cls, fd: int) -> Region:
        """The region behind a descriptor, mapped once more. The descriptor stays the caller's.

        Raises:
            StoreFormatError: it is not a region, or one of another version, or damaged, or its size may change.
            HostMemoryError: the system refuses the mapping.
        """
        own = os.dup(fd)
        try:
            geometry = validate_header(own)
            kind = RegionKind.HUGETLB if os.fstatvfs(own).f_bsize == HUGE_PAGE_BYTES else RegionKind.MEMFD
            region = cls(_map(geometry.size_bytes, own), geometry, kind=kind, fd=own)
            validate_table(region.table, name=name_of(fd))
        except BaseException:
            os.close(own)
            raise
        return region

    @property
    def fd(self) -> int | None:
        """Descriptor to pass on; None for private memory. Closed by `close`."""
        return self._fd

    @property
    def is_mapped(self) -> bool:
        """Whether the memory is still held: by this region, or by a view after `close`."""
        return self._watch()

    @property
    def table(self) -> SlotTableView:
        """The slot table where it lies: writing here writes into the region."""
        return np.frombuffer(self._view(), dtype=SLOT_DTYPE, count=self.geometry.blocks, offset=TABLE_OFFSET)

    @property
    def slots(self) -> memoryview:
        """Bytes of all slots, writable."""
        geometry = self.geometry
        return self._view()[geometry.data_offset : geometry.data_offset + geometry.data_bytes]

    @property
    def data(self) -> Tensor:
        """Bytes of all slots as a uint8 tensor on the CPU."""
        return torch.frombuffer(self.slots, dtype=torch.uint8)

    def write_header(self) -> None:
        """Say in the region how it is divided, for whoever attaches to it."""
        header = pack_header(self.geometry)
        self._view()[: len(header)] = header

    def close(self) -> None:
        """Let go of memory and descriptor. Calling it again does nothing."""
        self._mapping = None
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None

    def _view(self) -> memoryview:
        assert self._mapping is not None, "the region was closed"
        return self._mapping.view()


_CURE_SHARED: Final = (
    "the kernel gives shared memory no huge pages: "
    "write 'advise' into /sys/kernel/mm/transparent_hugepage/shmem_enabled"
)
_CURE_PRIVATE: Final = (
    "the kernel gives private memory no huge pages: write 'madvise' into /sys/kernel/mm/transparent_hugepage/enabled"
)


def _create_hugetlb(geometry: RegionGeometry, offered: HugePages) -> tuple[Region | None, str]:
    size_bytes = geometry.size_bytes
    pages = size_bytes // HUGE_PAGE_BYTES
    cure = (
        f"{pages} huge pages of 2 MiB are needed and {offered.free_pages} are free: raise vm.nr_hugepages or "
        "vm.nr_overcommit_hugepages by the difference"
    )
    if offered.free_pages < pages:
        return None, cure
    fd: int | None = None
    try:
        fd = os.memfd_create("h3-region", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING | os.MFD_HUGETLB | os.MFD_HUGE_2MB)
        os.ftruncate(fd, size_bytes)
        # All pages are taken now: a cgroup that allows fewer would otherwise end the process at a later write.
        os.posix_fallocate(fd, 0, size_bytes)
        mapping = Mapping(size_bytes, fd=fd)
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, SEALS)
    except OSError as error:
        if fd is not None:
            os.close(fd)
        return None, f"{cure} ({error.strerror})"
    return Region(mapping, geometry, kind=RegionKind.HUGETLB, fd=fd), ""


def _create_memfd(geometry: RegionGeometry, offered: HugePages) -> tuple[Region, str]:
    size_bytes = geometry.size_bytes
    _check_available(size_bytes)
    fd = os.memfd_create("h3-region", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.ftruncate(fd, size_bytes)
        mapping = _map(size_bytes, fd)
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, SEALS)
    except BaseException:
        os.close(fd)
        raise
    region = Region(mapping, geometry, kind=RegionKind.MEMFD, fd=fd)
    region.has_huge_pages = mapping.advise_huge_pages() and offered.shared
    return region, ""


def _create_anonymous(geometry: RegionGeometry) -> tuple[Region, str]:
    _check_available(geometry.size_bytes)
    mapping = _map(geometry.size_bytes, None)
    region = Region(mapping, geometry, kind=RegionKind.ANONYMOUS, fd=None)
    region.has_huge_pages = mapping.advise_huge_pages()
    return region, ""


def _map(size_bytes: int, fd: int | None) -> Mapping:
    try:
        return Mapping(size_bytes, fd=fd)
    except OSError as error:
        raise _refusal(size_bytes, detect().memory_available_bytes) from error


def _check_available(size_bytes: int) -> None:
    available_bytes = detect().memory_available_bytes
    if size_bytes > available_bytes:
        raise _refusal(size_bytes, available_bytes)


def _refusal(size_bytes: int, available_bytes: int) -> HostMemoryError:
    return HostMemoryError(
        f"the host tier asks for {describe_size(size_bytes)}, where {describe_size(available_bytes)} are available: "
        "lower host.kv_bytes or free memory",
        needed_bytes=size_bytes,
        available_bytes=available_bytes,
    )
