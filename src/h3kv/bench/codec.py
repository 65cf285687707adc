"""What wrapping costs the thread that moves slabs to the cold store and fetches them back.

Two stores of the same model take turns: one writes slabs as they are, one wraps them in LZ4. Both are given the same
segments, which come back whole. The wrapping itself runs on threads of the store; what is compared is the processor
time of the caller. The numbers in the slabs are drawn: normally distributed, each dimension with a width of its own.
"""

from __future__ import annotations

import contextlib
import statistics
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import torch
from torch import Tensor

from h3kv.bench.limit import huge_buffer
from h3kv.bench.measure import Progress, Rounds, turns
from h3kv.bench.results import Results
from h3kv.core.errors import ConfigError
from h3kv.core.layout import CacheLayout
from h3kv.core.limits import SEGMENT_BLOCKS_MAX
from h3kv.core.types import BlockKey, DType, Fetch, Move, SegmentId, SegmentLabel, SlabKey
from h3kv.core.units import NS_PER_S
from h3kv.telemetry import names
from h3kv.telemetry.recorder import Recorder
from h3kv.tiers.cold import ColdStore, ColdStoreConfig
from h3kv.tiers.cold.config import Wrap
from h3kv.tiers.cold.geometry import capacity_for

FINGERPRINT: Final = bytes(32)
_DRAWN: Final = 1 << 16
"""Rows of numbers that are drawn; further ones repeat them, farther apart than LZ4 looks back."""


@dataclass(frozen=True, slots=True)
class Setting:
    """What to move and how often."""

    folder: Path
    """On the disk that is meant; files are made in it and removed."""
    layout: CacheLayout
    segments: int
    """Of 1,024 tokens, written and fetched in each repetition."""
    repetitions: int
    progress: Progress


@dataclass(frozen=True, slots=True)
class _Trip:
    """One way of all slabs to the disk and back."""

    cpu_ns: int
    write_ns: int
    read_ns: int


def run(results: Results, setting: Setting) -> None:
    """Measure moving and fetching with and without the wrap.

    Args:
        results: receives `codec.*`.
        setting: model, amount, repetitions.

    Raises:
        ConfigError: the folder cannot hold the stores.
        TierBrokenError: a write or read failed.
    """
    setting.progress(f"codec: {setting.segments} segments, {setting.repetitions} repetitions")
    with contextlib.ExitStack() as stack:
        sides: dict[Wrap, _Side] = {"none": _open(stack, setting, "none"), "lz4": _open(stack, setting, "lz4")}
        for side in sides.values():
            side.travel()
        trips: dict[Wrap, list[_Trip]] = {wrap: [side.travel()] for wrap, side in sides.items()}
        for repetition in range(setting.repetitions):
            for wrap in turns(sides, repetition):
                trips[wrap].append(sides[wrap].travel())
        stored = {wrap: side.telemetry.value(names.WRITTEN_BYTES, tier="nvme") for wrap, side in sides.items()}
        size_bytes = sides["none"].size_bytes
    rounds = Rounds({wrap: [float(trip.cpu_ns) for trip in trips[wrap][1:]] for wrap in sides})
    results.put("codec.worker_cpu_over_raw", rounds.ratio("lz4", "none"))
    results.put("codec.written_fraction", stored["lz4"] / stored["none"])
    slabs = setting.segments * setting.layout.layers
    for wrap, name in (("none", "raw"), ("lz4", "lz4")):
        results.put(f"codec.{name}.cpu_us_per_slab", rounds.median(wrap) / 1e3 / slabs)
        results.put(f"codec.{name}.write_gb_per_s", size_bytes / statistics.median(t.write_ns for t in trips[wrap][1:]))
        results.put(f"codec.{name}.read_gb_per_s", size_bytes / statistics.median(t.read_ns for t in trips[wrap][1:]))


