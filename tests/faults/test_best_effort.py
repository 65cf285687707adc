"""Reads that fail under best effort: what matters most is there, the rest is estimated, and all of it is counted."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from tests.unit.attention.test_retrieval import Context, queries, sealed_context

from h3kv.attention.page_table import IndexedSegments
from h3kv.attention.parts import Part
from h3kv.attention.retrieval import MISSING, SEGMENT_CLUSTERS, Retrieval, RetrievalMeter
from h3kv.attention.retriever import IMPORTANT_CLUSTERS, PageSource, Query, Retrieved, retrieve
from h3kv.core.errors import TierBrokenError
from h3kv.core.layout import CacheLayout
from h3kv.core.limits import BLOCK_CLUSTERS, CLUSTER_TOKENS, SEGMENT_BLOCKS_MAX
from h3kv.core.retrieval import RetrievalSetting
from h3kv.core.types import Encoding, SegmentId, SlabKey, SlotHandle, Tier
from h3kv.engine.page_cache import PageCache, PageCacheStatistics
from h3kv.engine.page_lane import PageLane
from h3kv.telemetry.recorder import Recorder
from h3kv.testing.clock import ManualClock
from h3kv.testing.fake_units import FakeUnits
from h3kv.tiers.host import HostStore, HostStoreConfig

BUDGET = RetrievalSetting(budget_tokens=48 * CLUSTER_TOKENS, best_effort=True)
GROUP = 2


def _indexed(context: Context, *, is_cold: bool) -> IndexedSegments:
    rows_S = context.rows_S
    if is_cold:
        rows_S["pages"] = 0
    segments = tuple(SegmentId(number) for number in range(1, len(rows_S) + 1))
    return IndexedSegments(rows_S[None], segments, np.zeros(0, dtype=np.intp), ())


def _retrieve(context: Context, *, source: PageSource | None, meter: RetrievalMeter) -> Retrieved:
    layout = context.layout
    q_QHD, lse_QH = queries(context, tokens=1, group=GROUP)
    exact = Part(torch.zeros(q_QHD.shape), lse_QH)
    query = Query(q_QHD, position=0, scale=None)
    indexed = _indexed(context, is_cold=source is not None)
    return retrieve(query, indexed, exact, layer=0, layout=layout, setting=BUDGET, source=source, meter=meter)


class _Rig:
    """A page cache over the slabs of a context, of whose reads a share fails."""

    def __init__(self, context: Context, *, share: float, slow: bool) -> None:
        layout = CacheLayout(slab=context.layout, layers=1)
        handles = {
            SlabKey(SegmentId(number), 0): SlotHandle(Tier.NVME, number * SEGMENT_BLOCKS_MAX, SEGMENT_BLOCKS_MAX, 1)
            for number in range(1, len(context.slabs) + 1)
        }
        contents = {
            handle: bytes(slab.bytes.numpy().data) for handle, slab in zip(handles.values(), context.slabs, strict=True)
        }
        self.store = FakeUnits(contents)
        lost = np.random.default_rng(3).random(1024) < share
        self.store.broken_reads.update(
            (int(read), TierBrokenError("EIO", tier=Tier.NVME)) for read in np.flatnonzero(lost)
        )
        if slow:
            self.store.latency_polls = 1_000_000
        slab_bytes = context.layout.size_bytes(SEGMENT_BLOCKS_MAX)
        self.host = HostStore(context.layout, HostStoreConfig(capacity_bytes=3 * slab_bytes))
        self.cache = PageCache(
            self.store,
            self.host,
            self.host.reserve([SEGMENT_BLOCKS_MAX] * 3),
            layout=layout,
            locate=handles.get,
            clock=ManualClock(step_ns=1000),
            telemetry=Recorder(),
        )

    def retrieve(self, context: Context) -> tuple[Retrieved, RetrievalMeter, PageCacheStatistics]:
        meter = RetrievalMeter()
        lane = PageLane(self.cache, 1, patience_ns=1_000_000)
        found = _retrieve(context, source=lane, meter=meter)
        self.store.latency_polls = 1
        self.cache.drain()
        self.cache.check_integrity()
        statistics = self.cache.statistics()
        self.host.close()
        return found, meter, statistics


def _error(found: Retrieved, whole: Retrieved) -> float:
    return float((found.part.out_THD - whole.part.out_THD).norm() / whole.part.out_THD.norm())


def test_output_degrades_smoothly_with_the_share_of_reads_that_fail() -> None:
    context = sealed_context(Encoding.K8V4)
    meter = RetrievalMeter()
    whole = _retrieve(context, source=None, meter=meter)
    errors = []
    for share in (0.0, 0.1, 0.3, 0.6, 1.0):
        found, read, statistics = _Rig(context, share=share, slow=False).retrieve(context)
        assert (statistics.absent > 0) == (share > 0)
        assert (read.chosen_tokens < meter.chosen_tokens) == (share > 0)
        assert statistics.units.failed == 0 if share == 0 else statistics.units.failed >= statistics.absent
        errors.append(_error(found, whole))
    assert errors[0] == 0.0, "what comes in time is read as if it lay in memory"
    assert errors == sorted(errors)
    assert errors[1] < errors[-1] / 2, "a tenth of the reads costs a part of what all of them do"


class _Hurried:
    """Gives what is important out of the slabs themselves, and has nothing else in time."""

    reads_ahead = False

    def __init__(self, context: Context) -> None:
        self._context = context
        self.wanted_N = np.zeros(0)

    def take(self, layer: int, wanted_N: NDArray[np.void]) -> NDArray[np.uint64]:
        self.wanted_N = wanted_N
        layout = self._context.layout
        addresses = [
            self._context.slabs[segment - 1].address + layout.page_offset(block, head, blocks=SEGMENT_BLOCKS_MAX)
            if may_be_late == 0
            else MISSING
            for segment, head, block, may_be_late in wanted_N.tolist()
        ]
        return np.array(addresses, dtype=np.uint64)

    def give_back(self) -> None:
        """Slabs stay."""

    def expect(self, layer: int, wanted_N: NDArray[np.void]) -> None:
        raise AssertionError("guesses are of no use here")


def test_the_best_clusters_of_each_head_are_waited_for() -> None:
    context = sealed_context(Encoding.K8V4)
    whole = _retrieve(context, source=None, meter=RetrievalMeter())
    hurried, meter = _Hurried(context), RetrievalMeter()
    found = _retrieve(context, source=hurried, meter=meter)
    important_N = hurried.wanted_N[hurried.wanted_N["reserved"] == 0]
    q_QHD, lse_QH = queries(context, tokens=1, group=GROUP)
    few = dataclasses.replace(BUDGET, budget_tokens=IMPORTANT_CLUSTERS * CLUSTER_TOKENS)
    best_QKC = Retrieval(q_QHD, context.rows_S, layout=context.layout).select(lse_QH, setting=few)
    pages = {
        (cluster // SEGMENT_CLUSTERS + 1, head, cluster % SEGMENT_CLUSTERS // BLOCK_CLUSTERS)
        for head, clusters in enumerate(best_QKC[0].tolist())
        for cluster in clusters
    }
    assert {(segment, head, block) for segment, head, block, _ in important_N.tolist()} == pages
    assert len(pages) < len(hurried.wanted_N)
    assert meter.chosen_tokens >= IMPORTANT_CLUSTERS * CLUSTER_TOKENS * context.layout.kv_heads
    nothing, _, _ = _Rig(context, share=0.0, slow=True).retrieve(context)
    assert _error(found, whole) < _error(nothing, whole)


@pytest.mark.parametrize("encoding", [Encoding.K8V4, Encoding.INT4])
def test_nothing_in_time_is_an_estimate_of_everything(encoding: Encoding) -> None:
    context = sealed_context(encoding)
    found, meter, statistics = _Rig(context, share=0.0, slow=True).retrieve(context)
    assert meter.chosen_tokens == 0
    assert statistics.absent == statistics.units.misses if encoding is Encoding.K8V4 else statistics.absent > 0
    assert found.part.out_THD.isfinite().all()
