"""Segments that say everywhere which one they are, written to a cold store and checked after a restart."""

from __future__ import annotations

import itertools
import mmap
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Final

import numpy as np

from h3kv.core.layout import CacheLayout, PageLayout, SlabLayout
from h3kv.core.limits import DIRECT_IO_BYTES
from h3kv.core.types import (
    BlockKey,
    Completion,
    DType,
    Fetch,
    Move,
    SegmentId,
    SegmentLabel,
    SlabKey,
    SlotHandle,
    StoredSegment,
)
from h3kv.memory.buddy import extent_class
from h3kv.telemetry.recorder import Recorder
from h3kv.tiers.cold import ColdStore, ColdStoreConfig
from h3kv.tiers.cold.config import Wrap
from h3kv.tiers.cold.geometry import capacity_for
from h3kv.tiers.cold.seam import EngineFactory

LAYOUT: Final = CacheLayout(slab=SlabLayout(page=PageLayout(dtype=DType.FP32, head_dim=16), kv_heads=2), layers=2)
"""Small, with more than one of everything. A block has 2 layers x 2 KV heads x 8 KiB = 32 KiB."""

FINGERPRINT: Final = bytes(range(32))
OTHER_FINGERPRINT: Final = bytes(reversed(range(32)))

_DEADLINE_NS: Final = 30_000_000_000


def open_store(
    place: Path,
    *,
    units: int = 2,
    capacity_bytes: int | None = None,
    fingerprint: bytes = FINGERPRINT,
    layout: CacheLayout = LAYOUT,
    telemetry: Recorder | None = None,
    write_bytes_per_day: int | None = None,
    day: int = 1,
    engine: EngineFactory | None = None,
    wrap: Wrap = "none",
) -> ColdStore:
    """A store of one area with room for so many units of 16 blocks, unless a cap is given."""
    config = ColdStoreConfig(
        capacity_bytes=capacity_bytes or capacity_for(layout, units=units),
        write_bytes_per_day=write_bytes_per_day,
        today=lambda: day,
        wrap=wrap,
    )
    return ColdStore.open(
        place, layout, fingerprint=fingerprint, config=config, telemetry=telemetry or Recorder(), engine=engine
    )


def label_of(number: int, blocks: int) -> SegmentLabel:
    """The label of a segment with this number: its number is in its keys."""
    keys = [BlockKey(number.to_bytes(24, "little") + block.to_bytes(8, "little")) for block in range(blocks)]
    return SegmentLabel(tuple(keys), BlockKey(bytes(32)))


def number_of(label: SegmentLabel) -> int:
    """The number in a label."""
    return int.from_bytes(label.keys[0][:24], "little")


def payload(number: int, layer: int, size_bytes: int) -> memoryview:
    """The bytes of a slab, in memory that direct I/O takes: all 16 bytes say which slab it is and where they lie."""
    memory = memoryview(mmap.mmap(-1, size_bytes))
    words = np.frombuffer(memory, dtype=[("number", "<u8"), ("layer", "<u2"), ("page", "<u2"), ("at", "<u4")])
    words["number"], words["layer"] = number, layer
    words["at"] = np.arange(0, size_bytes, 16)
    words["page"] = words["at"] // DIRECT_IO_BYTES
    return memory


def moves_of(store_handles_L: Sequence[SlotHandle], number: int, blocks: int, *, layout: CacheLayout) -> list[Move]:
    """The moves that put a segment into its slots."""
    label = label_of(number, blocks)
    return [
        Move(
            SlabKey(SegmentId(number), layer),
            handle,
            payload(number, layer, layout.slab.content_bytes(handle.blocks)),
            label,
        )
        for layer, handle in enumerate(store_handles_L)
    ]


def submit_segments(
    store: ColdStore, segments: Sequence[tuple[int, int]], *, layout: CacheLayout = LAYOUT
) -> dict[int, list[SlotHandle]]:
    """Start to write segments, each a number and a count of blocks; their handles by number."""
    sizes = [extent_class(blocks) for _, blocks in segments for _ in range(layout.layers)]
    handles = iter(store.reserve(sizes))
    taken = {number: list(itertools.islice(handles, layout.layers)) for number, _ in segments}
    store.submit(
        [move for number, blocks in segments for move in moves_of(taken[number], number, blocks, layout=layout)]
    )
    return taken


def settle(store: ColdStore, count: int) -> list[Completion]:
    """Poll until so many moves and fetches have ended."""
    ended: list[Completion] = []
    end_ns = time.monotonic_ns() + _DEADLINE_NS
    while len(ended) < count:
        assert time.monotonic_ns() < end_ns, f"{len(ended)} of {count} moves and fetches ended"
        store.wait(10_000_000)
        ended += store.poll()
    return ended


def write_segments(
    store: ColdStore, segments: Sequence[tuple[int, int]], *, layout: CacheLayout = LAYOUT
) -> dict[int, list[SlotHandle]]:
    """Write segments and see that all of them arrive."""
    taken = submit_segments(store, segments, layout=layout)
    errors = [completion.error for completion in settle(store, len(segments) * layout.layers)]
    assert errors == [None] * len(errors), errors
    return taken


def read_segment(
    store: ColdStore, segment: SegmentId, handles_L: Sequence[SlotHandle], *, layout: CacheLayout = LAYOUT
) -> list[tuple[bytes, Exception | None]]:
    """The bytes of each slab, and what went wrong with it."""
    fetches = [
        Fetch(SlabKey(segment, layer), handle, memoryview(mmap.mmap(-1, layout.slab.content_bytes(handle.blocks))))
        for layer, handle in enumerate(handles_L)
    ]
    store.submit(fetches)
    errors = {completion.move.key.layer: completion.error for completion in settle(store, len(fetches))}
    return [(bytes(fetch.target), errors[fetch.key.layer]) for fetch in fetches]


def restore(store: ColdStore, *, first: int = 1_000_000) -> dict[int, StoredSegment]:
    """What a store kept, by the number in the label."""
    numbers = itertools.count(first)
    return {number_of(kept.label): kept for kept in store.restore(lambda: SegmentId(next(numbers)))}


def is_intact(store: ColdStore, kept: StoredSegment, *, layout: CacheLayout = LAYOUT) -> bool:
    """Whether every byte of a kept segment is what its label says."""
    number = number_of(kept.label)
    return all(
        error is None and data == bytes(payload(number, layer, len(data)))
        for layer, (data, error) in enumerate(read_segment(store, kept.segment, kept.handles_L, layout=layout))
    )