class _Side:
    """One store, and memory for what goes there and what comes back."""

    def __init__(self, store: ColdStore, telemetry: Recorder, setting: Setting) -> None:
        self.telemetry = telemetry
        self._store = store
        self._layers = setting.layout.layers
        self._slab_bytes = setting.layout.slab.content_bytes(SEGMENT_BLOCKS_MAX)
        self._keys = [
            SlabKey(SegmentId(number), layer) for number in range(setting.segments) for layer in range(self._layers)
        ]
        self.size_bytes = len(self._keys) * self._slab_bytes
        self._labels = {key.segment: _label(key.segment) for key in self._keys}
        self._source = huge_buffer(self.size_bytes)
        self._target = huge_buffer(self.size_bytes)
        _fill(self._source, setting.layout)

    def travel(self) -> _Trip:
        """Write every slab and fetch it back, and see that it is the same."""
        sources, targets = self._views(self._source), self._views(self._target)
        start_ns, cpu_ns = time.perf_counter_ns(), time.thread_time_ns()
        handles = self._store.reserve([SEGMENT_BLOCKS_MAX] * len(self._keys))
        self._store.submit(
            [
                Move(key, handle, source, self._labels[key.segment])
                for key, handle, source in zip(self._keys, handles, sources, strict=True)
            ]
        )
        self._settle()
        written_ns = time.perf_counter_ns()
        self._store.submit(
            [Fetch(key, handle, target) for key, handle, target in zip(self._keys, handles, targets, strict=True)]
        )
        self._settle()
        read_ns, cpu_ns = time.perf_counter_ns(), time.thread_time_ns() - cpu_ns
        assert torch.equal(self._source, self._target)
        self._target.zero_()
        self._store.release(handles)
        return _Trip(cpu_ns, written_ns - start_ns, read_ns - written_ns)

    def _settle(self) -> None:
        left = len(self._keys)
        while left:
            self._store.wait(NS_PER_S)
            for completion in self._store.poll():
                left -= 1
                if completion.error is not None:
                    raise completion.error

    def _views(self, memory: Tensor) -> list[memoryview]:
        view = memory.numpy().data
        return [view[start : start + self._slab_bytes] for start in range(0, self.size_bytes, self._slab_bytes)]


def _open(stack: contextlib.ExitStack, setting: Setting, wrap: Wrap) -> _Side:
    try:
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="h3-bench-", dir=setting.folder))
    except OSError as error:
        message = f"cannot write to {setting.folder}: {error.strerror}; choose another --folder"
        raise ConfigError(message, field="folder") from error
    telemetry = Recorder()
    # Room for two times the segments: what a trip released is taken off the disk with the next one.
    config = ColdStoreConfig(capacity_for(setting.layout, units=2 * setting.segments), wrap=wrap)
    store = ColdStore.open(Path(folder), setting.layout, fingerprint=FINGERPRINT, config=config, telemetry=telemetry)
    stack.callback(store.close)
    return _Side(store, telemetry, setting)


def _fill(memory: Tensor, layout: CacheLayout) -> None:
    """Numbers as in keys and values, in the element type of the pages; bytes where pages hold codes."""
    page, chance = layout.slab.page, torch.Generator().manual_seed(0)
    if not page.is_raw:
        memory.random_(generator=chance)
        return
    dtype = {DType.FP32: torch.float32, DType.BF16: torch.bfloat16, DType.FP16: torch.float16}[page.dtype]
    numbers = memory.view(dtype).view(-1, page.head_dim)
    widths = torch.rand(page.head_dim, generator=chance) * 4
    drawn = torch.randn(min(len(numbers), _DRAWN), page.head_dim, generator=chance) * widths
    for start in range(0, len(numbers), _DRAWN):
        part = numbers[start : start + _DRAWN]
        part.copy_(drawn[: len(part)])


def _label(segment: SegmentId) -> SegmentLabel:
    keys = (segment * SEGMENT_BLOCKS_MAX + block for block in range(SEGMENT_BLOCKS_MAX))
    return SegmentLabel(tuple(BlockKey(key.to_bytes(32, "little")) for key in keys), BlockKey(bytes(32)))
