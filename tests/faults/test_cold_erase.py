"""Erasing in the cold store while operations fail or the machine stops: nothing is lost sight of before it is gone."""

from __future__ import annotations

import contextlib
import time
from pathlib import Path

import pytest

from h3kv.telemetry.recorder import Recorder
from h3kv.testing.cold_segments import (
    LAYOUT,
    is_intact,
    open_store,
    payload,
    restore,
    submit_segments,
    write_segments,
)
from h3kv.testing.faulty_files import CrashError, FaultPlan, FaultyFiles
from h3kv.testing.served_cold_store import ServedColdStore, slots_region
from h3kv.tiers.cold import ColdStore
from h3kv.tiers.remote import RemoteColdStore

DEADLINE_S = 30.0
GONE, KEPT = 0x1122334455667788, 0x2233445566778899
OPS_MAX = 60


def mark_of(number: int) -> bytes:
    """Bytes that a segment's slabs are full of, and its keys."""
    return bytes(payload(number, 0, 16))[:8]


def lies_there(folder: Path, number: int) -> bool:
    return mark_of(number) in (folder / "store.h3").read_bytes()


def end_erasing(store: ColdStore | RemoteColdStore) -> None:
    end_s = time.monotonic() + DEADLINE_S
    while store.erasing:
        assert time.monotonic() < end_s, "it is still being erased"
        store.wait(10_000_000)
        store.poll()


def test_bytes_are_gone_when_the_store_says_so_and_not_those_of_others(tmp_path: Path) -> None:
    with contextlib.closing(open_store(tmp_path)) as store:
        handles = write_segments(store, [(GONE, 8), (KEPT, 4)])
        assert lies_there(tmp_path, GONE)
        used = store.statistics().used_bytes
        store.erase(handles[GONE])
        assert store.erasing == 1
        assert store.statistics().used_bytes == used, "its room is not free yet"
        end_erasing(store)
        assert not lies_there(tmp_path, GONE)
        assert store.statistics().used_bytes == used // 3
        store.check_integrity()
    with contextlib.closing(open_store(tmp_path)) as store:
        kept = restore(store)
        assert list(kept) == [KEPT]
        assert is_intact(store, kept[KEPT])


def test_released_bytes_stay_until_they_are_overwritten(tmp_path: Path) -> None:
    """What erasing adds: without it this is what `release` leaves."""
    with contextlib.closing(open_store(tmp_path)) as store:
        store.release(write_segments(store, [(GONE, 8)])[GONE])
    assert lies_there(tmp_path, GONE)


def test_segment_that_is_erased_while_it_is_written_is_gone_too(tmp_path: Path) -> None:
    with contextlib.closing(open_store(tmp_path)) as store:
        store.erase(submit_segments(store, [(GONE, 8)])[GONE])
        end_erasing(store)
        assert not lies_there(tmp_path, GONE)
        store.check_integrity()
    with contextlib.closing(open_store(tmp_path)) as store:
        assert restore(store) == {}


@pytest.mark.parametrize("kept", ["none", "all", "some"])
def test_machine_that_stops_at_any_operation_finds_again_what_is_not_gone(tmp_path: Path, kept: str) -> None:
    for number in range(1, OPS_MAX):
        folder = tmp_path / f"{number}"
        folder.mkdir()
        with contextlib.closing(open_store(folder)) as store:
            write_segments(store, [(GONE, 4), (KEPT, 2)])
        plan = FaultPlan(kept=kept, seed=number)  # type: ignore[arg-type]
        store = open_store(folder, engine=lambda files, plan=plan: FaultyFiles(files, plan))
        has_crashed = False
        try:
            found = restore(store)
            plan.number, plan.mode = plan.done + number, "crash"
            store.erase(found[GONE].handles_L)
            end_erasing(store)
            assert not lies_there(folder, GONE)
        except CrashError:
            has_crashed = True
        plan.number = None
        with contextlib.suppress(CrashError):
            store.close()
        with contextlib.closing(open_store(folder)) as store:
            again = restore(store)
            assert is_intact(store, again[KEPT])
            assert GONE in again or not lies_there(folder, GONE), f"lost sight of after operation {number}"
            if GONE in again:
                store.erase(again[GONE].handles_L)
                end_erasing(store)
            assert not lies_there(folder, GONE)
        if not has_crashed:
            return
    pytest.fail("erasing takes more operations than that")


def test_store_that_cannot_be_written_goes_on_saying_that_it_is_not_erased(tmp_path: Path) -> None:
    with contextlib.closing(open_store(tmp_path)) as store:
        write_segments(store, [(GONE, 4)])
    plan = FaultPlan()
    with contextlib.closing(open_store(tmp_path, engine=lambda files: FaultyFiles(files, plan))) as store:
        found = restore(store)
        plan.number, plan.for_ever = plan.done + 1, True
        store.erase(found[GONE].handles_L)
        for _ in range(20):
            store.wait(1_000_000)
            store.poll()
        assert store.is_degraded
        assert store.erasing == 1
        store.check_integrity()
        plan.number = None
    with contextlib.closing(open_store(tmp_path)) as store:
        store.erase(restore(store)[GONE].handles_L)
        end_erasing(store)
    assert not lies_there(tmp_path, GONE)


def test_erasing_is_counted_as_written_and_never_refused_for_it(tmp_path: Path) -> None:
    with contextlib.closing(open_store(tmp_path)) as store:
        write_segments(store, [(GONE, 8)])
    spent = Recorder()
    with contextlib.closing(open_store(tmp_path, write_bytes_per_day=1, telemetry=spent)) as store:
        store.erase(restore(store)[GONE].handles_L)
        end_erasing(store)
    assert not lies_there(tmp_path, GONE)


def test_server_that_ends_meanwhile_erases_what_nobody_knows_when_it_is_back(tmp_path: Path) -> None:
    def opened(bell: object) -> ColdStore:
        return open_store(tmp_path, units=2)

    with contextlib.closing(open_store(tmp_path)) as store:
        write_segments(store, [(GONE, 8), (KEPT, 4)])
    served = ServedColdStore(opened, (slots_region(LAYOUT.slab.block_bytes, 4),))
    try:
        client = served.open_client()
        found = restore(client)  # type: ignore[arg-type]
        served.end()
        client.erase(found[GONE].handles_L)
        client.poll()
        assert client.erasing == 1
        assert lies_there(tmp_path, GONE)
        served.start()
        end_erasing(client)
        assert not lies_there(tmp_path, GONE)
        assert lies_there(tmp_path, KEPT)
        client.erase([])
        end_erasing(client)
        client.check_integrity()
    finally:
        served.close()
