"""Searches of an index spread over helpers on threads of this process: bit equality, refusals, room."""

from __future__ import annotations

import struct
import time
from collections.abc import Iterator

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.unit.attention.planes import Planes
from tests.unit.attention.slabs import slab_layout
from tests.unit.attention.spread import EVERYTHING, GEOMETRY, Spread
from tests.unit.attention.test_offload import LAYOUTS, Context
from tests.unit.attention.test_retrieval import queries, sealed_context

from h3kv.attention.native import LOCAL
from h3kv.attention.offload import SpreadAttention
from h3kv.attention.parts import Part
from h3kv.attention.retrieval import RetrievalMeter, retrieve_in_memory
from h3kv.core.limits import CLUSTER_TOKENS
from h3kv.core.retrieval import RetrievalSetting
from h3kv.core.types import DType, Encoding
from h3kv.core.units import NS_PER_MS
from h3kv.memory.work_area import WorkGeometry

BOARD_OFFSET = -(-GEOMETRY.mailbox.size_bytes // 4096) * 4096
BOARD_HEADER = 64
HELP, VERSION = 0x504C4548, 2
FREE = 1
"""`h3::offload::kHelpMagic`, `kVersion`, `UnitState::kFree`."""
DAMAGED_BYTES = 1 << 12
"""Fields, units, rows, segments."""
BLOCKS = (16, 3, 16, 16, 1, 16, 5)
"""Of segments of 3 KV heads of 64, three of which are a unit."""


@pytest.fixture
def spread() -> Iterator[Spread]:
    spread = Spread()
    yield spread
    spread.close()


def planes_of(encoding: Encoding = Encoding.K8V4, dtype: DType = DType.BF16) -> Planes:
    return Planes(slab_layout(encoding, kv_heads=3, head_dim=64, dtype=dtype), list(BLOCKS))


def search_until(planes: Planes, spread: SpreadAttention, name: str, *, tokens: int = 1) -> None:
    """Checked searches until a count of the statistics has grown."""
    before = getattr(spread.statistics().scanning, name)
    for _ in range(20_000):
        planes.check(spread, LOCAL, tokens=tokens)
        if getattr(spread.statistics().scanning, name) > before:
            return
    raise AssertionError(spread.statistics())


@pytest.mark.parametrize("encoding", [Encoding.K8V4, Encoding.INT4])
@pytest.mark.parametrize("dtype", [DType.FP32, DType.BF16])
@pytest.mark.parametrize(("tokens", "count"), [(1, 1), (1, 3), (5, 2)])
def test_helpers_change_no_bit(
    isa: str, spread: Spread, *, encoding: Encoding, dtype: DType, tokens: int, count: int
) -> None:
    planes = planes_of(encoding, dtype)
    with spread.helped(count):
        search_until(planes, spread.attention, "units_helped", tokens=tokens)
        assert sum(helper.statistics().scans for helper in spread.helpers) > 0
    assert spread.attention.statistics().scanning.units_refused == 0


@settings(max_examples=25, deadline=None)
@given(
    blocks=st.lists(st.integers(0, 16), min_size=1, max_size=12),
    shape=st.sampled_from([(3, 64), (1, 80), (2, 128), (8, 128)]),
    dtype=st.sampled_from([DType.FP32, DType.BF16]),
    tokens=st.integers(1, 6),
    group=st.integers(1, 5),
    count=st.integers(0, 3),
    seed=st.integers(0, 1 << 30),
)
def test_no_shape_changes_a_bit(
    *, blocks: list[int], shape: tuple[int, int], dtype: DType, tokens: int, group: int, count: int, seed: int
) -> None:
    spread = Spread()
    layout = slab_layout(Encoding.K8V4, kv_heads=shape[0], head_dim=shape[1], dtype=dtype)
    planes = Planes(layout, blocks, seed=seed)
    with spread.helped(count):
        for _ in range(3):
            planes.check(spread.attention, LOCAL, tokens=tokens, group=group)
    spread.close()


def test_a_whole_retrieval_has_the_numbers_of_one_process(isa: str, spread: Spread) -> None:
    context = sealed_context(blocks=BLOCKS)
    q_THD, exact_lse_TH = queries(context, tokens=2, group=3)
    exact = Part(torch.randn(q_THD.shape, generator=torch.Generator().manual_seed(2)), exact_lse_TH)

    def retrieve(offload: SpreadAttention | None) -> tuple[Part, torch.Tensor]:
        return retrieve_in_memory(
            q_THD,
            context.rows_S,
            exact,
            layout=context.layout,
            setting=RetrievalSetting(32 * CLUSTER_TOKENS),
            meter=RetrievalMeter(),
            offload=LOCAL if offload is None else offload,
        )

    alone, read_lse_TH = retrieve(None)
    with spread.helped(2):
        while spread.attention.statistics().scanning.units_helped == 0:
            part, lse_TH = retrieve(spread.attention)
            assert torch.equal(part.out_THD, alone.out_THD) and torch.equal(part.lse_TH, alone.lse_TH)
            assert torch.equal(lse_TH, read_lse_TH)


def test_every_scan_and_unit_is_counted(spread: Spread) -> None:
    planes = planes_of()
    planes.check(spread.attention, LOCAL)
    assert spread.attention.statistics().scanning.scans == 1
    assert spread.attention.statistics().scanning.shared == 0
    with spread.helped(1):
        search_until(planes, spread.attention, "units_helped")
    statistics, helper = spread.attention.statistics(), spread.helpers[0].statistics()
    assert statistics.scanning.units == 3 * statistics.scanning.shared
    # The last unit's helper may count it a moment after it was fetched.
    assert statistics.scanning.units_helped - 1 <= helper.scans == helper.units <= statistics.scanning.units_helped
    assert helper.read_bytes > 0
    assert statistics.attentions == statistics.units == 0


def test_planes_outside_the_regions_are_refused(spread: Spread) -> None:
    planes = planes_of()
    begin, end = planes.range
    for ranges in (((1 << 20, 2 << 20),), ((begin + 64, end),), ((begin, begin + 4096),)):
        with spread.helped(1, ranges=ranges):
            search_until(planes, spread.attention, "units_refused")
    assert spread.helpers[0].statistics().units == 0


def test_planes_that_are_not_shared_are_scanned_here(spread: Spread) -> None:
    attention = SpreadAttention(spread.area, shared=(1, 2))
    helper = attention.join()
    planes_of().check(attention, LOCAL)
    assert attention.statistics().scanning.shared == 0
    attention.bury(helper)
    attention.close()


def test_some_planes_that_are_not_shared_are_scanned_here_beside_helpers(spread: Spread) -> None:
    planes = planes_of()
    begin, end = planes.range
    # The middle of three units begins in the fourth of seven segments.
    attention = SpreadAttention(spread.area, shared=(begin, begin + (end - begin) * 6 // 7))
    spread.attention, before = attention, spread.attention
    with spread.helped(2):
        search_until(planes, attention, "units_helped")
    spread.attention = before
    attention.close()


def test_what_fits_no_job_is_scanned_here() -> None:
    spread = Spread(WorkGeometry(helpers=1, jobs=1, job_bytes=4096))
    with spread.helped(1):
        planes_of().check(spread.attention, LOCAL)
    assert spread.attention.statistics().scanning.without_room == 1
    spread.close()


def test_a_shortlist_is_scanned_here(spread: Spread) -> None:
    context = sealed_context(blocks=BLOCKS)
    q_THD, exact_lse_TH = queries(context, tokens=1, group=3)
    exact = Part(torch.zeros(q_THD.shape), exact_lse_TH)
    setting = RetrievalSetting(256, shortlist_share=0.4)
    with spread.helped(1):
        retrieve_in_memory(
            q_THD,
            context.rows_S,
            exact,
            layout=context.layout,
            setting=setting,
            meter=RetrievalMeter(),
            offload=spread.attention,
        )
    assert spread.attention.statistics().scanning.scans == 0


@pytest.mark.parametrize("seed", range(3))
def test_jobs_with_damaged_bytes_crash_no_helper(spread: Spread, seed: int) -> None:
    """Fields, units and segments that nobody wrote: no helper reads an address outside of its ranges."""
    planes = planes_of()
    area = np.frombuffer(spread.mapping.view(), dtype=np.uint8)
    caller = spread.area.mailbox.caller(member := spread.area.mailbox.register_caller())
    generator = np.random.default_rng(seed)
    job = area[BOARD_OFFSET + BOARD_HEADER :][:DAMAGED_BYTES]
    with spread.helped(1, ranges=(planes.range,)):
        search_until(planes, spread.attention, "units_helped")
        sound, words = job.copy(), job.view(np.uint64)
        is_word = words >> np.uint64(24) == words[0] >> np.uint64(24)
        for sequence in range(1 << 20, (1 << 20) + 300):
            job[:] = sound
            for at in generator.integers(64, DAMAGED_BYTES, size=int(generator.integers(0, 40))):
                job[at] = generator.integers(0, 256)
            words[is_word] = sequence << 24 | FREE
            words[0] = sequence << 24
            record = struct.pack("<IIIIQ24s", HELP, VERSION, 0, 0, sequence, b"")
            reply = caller.wait(caller.post(record), deadline_ns=time.monotonic_ns() + 60_000 * NS_PER_MS)
            assert len(reply) == 8
        statistics = spread.helpers[0].statistics()
        assert statistics.units > 0 and statistics.refused > 0
        planes.check(spread.attention, LOCAL)
    del area, job, words
    spread.area.mailbox.bury_caller(member)


def test_a_traced_scan_tells_what_was_done(spread: Spread) -> None:
    planes, trace = planes_of(), bytes(range(24))
    spread.attention.trace(trace)
    with spread.helped(1):
        search_until(planes, spread.attention, "units_helped")
        planes.check(spread.attention, LOCAL)
    assert spread.traced
    assert {each.context for each in spread.traced} == {trace}
    assert all(each.units > 0 and each.read_bytes > 0 for each in spread.traced)


def test_attentions_and_scans_share_one_board(spread: Spread) -> None:
    planes, context = planes_of(), Context(4000, LAYOUTS[3])
    with spread.helped(2, ranges=(EVERYTHING,)):
        for _ in range(3):
            search_until(planes, spread.attention, "units_helped")
            context.until(spread.attention, "units_helped")
    kinds = [helper.statistics() for helper in spread.helpers]
    assert 0 < sum(each.scans for each in kinds) < sum(each.units for each in kinds)
