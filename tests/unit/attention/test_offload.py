"""Spread attention with helpers on threads of this process: bit equality, refusals, room, quarantine."""

from __future__ import annotations

import os
import struct
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from tests.unit.attention.coded_pages import coded_pages
from tests.unit.attention.pages import random_pages
from tests.unit.attention.spread import EVERYTHING, GEOMETRY, Spread

from h3kv.attention import native
from h3kv.attention.crew import CrewHub
from h3kv.attention.helper_locks import HelperLocks
from h3kv.attention.helping import AttentionHelper
from h3kv.attention.native import TORCH_DTYPES
from h3kv.attention.offload import SpreadAttention
from h3kv.attention.parts import Part
from h3kv.core.errors import AddressInUseError, ConfigError, NotRegisteredError, StoreFormatError
from h3kv.core.layout import PageLayout
from h3kv.core.limits import ATTEND_BATCH_PAGES
from h3kv.core.ports import Offload
from h3kv.core.types import DType, Encoding
from h3kv.core.units import NS_PER_MS
from h3kv.memory.mapping import Mapping
from h3kv.memory.work_area import WorkArea, WorkGeometry

BOARD_OFFSET = -(-GEOMETRY.mailbox.size_bytes // 4096) * 4096
HELP, VERSION = 0x504C4548, 2
FREE, CLAIMED, REVOKED, RELEASED = 1, 2, 5, 6
"""`h3::offload::kHelpMagic`, `kVersion`, and some of `UnitState`."""
DAMAGED_BYTES = 1 << 14
"""Fields, units, rows, and some of the pages."""
BOARD_HEADER = 64


@pytest.fixture
def spread() -> Iterator[Spread]:
    spread = Spread()
    yield spread
    spread.close()


class Context:
    """Pages of 3 KV heads with 9 query heads, and a query at their end."""

    def __init__(self, tokens: int, layout: PageLayout, *, rows: int = 1, seed: int = 3) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.layout, self.position = layout, tokens - rows
        q_THD = torch.randn(rows, 9, layout.head_dim, generator=generator)
        self.q_THD = q_THD.to(TORCH_DTYPES[layout.dtype])
        self.table_KN: NDArray[np.void]
        if layout.is_raw:
            counts = [64] * (tokens // 64) + ([tokens % 64] if tokens % 64 else [])
            self.pages: object = (
                raw := random_pages(
                    counts, dtype=layout.dtype, kv_heads=3, head_dim=layout.head_dim, generator=generator, shuffled=True
                )
            )
            self.table_KN = raw.table_KN
        else:
            self.pages = coded = coded_pages(tokens, layout, kv_heads=3, generator=generator, fine=True)
            self.table_KN = coded.table_KN

    def attend(self, offload: Offload) -> Part:
        return native.attend(self.q_THD, self.table_KN, layout=self.layout, position=self.position, offload=offload)

    def check(self, offload: Offload) -> None:
        alone, spread = self.attend(native.LOCAL), self.attend(offload)
        assert torch.equal(alone.out_THD, spread.out_THD)
        assert torch.equal(alone.lse_TH, spread.lse_TH)

    def until(self, offload: SpreadAttention, name: str) -> None:
        """Checked steps until a count of the statistics has grown."""
        before = getattr(offload.statistics(), name)
        for _ in range(20_000):
            self.check(offload)
            if getattr(offload.statistics(), name) > before:
                return
        raise AssertionError(offload.statistics())


LAYOUTS = [
    PageLayout(DType.FP32, 64),
    PageLayout(DType.BF16, 64),
    PageLayout(DType.FP16, 64, Encoding.INT8),
    PageLayout(DType.BF16, 64, Encoding.K8V4),
    PageLayout(DType.FP32, 80, Encoding.INT4),
]


@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: f"{layout.dtype}-{layout.encoding}-{layout.head_dim}")
@pytest.mark.parametrize("rows", [1, 8])
@pytest.mark.parametrize("count", [1, 3])
def test_helpers_change_no_bit(spread: Spread, layout: PageLayout, rows: int, count: int) -> None:
    context = Context(4000, layout, rows=rows)
    with spread.helped(count):
        context.until(spread.attention, "units_helped")
    assert spread.attention.statistics().units_refused == 0


@settings(max_examples=25, deadline=None)
@given(
    tokens=st.integers(1, 5000),
    rows=st.integers(1, 70),
    layout=st.sampled_from(LAYOUTS),
    count=st.integers(0, 3),
    seed=st.integers(0, 1 << 30),
)
def test_no_shape_changes_a_bit(tokens: int, rows: int, layout: PageLayout, count: int, seed: int) -> None:
    spread = Spread()
    context = Context(max(tokens, rows), layout, rows=rows, seed=seed)
    with spread.helped(count):
        for _ in range(3):
            context.check(spread.attention)
    spread.close()


def test_runs_of_pages_are_spread_too(spread: Spread) -> None:
    context = Context(5000, LAYOUTS[3])
    pages = context.table_KN.shape[1]
    with spread.helped(2):
        for end in range(ATTEND_BATCH_PAGES, pages, 5 * ATTEND_BATCH_PAGES):
            attention = native.Attention(
                context.q_THD,
                context.table_KN,
                layout=context.layout,
                position=context.position,
                offload=spread.attention,
            )
            attention.run(end)
            part, alone = attention.run(pages), context.attend(native.LOCAL)
            assert torch.equal(part.out_THD, alone.out_THD) and torch.equal(part.lse_TH, alone.lse_TH)
    assert spread.attention.statistics().shared > 0


def test_an_address_outside_the_regions_is_refused(spread: Spread) -> None:
    context = Context(4000, LAYOUTS[3])
    with spread.helped(1, ranges=((1 << 20, 2 << 20),)):
        context.until(spread.attention, "units_refused")
        assert spread.helpers[0].statistics().units == 0
    assert spread.attention.statistics().units_helped == 0


def test_pages_that_are_not_shared_are_attended_to_here() -> None:
    spread = Spread()
    attention = SpreadAttention(spread.area, shared=(1, 2))
    context = Context(4000, LAYOUTS[3])
    helper = attention.join()
    context.check(attention)
    assert attention.statistics().shared == 0
    attention.bury(helper)
    attention.close()
    spread.close()


def test_what_fits_no_job_is_attended_to_here() -> None:
    spread = Spread(WorkGeometry(helpers=1, jobs=1, job_bytes=4096))
    with spread.helped(1):
        Context(4000, LAYOUTS[3]).check(spread.attention)
    assert spread.attention.statistics().without_room == 1
    spread.close()


@pytest.mark.parametrize(
    "record",
    [
        b"",
        b"x" * 47,
        bytes(48),
        struct.pack("<IIIIQ24s", HELP, VERSION, 99, 0, 1, b""),
        struct.pack("<IIIIQ24s", HELP, VERSION + 1, 0, 0, 1, b""),
        b"\xff" * 48,
    ],
)
def test_malformed_records_are_refused(spread: Spread, record: bytes) -> None:
    caller = spread.area.mailbox.caller(member := spread.area.mailbox.register_caller())
    with spread.helped(1):
        reply = caller.wait(caller.post(record), deadline_ns=time.monotonic_ns() + 60_000 * NS_PER_MS)
        assert struct.unpack("<II", reply) == (0, 1)
        assert spread.helpers[0].statistics().refused == 1
        Context(4000, LAYOUTS[0]).check(spread.attention)
    spread.area.mailbox.bury_caller(member)


@pytest.mark.parametrize("seed", range(5))
def test_jobs_with_damaged_bytes_crash_no_helper(spread: Spread, seed: int) -> None:
    """Fields, units and pages that nobody wrote: no helper reads an address outside of its ranges."""
    context = Context(4000, LAYOUTS[3])
    pages = context.table_KN
    begin, end = int(pages["keys"].min()), int(pages["residues"].max()) + context.layout.residues_bytes
    area = np.frombuffer(spread.mapping.view(), dtype=np.uint8)
    caller = spread.area.mailbox.caller(member := spread.area.mailbox.register_caller())
    generator = np.random.default_rng(seed)
    job = area[BOARD_OFFSET + BOARD_HEADER :][:DAMAGED_BYTES]
    with spread.helped(1, ranges=((begin, end),)):
        context.until(spread.attention, "units_helped")
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
        context.check(spread.attention)
    del area, job, words
    spread.area.mailbox.bury_caller(member)


def test_a_traced_request_tells_what_was_done(spread: Spread) -> None:
    context = Context(4000, LAYOUTS[3])
    trace = bytes(range(24))
    spread.attention.trace(trace)
    with spread.helped(1):
        context.until(spread.attention, "units_helped")
        context.check(spread.attention)
    assert spread.traced
    assert {each.context for each in spread.traced} == {trace}
    assert all(each.units > 0 and each.read_bytes > 0 and each.end_ns >= each.start_ns for each in spread.traced)


def test_a_helper_that_was_buried_is_told(spread: Spread) -> None:
    place = spread.attention.join()
    helper = AttentionHelper(spread.area, place, ranges=[EVERYTHING])
    spread.attention.bury(place)
    with pytest.raises(NotRegisteredError):
        helper.serve(deadline_ns=time.monotonic_ns() + NS_PER_MS)


def test_an_area_is_taken_up_by_the_next_owner(spread: Spread) -> None:
    context = Context(4000, LAYOUTS[3])
    with spread.helped(1):
        context.until(spread.attention, "units_helped")
    first = spread.attention.join().number
    area = WorkArea.open(spread.mapping.view(), GEOMETRY)
    successor = SpreadAttention(area, shared=EVERYTHING)
    helper = successor.join()
    assert helper.number > first
    context.check(successor)
    successor.bury(helper)
    successor.check_integrity()
    spread.attention = successor


def test_a_helper_of_an_earlier_owner_takes_no_work_of_the_next(spread: Spread) -> None:
    earlier = spread.attention.join()
    stopped = AttentionHelper(spread.area, earlier, ranges=[EVERYTHING])
    successor = SpreadAttention(WorkArea.open(spread.mapping.view(), GEOMETRY), shared=EVERYTHING)
    helper = successor.join()
    assert helper.member.id == earlier.member.id
    with pytest.raises(NotRegisteredError):
        stopped.serve(deadline_ns=time.monotonic_ns() + NS_PER_MS)
    spread.attention.bury(earlier)
    AttentionHelper(spread.area, helper, ranges=[EVERYTHING]).serve(deadline_ns=time.monotonic_ns())
    successor.bury(helper)
    spread.attention = successor


def test_a_job_that_an_earlier_owners_helper_holds_is_left_alone(spread: Spread) -> None:
    context = Context(4000, LAYOUTS[3])
    with spread.helped(1):
        context.until(spread.attention, "units_helped")
    area = np.frombuffer(spread.mapping.view(), dtype=np.uint8)
    job = area[BOARD_OFFSET + BOARD_HEADER :][:DAMAGED_BYTES].view(np.uint64)
    (first, *_) = np.flatnonzero(job[1:] >> np.uint64(24) == job[0] >> np.uint64(24)) + 1
    sequence, helper = int(job[0]) >> 24, 77
    job[first] = sequence << 24 | helper << 4 | CLAIMED
    successor = SpreadAttention(WorkArea.open(spread.mapping.view(), GEOMETRY), shared=EVERYTHING)
    assert successor.statistics().quarantined_jobs == 1
    place = successor.join()
    context.check(successor)
    assert successor.statistics().quarantined_jobs == 1
    assert int(job[first]) == sequence << 24 | helper << 4 | REVOKED
    job[first] = sequence << 24 | helper << 4 | RELEASED
    assert successor.statistics().quarantined_jobs == 0
    successor.bury(place)
    del area, job
    spread.attention = successor


def test_what_earlier_helpers_held_is_taken_back_once_none_of_them_lives(spread: Spread) -> None:
    context = Context(4000, LAYOUTS[3])
    with spread.helped(1):
        context.until(spread.attention, "units_helped")
    area = np.frombuffer(spread.mapping.view(), dtype=np.uint8)
    job = area[BOARD_OFFSET + BOARD_HEADER :][:DAMAGED_BYTES].view(np.uint64)
    (first, *_) = np.flatnonzero(job[1:] >> np.uint64(24) == job[0] >> np.uint64(24)) + 1
    job[first] = int(job[0]) >> 24 << 24 | 77 << 4 | CLAIMED
    successor = SpreadAttention(WorkArea.open(spread.mapping.view(), GEOMETRY), shared=EVERYTHING)
    assert successor.statistics().quarantined_jobs == 1
    successor.bury_earlier()
    assert successor.statistics().quarantined_jobs == 0
    del area, job
    spread.attention = successor


def test_what_an_earlier_helper_held_is_left_alone_for_as_long_as_it_lives(spread: Spread, tmp_path: Path) -> None:
    context = Context(4000, LAYOUTS[3])
    with spread.helped(1):
        context.until(spread.attention, "units_helped")
        (helper,) = (each.helper.number for each in spread.helpers)
    area = np.frombuffer(spread.mapping.view(), dtype=np.uint8)
    job = area[BOARD_OFFSET + BOARD_HEADER :][:DAMAGED_BYTES].view(np.uint64)
    (first, *_) = np.flatnonzero(job[1:] >> np.uint64(24) == job[0] >> np.uint64(24)) + 1
    job[first] = int(job[0]) >> 24 << 24 | helper << 4 | CLAIMED
    successor = SpreadAttention(WorkArea.open(spread.mapping.view(), GEOMETRY), shared=EVERYTHING)
    assert helper < successor.first_number
    hub = CrewHub(tmp_path / "crew", successor)
    locks = HelperLocks(tmp_path / "crew")
    locks.hold([helper])
    hub.poll(0)
    assert hub.may_be_written and successor.statistics().quarantined_jobs == 1
    locks.close()
    hub.poll(0)
    assert not hub.may_be_written and successor.statistics().quarantined_jobs == 0
    hub.check_integrity()
    hub.close()
    del area, job
    spread.attention = successor


def test_one_process_alone_may_open_the_area(tmp_path: Path) -> None:
    claim = CrewHub.claim(tmp_path / "crew")
    with pytest.raises(AddressInUseError):
        CrewHub.claim(tmp_path / "crew")
    os.close(claim)
    os.close(CrewHub.claim(tmp_path / "crew"))


def test_a_region_says_for_how_many_helpers_it_was_made() -> None:
    for helpers in (1, 16, 64):
        size_bytes = WorkGeometry(helpers).size_bytes
        assert WorkGeometry.fitting(size_bytes).helpers >= helpers
        assert WorkGeometry.fitting(size_bytes).size_bytes <= size_bytes
    with pytest.raises(ConfigError, match="too small"):
        WorkGeometry.fitting(4096)


def test_other_memory_is_no_area() -> None:
    memory = Mapping(GEOMETRY.size_bytes, fd=None)
    with pytest.raises(StoreFormatError):
        WorkArea.attach(memory.view())
    WorkArea.open(memory.view(), GEOMETRY)
    with pytest.raises(StoreFormatError, match="other numbers"):
        WorkArea.open(memory.view(), WorkGeometry(helpers=4, jobs=1, job_bytes=1 << 20))
    with pytest.raises(StoreFormatError, match="are needed"):
        WorkArea.open(memory.view()[:4096], GEOMETRY)


@pytest.mark.parametrize("numbers", [{"helpers": 0}, {"helpers": 65}, {"jobs": 0}, {"jobs": 65}, {"job_bytes": 100}])
def test_bad_numbers_are_refused(numbers: dict[str, int]) -> None:
    with pytest.raises(ConfigError, match="work region"):
        WorkGeometry(**numbers)
