"""A region: one piece of memory that holds slots and, before them, all that another process needs to know of them.

`region_format` draws it.
"""

from __future__ import annotations

import os
from collections.abc import Collection
from typing import TYPE_CHECKING

import numpy as np

from h3kv.machine import HugePages, detect_huge_pages
from h3kv.memory.dma_heap import cpu_access, dma_buffer_bytes
from h3kv.memory.file_names import name_of
from h3kv.memory.mapping import HUGE_PAGE_BYTES, Mapping
from h3kv.memory.region_format import (
    SLOT_DTYPE,
    TABLE_OFFSET,
    Geometry,
    RegionHeader,
    RegionIdentity,
    SlotTableView,
    pack_header,
    validate_header,
    validate_table,
)
from h3kv.memory.region_memory import SHARED_KINDS, RegionKind, RegionMemory, Wanted, map_at, obtain

if TYPE_CHECKING:
    # A process that only moves bytes runs without torch.
    from torch import Tensor

__all__ = ["SHARED_KINDS", "Region", "RegionKind"]


class Region:
    """Memory with a header and a slot table in it; made by `create` or `attach`.

    The mapping lasts until `close` was called and the last view of it is gone, so a view can never dangle.
    """

    def __init__(self, memory: RegionMemory, header: RegionHeader) -> None:
        self.geometry: Geometry = header.geometry
        self.identity = header.identity
        """Which of the node's regions it is; None for one of this process alone."""
        self.kind = memory.kind
        self.size_bytes = memory.mapping.size_bytes
        self.address = memory.mapping.address
        self.has_huge_pages = memory.has_huge_pages
        self.fallback_reason: str | None = None
        """Why it is not made of the kind that was wanted first, and what to do about it."""
        self._fd = memory.fd
        self._mapping: Mapping | None = memory.mapping
        self._watch = memory.mapping.watch()

    @classmethod
    def create(
        cls,
        geometry: Geometry,
        *,
        identity: RegionIdentity | None = None,
        kinds: Collection[RegionKind] = (RegionKind.HUGETLB, RegionKind.MEMFD),
        huge_pages: HugePages | None = None,
    ) -> Region:
        """A new region, its slots zero and free: of the first of `kinds` that is had, else a plain memfd.

        Memory that was not set aside is committed as it is first written, as all of a process's memory is.

        Args:
            geometry: how to divide it.
            identity: of a region that other processes map; it lies at the address that this says. Without it, it lies
                anywhere.
            kinds: what is acceptable, best first. Memfd and private memory count as had where they get huge pages.
            huge_pages: what the machine offers; asked now where None.

        Raises:
            HostMemoryError: the machine has too little memory left.
            RegionAddressError: something else lies at the address.
        """
        offered = detect_huge_pages() if huge_pages is None else huge_pages
        header = RegionHeader(geometry, identity)
        purpose = "host" if identity is None else identity.purpose
        memory, reason = obtain(Wanted(geometry.size_bytes, header.address, purpose), kinds, offered)
        assert identity is None or memory.fd is not None, "private memory cannot be shared"
        region = cls(memory, header)
        region.fallback_reason = reason
        region.write_header()
        return region

    @classmethod
    def attach(cls, fd: int) -> Region:
        """The region behind a descriptor, mapped once more: at its address. The descriptor stays the caller's.

        Raises:
            StoreFormatError: it is not a region, or one of another version, or damaged, or its size may change.
            HostMemoryError: the system refuses the mapping.
            RegionAddressError: something else lies at the address.
        """
        own = os.dup(fd)
        try:
            header = validate_header(own)
            purpose = "host" if header.identity is None else header.identity.purpose
            mapping = map_at(header.geometry.size_bytes, own, address=header.address, purpose=purpose)
            kind = _kind_of(own)
            memory = RegionMemory(mapping, kind, own, has_huge_pages=kind is RegionKind.HUGETLB)
            region = cls(memory, header)
            if header.geometry.blocks:
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
    def can_register(self) -> bool:
        """Whether an I/O engine may register the memory: of a DMA heap, registering does not return."""
        return self.kind is not RegionKind.DMA_HEAP

    @property
    def is_mapped(self) -> bool:
        """Whether the memory is still held: by this region, or by a view after `close`."""
        return self._watch()

    @property
    def table(self) -> SlotTableView:
        """The slot table where it lies: writing here writes into the region. A region without slots has none."""
        assert self.geometry.blocks, "a region without slots has no table"
        return np.frombuffer(self._view(), dtype=SLOT_DTYPE, count=self.geometry.blocks, offset=TABLE_OFFSET)

    @property
    def slots(self) -> memoryview:
        """Bytes of all slots, or of all data in a region without slots; writable."""
        geometry = self.geometry
        return self._view()[geometry.data_offset : geometry.data_offset + geometry.data_bytes]

    @property
    def data(self) -> Tensor:
        """The same as a uint8 tensor on the CPU."""
        import torch

        return torch.frombuffer(self.slots, dtype=torch.uint8)

    def write_header(self) -> None:
        """Say in the region how it is divided, for whoever attaches to it."""
        header = pack_header(self.geometry, self.identity)
        if self._fd is not None and self.kind is RegionKind.DMA_HEAP:
            with cpu_access(self._fd):
                self._view()[: len(header)] = header
        else:
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


def _kind_of(fd: int) -> RegionKind:
    if dma_buffer_bytes(fd) is not None:
        return RegionKind.DMA_HEAP
    return RegionKind.HUGETLB if os.fstatvfs(fd).f_bsize == HUGE_PAGE_BYTES else RegionKind.MEMFD
