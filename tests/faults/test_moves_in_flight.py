"""Segments that are given up, cancelled or lost while they move between tiers."""

from __future__ import annotations

import shutil
import signal
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from h3kv.core.types import Tier
from h3kv.engine.interrupts import check_interrupt, interrupts_deferred
from h3kv.engine.request import Request, SamplingParameters
from h3kv.engine.waiting import need_of
from h3kv.telemetry import names
from h3kv.testing.engines import FINGERPRINT, Rig, make_rig, one_thread, prompt_tokens
from h3kv.testing.faulty_files import FaultPlan, FaultyFiles
from h3kv.testing.tiered_rig import tiered_rig
from h3kv.tiers.io import READ, RESULT_DTYPE

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("single_thread")]

SETTLE_NS = 10_000_000_000


@pytest.fixture
def single_thread() -> Iterator[None]:
    with one_thread():
        yield


class HeldFiles(FaultyFiles):
    """Its operations end only while it is not held back."""

    is_held = False

    def poll(self) -> NDArray[np.void]:
        return np.array([], dtype=RESULT_DTYPE) if self.is_held else super().poll()


def request(prompt: list[int]) -> Request:
    return Request(prompt=tuple(prompt), sampling=SamplingParameters(max_new_tokens=4, ignore_eos=True))


def oracle(prompt: list[int]) -> list[int]:
    return make_rig(capacity_blocks=160).answer(prompt)[0]


def check_clean(rig: Rig) -> None:
    rig.pool.placer.settle(SETTLE_NS)
    rig.engine.check_integrity()
    assert rig.segments.statistics().pins == 0
    assert rig.pool.running == 0
    assert rig.pool.statistics()[Tier.DEVICE].used_bytes == 0


def test_slots_of_a_segment_given_up_stay_until_they_are_written(tmp_path: Path) -> None:
    """Otherwise another prompt's bytes would go to disk under this one's keys, with checksums that match."""
    first, second = prompt_tokens(1, 400), prompt_tokens(2, 400)
    engines: list[HeldFiles] = []

    def io(files: Sequence[int]) -> HeldFiles:
        engines.append(HeldFiles(files, FaultPlan()))
        return engines[-1]

    folder = tmp_path / "store"
    folder.mkdir()
    snapshots: list[Path] = []
    with tiered_rig(folder, host_blocks=96, io=io) as rig:
        files = engines[-1]
        files.is_held = True
        rig.answer(first)
        rig.pool.tick()
        assert rig.pool.placer.is_moving
        rig.engine.evict_cached()
        rig.engine.check_integrity()
        rig.answer(second)
        files.is_held = False
        while rig.pool.placer.is_moving:
            rig.pool.tick()
            snapshots.append(tmp_path / str(len(snapshots)))
            shutil.copytree(folder, snapshots[-1])
        check_clean(rig)
    assert snapshots
    for snapshot in snapshots:
        with tiered_rig(snapshot, host_blocks=96) as rig:
            assert rig.answer(first)[0] == oracle(first)


@pytest.mark.parametrize("mode", ["flip", "error"])
def test_segment_given_up_while_it_comes_back_damaged_ends_well(mode: str, tmp_path: Path) -> None:
    prompt = prompt_tokens(44, 1500)
    with tiered_rig(tmp_path) as rig:
        rig.answer(prompt)
    plan = FaultPlan(mode=mode, kinds=frozenset({READ}))
    engines: list[HeldFiles] = []

    def io(files: Sequence[int]) -> HeldFiles:
        engines.append(HeldFiles(files, plan))
        return engines[-1]

    with tiered_rig(tmp_path, host_blocks=96, io=io) as rig:
        plan.number = plan.done + 1
        engines[-1].is_held = True
        kv = rig.pool.open_sequence(need_of(request(prompt), FINGERPRINT), is_alone=True)
        rig.pool.tick()
        assert rig.pool.placer.is_moving
        rig.pool.close_sequence(kv, ())
        rig.engine.evict_cached()
        rig.segments.check_integrity()
        engines[-1].is_held = False
        check_clean(rig)
        assert rig.answer(prompt)[0] == oracle(prompt)
        check_clean(rig)


def test_partly_used_segment_is_counted_with_all_of_its_blocks(tmp_path: Path) -> None:
    with tiered_rig(tmp_path, units=2) as rig:
        document = prompt_tokens(1, 17 * 64 + 1)
        rig.answer(document, max_new_tokens=1)
        other = [*document[:130], *prompt_tokens(2, 30 * 64 - 130)]
        assert rig.answer(other)[0] == oracle(other)
        check_clean(rig)


def test_room_on_nvme_in_pieces_is_joined_by_dropping_more(tmp_path: Path) -> None:
    with tiered_rig(tmp_path, units=2) as rig:
        documents = [prompt_tokens(100 + number, 66) for number in range(32)]
        for document in documents:
            rig.answer(document, max_new_tokens=1)
            rig.pool.placer.settle(SETTLE_NS)
        for document in documents[::2]:
            rig.answer(document, max_new_tokens=1)
        other = prompt_tokens(2, 30 * 64)
        assert rig.answer(other)[0] == oracle(other)
        check_clean(rig)


def test_two_documents_beyond_host_take_turns(tmp_path: Path) -> None:
    prompts = [prompt_tokens(seed, 2000) for seed in (61, 62)]
    with tiered_rig(tmp_path, units=16, host_blocks=64) as rig:
        ids = [rig.engine.submit(request(prompt)) for prompt in prompts]
        assert set(rig.run()) == set(ids)
        for prompt in prompts:
            assert rig.answer(prompt)[0] == oracle(prompt)
        assert rig.telemetry.value(names.LOST_SEGMENTS, reason="SLAB_UNAVAILABLE") == 0
        check_clean(rig)


def test_interrupt_waits_for_the_end_of_the_block_that_defers_it() -> None:
    done: list[int] = []

    def work() -> None:
        with interrupts_deferred(), interrupts_deferred():
            signal.raise_signal(signal.SIGINT)
            done.append(1)

    with pytest.raises(KeyboardInterrupt):
        work()
    assert done
    with pytest.raises(KeyboardInterrupt):
        signal.raise_signal(signal.SIGINT)


def test_interrupt_in_a_long_wait_is_heard_before_the_block_ends() -> None:
    done: list[int] = []

    def work() -> None:
        with interrupts_deferred():
            signal.raise_signal(signal.SIGINT)
            check_interrupt()
            done.append(1)

    with pytest.raises(KeyboardInterrupt):
        work()
    assert not done
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
