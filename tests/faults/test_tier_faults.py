"""What disks do to running sequences: the answer is right or the error is clear, and nothing is left behind."""

from __future__ import annotations

import errno
from collections.abc import Iterator
from pathlib import Path

import pytest

from h3kv.core.errors import SlabUnavailableError, TierFullError
from h3kv.core.types import Tier
from h3kv.telemetry import names
from h3kv.testing.engines import Rig, make_rig, one_thread, prompt_tokens
from h3kv.testing.faulty_files import FaultPlan, FaultyFiles
from h3kv.testing.tiered_rig import tiered_rig
from h3kv.tiers.io import FLUSH, READ, WRITE

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("single_thread")]

PROMPT = prompt_tokens(70, 1500)
NEW_TOKENS = 70
"""More than a block: the answer moves through the window, too."""


@pytest.fixture
def single_thread() -> Iterator[None]:
    with one_thread():
        yield


@pytest.fixture(scope="module")
def expected() -> list[int]:
    return make_rig(capacity_blocks=64).answer(PROMPT, max_new_tokens=NEW_TOKENS)[0]


def check_clean(rig: Rig) -> None:
    rig.engine.check_integrity()
    assert rig.segments.statistics().pins == 0
    assert rig.pool.statistics()[Tier.DEVICE].used_bytes == 0


def operations(folder: Path, kind: int) -> int:
    """How many operations of a kind the answer takes without faults."""
    plan = FaultPlan(kinds=frozenset({kind}))
    with tiered_rig(folder, io=lambda files: FaultyFiles(files, plan)) as rig:
        start = plan.done
        rig.answer(PROMPT, max_new_tokens=NEW_TOKENS)
        return plan.done - start


def fractions(total: int) -> list[int]:
    """First, last, and some between: every one of hundreds would test the same few places again and again."""
    return sorted({1, 2, total // 2, total})


@pytest.mark.parametrize("mode", ["flip", "error"])
def test_read_that_breaks_anywhere_is_computed_again(mode: str, tmp_path: Path, expected: list[int]) -> None:
    (tmp_path / "count").mkdir()
    total = operations(tmp_path / "count", READ)
    losses: list[float] = []
    reason = "SLAB_CORRUPT" if mode == "flip" else "SLAB_UNAVAILABLE"
    # The last ones are read ahead for a step that does not come: nobody misses them.
    for number in fractions(total * 3 // 4):
        folder = tmp_path / str(number)
        folder.mkdir()
        plan = FaultPlan(mode=mode, kinds=frozenset({READ}))
        with tiered_rig(folder, io=lambda files, plan=plan: FaultyFiles(files, plan)) as rig:
            plan.number = plan.done + number
            assert rig.answer(PROMPT, max_new_tokens=NEW_TOKENS)[0] == expected
            losses.append(rig.telemetry.value(names.LOST_SEGMENTS, reason=reason))
            check_clean(rig)
    # One that was read ahead for a plan that changed is read again, and nobody notices.
    assert set(losses) <= {0, 1} and sum(losses) > 0


def test_disk_that_never_reads_again_ends_the_request_in_bounded_time(tmp_path: Path) -> None:
    plan = FaultPlan(mode="error", for_ever=True, kinds=frozenset({READ}))
    with tiered_rig(tmp_path, io=lambda files: FaultyFiles(files, plan)) as rig:
        plan.number = plan.done + 3
        with pytest.raises(SlabUnavailableError):
            rig.answer(PROMPT, max_new_tokens=NEW_TOKENS)
        check_clean(rig)
        short = prompt_tokens(71, 500)
        assert rig.answer(short)[0] == make_rig().answer(short)[0]
        check_clean(rig)


def test_byte_flipped_on_disk_between_two_processes_is_a_miss_from_there(tmp_path: Path, expected: list[int]) -> None:
    with tiered_rig(tmp_path) as rig:
        rig.answer(PROMPT, max_new_tokens=NEW_TOKENS)
    plan = FaultPlan(mode="flip", kinds=frozenset({READ}))
    with tiered_rig(tmp_path, io=lambda files: FaultyFiles(files, plan)) as rig:
        plan.number = plan.done + 5
        tokens, finished = rig.answer(PROMPT, max_new_tokens=NEW_TOKENS)
        assert tokens == expected
        assert finished.statistics.cached_tokens_total > 0
        check_clean(rig)


@pytest.mark.parametrize("for_ever", [False, True])
@pytest.mark.parametrize("kind", [WRITE, FLUSH])
@pytest.mark.parametrize("error", [errno.ENOSPC, errno.EIO])
def test_write_that_breaks_anywhere_degrades_the_store_and_serving_goes_on(
    error: int, kind: int, for_ever: bool, tmp_path: Path, expected: list[int]
) -> None:
    (tmp_path / "count").mkdir()
    total = operations(tmp_path / "count", kind)
    short = prompt_tokens(71, 500)
    answer = make_rig().answer(short)[0]
    refused = 0
    for number in fractions(total):
        folder = tmp_path / str(number)
        folder.mkdir()
        plan = FaultPlan(mode="error", error=error, for_ever=for_ever, kinds=frozenset({kind}))
        with tiered_rig(folder, io=lambda files, plan=plan: FaultyFiles(files, plan)) as rig:
            plan.number = plan.done + number
            # When HOST is full, and nothing can leave it any more, the request ends with the error that says so.
            try:
                tokens = rig.answer(PROMPT, max_new_tokens=NEW_TOKENS)[0]
            except TierFullError:
                refused += 1
            else:
                assert tokens == expected
            assert rig.telemetry.value(names.STORE_DEGRADED, tier="nvme") == 1
            check_clean(rig)
            assert rig.answer(short)[0] == answer
            check_clean(rig)
        with tiered_rig(folder) as rig:
            assert rig.answer(PROMPT, max_new_tokens=NEW_TOKENS)[0] == expected
            check_clean(rig)
    assert refused < len(fractions(total)), "what breaks last comes too late to refuse anything"


@pytest.mark.parametrize("mode", ["flip", "error"])
def test_copy_that_fails_on_its_way_back_never_becomes_visible(mode: str, tmp_path: Path, expected: list[int]) -> None:
    with tiered_rig(tmp_path) as rig:
        rig.answer(PROMPT)
    for number in (1, 5, 20):
        plan = FaultPlan(mode=mode, kinds=frozenset({READ}))
        with tiered_rig(tmp_path, host_blocks=96, io=lambda files, plan=plan: FaultyFiles(files, plan)) as rig:
            plan.number = plan.done + number
            assert rig.answer(PROMPT, max_new_tokens=NEW_TOKENS)[0] == expected
            check_clean(rig)


def test_many_lives_of_a_store_leave_no_descriptor_and_no_memory_behind(tmp_path: Path) -> None:
    prompt = prompt_tokens(72, 400)

    def live() -> tuple[int, int]:
        with tiered_rig(tmp_path) as rig:
            rig.answer(prompt)
        mappings = sum("h3" in line for line in Path("/proc/self/maps").read_text(encoding="utf-8").splitlines())
        return len(list(Path("/proc/self/fd").iterdir())), mappings

    live()
    first = live()
    assert [live() for _ in range(10)] == [first] * 10
