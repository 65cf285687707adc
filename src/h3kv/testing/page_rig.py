"""A page cache over a fake store, with pages that say which ones they are."""

from __future__ import annotations

import ctypes
from collections.abc import Iterable
from typing import Final

import numpy as np
from numpy.typing import NDArray

from h3kv.attention.retriever import WANTED_DTYPE
from h3kv.core.layout import CacheLayout, PageLayout, SlabLayout
from h3kv.core.limits import SEGMENT_BLOCKS_MAX
from h3kv.core.types import DType, Encoding, SegmentId, SlabKey, SlotHandle, Tier
from h3kv.engine.page_cache import PageCache
from h3kv.engine.page_lane import PageLane
from h3kv.engine.page_slots import unit_bytes
from h3kv.telemetry.recorder import Recorder
from h3kv.testing.clock import ManualClock
from h3kv.testing.fake_units import FakeUnits
from h3kv.tiers.host import HostStore, HostStoreConfig

LAYERS: Final = 3
KV_HEADS: Final = 2

Page = tuple[int, int, int]
"""Segment, KV head, block."""


def layout_of(encoding: Encoding = Encoding.K8V4, head_dim: int = 64) -> CacheLayout:
    """K8V4 pages of 4 KiB and INT4 pages of 2 KiB, unless the head is larger."""
    page = PageLayout(DType.FP32, head_dim, encoding)
    return CacheLayout(slab=SlabLayout(page=page, kv_heads=KV_HEADS), layers=LAYERS)


class PageRig:
    """Owns the host store; segments have the numbers from 1 on.

    Args:
        layout: of the cache.
        segments: how many there are.
        host_slots: slots for slabs that the cache is carved from.
        latency_polls: of the store.
        wait_ns: longest time for a page; each look at the clock takes a microsecond.
        reads_ahead: as of `PageCache`.
    """

    def __init__(
        self,
        *,
        layout: CacheLayout | None = None,
        segments: int = 4,
        host_slots: int = 2,
        latency_polls: int = 1,
        wait_ns: int = 1_000_000,
        reads_ahead: bool = True,
    ) -> None:
        self.layout = layout or layout_of()
        self.clock = ManualClock(step_ns=1000)
        self.telemetry = Recorder()
        self.handles: dict[SlabKey, SlotHandle] = {}
        for number in range(1, segments + 1):
            for layer in range(LAYERS):
                slot = (number * LAYERS + layer) * SEGMENT_BLOCKS_MAX
                self.handles[SlabKey(SegmentId(number), layer)] = SlotHandle(Tier.NVME, slot, SEGMENT_BLOCKS_MAX, 1)
        contents = {handle: self._slab(key) for key, handle in self.handles.items()}
        self.store = FakeUnits(contents, latency_polls=latency_polls)
        slab_bytes = self.layout.slab.size_bytes(SEGMENT_BLOCKS_MAX)
        self.host = HostStore(self.layout.slab, HostStoreConfig(capacity_bytes=host_slots * slab_bytes))
        self.slots = self.host.reserve([SEGMENT_BLOCKS_MAX] * host_slots)
        self.cache = PageCache(
            self.store,
            self.host,
            self.slots,
            layout=self.layout,
            locate=self.handles.get,
            clock=self.clock,
            telemetry=self.telemetry,
            wait_ns=wait_ns,
            reads_ahead=reads_ahead,
        )

    @property
    def units(self) -> int:
        """Slots of the cache."""
        return self.cache.capacity_bytes // unit_bytes(self.layout.slab)

    def lane(self, *, patience_ns: int | None = None) -> PageLane:
        """A sequence's view of the cache."""
        return PageLane(self.cache, LAYERS, patience_ns=patience_ns)

    def lose(self, segment: int) -> None:
        """A segment leaves the store and its slots are released, without a word to the cache."""
        for layer in range(LAYERS):
            del self.store.contents[self.handles.pop(SlabKey(SegmentId(segment), layer))]

    def page(self, layer: int, page: Page) -> bytes:
        """What a page holds."""
        return _content(layer, page, self.layout.slab.page.size_bytes)

    def check(self, layer: int, pages: Iterable[Page], addresses_N: NDArray[np.uint64]) -> None:
        """Assert that pages lie whole where they are said to."""
        size = self.layout.slab.page.size_bytes
        for page, address in zip(pages, addresses_N.tolist(), strict=True):
            assert ctypes.string_at(address, size) == self.page(layer, page), f"page {page} of layer {layer}"

    def take(self, lane: PageLane, layer: int, pages: Iterable[Page]) -> None:
        """Take pages, look at them, and give them back."""
        chosen = sorted(pages)
        self.check(layer, chosen, lane.take(layer, wanted(chosen)))
        lane.give_back()

    def close(self) -> None:
        """Assert that nothing is held any more, and give the memory back."""
        self.store.latency_polls = 1
        self.cache.drain()
        self.cache.check_integrity()
        counts = self.cache.statistics().units
        assert counts.pinned == counts.in_flight == 0
        self.host.close()

    def _slab(self, key: SlabKey) -> bytes:
        size, slab = self.layout.slab.page.size_bytes, self.layout.slab
        pages = [
            _content(key.layer, (key.segment, head, block), size)
            for head in range(slab.kv_heads)
            for block in range(SEGMENT_BLOCKS_MAX)
        ]
        return b"".join(pages).ljust(slab.content_bytes(SEGMENT_BLOCKS_MAX), b"\0")


def wanted(pages: Iterable[Page], *, unimportant: Iterable[Page] = ()) -> NDArray[np.void]:
    """Pages as attention asks for them; best effort does not wait for the unimportant ones."""
    spared = set(unimportant)
    return np.array([(*page, int(page in spared)) for page in pages], dtype=WANTED_DTYPE)


def _content(layer: int, page: Page, size_bytes: int) -> bytes:
    words = np.empty(size_bytes // 8, dtype=np.uint64)
    words[:] = hash((layer, *page)) & 0xFFFFFFFFFFFFFFFF
    words[1::2] = np.arange(size_bytes // 16)
    return words.tobytes()
