"""What all suites of stores share: a geometry, slabs that say which one they are, and how to move them."""

from __future__ import annotations

import abc
import contextlib
import mmap
import time
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from typing import ClassVar

from h3kv.core.layout import PageLayout, SlabLayout
from h3kv.core.ports import BlockStore
from h3kv.core.types import Completion, DType, Encoding, Fetch, Move, SegmentId, SegmentLabel, SlabKey, SlotHandle
from h3kv.memory.buddy import extent_class

LAYOUT = SlabLayout(page=PageLayout(dtype=DType.FP32, head_dim=16), kv_heads=2)
UNIT_BLOCKS = 16
CODES_LAYOUT = SlabLayout(page=PageLayout(dtype=DType.FP32, head_dim=16, encoding=Encoding.K8V4), kv_heads=2)
"""Pages of 1 KiB with an index behind them."""
DEADLINE_S = 30.0
"""A move or fetch that has not ended by then is lost."""


def slab(segment: int, layer: int = 0) -> SlabKey:
    return SlabKey(SegmentId(segment), layer)


def own_memory(size_bytes: int) -> memoryview:
    """Zeros at a page boundary, writable."""
    return memoryview(mmap.mmap(-1, size_bytes))


_allocate: ContextVar[Callable[[int], memoryview]] = ContextVar("_allocate", default=own_memory)


def memory(size_bytes: int) -> memoryview:
    """The same, from where the store under test can reach it."""
    return _allocate.get()(size_bytes)


@contextlib.contextmanager
def memory_from(allocate: Callable[[int], memoryview]) -> Iterator[None]:
    """Give tests other memory: for stores that reach only some."""
    token = _allocate.set(allocate)
    try:
        yield
    finally:
        _allocate.reset(token)


def payload(number: int, size_bytes: int) -> memoryview:
    """Bytes that say everywhere which number they belong to."""
    room = memory(size_bytes)
    room[:] = number.to_bytes(8, "little") * (size_bytes // 8)
    return room


def settle(store: BlockStore, count: int) -> list[Completion]:
    """Poll until so many moves and fetches have ended."""
    ended: list[Completion] = []
    deadline = time.monotonic() + DEADLINE_S
    while len(ended) < count and time.monotonic() < deadline:
        ended += store.poll()
        if len(ended) < count:
            store.wait(10_000_000)
    assert len(ended) == count, f"{len(ended)} of {count} moves and fetches ended"
    return ended


class StoreSuite(abc.ABC):
    """How the tests of one kind of store make, fill and read it."""

    churn_rounds: ClassVar[int] = 2_000
    """Of the test that overwrites slots while they are read."""

    layout: ClassVar[SlabLayout] = LAYOUT

    @abc.abstractmethod
    def make_store(self, units: int) -> BlockStore:
        """An empty store with room for so many slots of 16 blocks."""

    def room_bytes(self, *blocks: int) -> int:
        """What slots of these sizes take from the capacity."""
        return self.layout.size_bytes(sum(map(extent_class, blocks)))

    def label(self, segment: SegmentId) -> SegmentLabel | None:
        """Goes with each move of that segment."""
        return None

    def move(self, number: int, target: SlotHandle, *, blocks: int | None = None) -> Move:
        """A slab that is named by a number and full of it."""
        size_bytes = self.layout.size_bytes(target.blocks if blocks is None else blocks)
        key = slab(number)
        return Move(key, target, payload(number, size_bytes), self.label(key.segment))

    def put(self, store: BlockStore, *moves: Move) -> None:
        """Write slabs, and see that they arrive."""
        store.submit(moves)
        assert [completion.error for completion in settle(store, len(moves))] == [None] * len(moves)

    def read(self, store: BlockStore, key: SlabKey, source: SlotHandle, size_bytes: int) -> bytes:
        """The first bytes of a visible slab."""
        target = memory(size_bytes)
        fetch = Fetch(key, source, target)
        store.submit([fetch])
        (completion,) = settle(store, 1)
        assert completion.move is fetch
        assert completion.error is None
        return bytes(target)

    def check_content(self, store: BlockStore, number: int, source: SlotHandle) -> None:
        size_bytes = self.layout.size_bytes(source.blocks)
        assert self.read(store, slab(number), source, size_bytes) == bytes(payload(number, size_bytes))
