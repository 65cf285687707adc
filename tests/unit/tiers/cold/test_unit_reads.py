"""Small reads of segments that are damaged, given up, or on a device that fails."""

from __future__ import annotations

import contextlib
import mmap
import os
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from h3kv.core.errors import SlabCorruptError, TierBrokenError
from h3kv.core.ports import EndedReads, PersistentStore
from h3kv.core.types import SlotHandle
from h3kv.telemetry import names
from h3kv.telemetry.recorder import Recorder
from h3kv.testing.cold_segments import LAYOUT, open_store, payload, restore, write_segments
from h3kv.testing.faulty_files import FaultPlan, FaultyFiles
from h3kv.testing.faulty_store import FaultyStore, InjectedFaultError
from h3kv.tiers.cold.ops import address_of
from h3kv.tiers.cold.unit_reads import UNIT_READ_DTYPE
from h3kv.tiers.io import READ

PIECE = LAYOUT.slab.check_bytes
WAIT_NS = 60_000_000_000


def read_firsts(store: PersistentStore, slabs: Sequence[SlotHandle], target: memoryview) -> EndedReads:
    """Read the first piece of each slab; tags count from 0."""
    reads_N = np.zeros(len(slabs), dtype=UNIT_READ_DTYPE)
    reads_N["tag"] = reads_N["slab"] = np.arange(len(slabs))
    reads_N["target"] = address_of(target) + np.arange(len(slabs)) * PIECE
    reads_N["size"] = PIECE
    store.read_units(tuple(slabs), reads_N.data)
    store.wait_units(WAIT_NS, reads=len(slabs))
    return store.poll_units()


def test_damaged_piece_names_its_slab_and_ends_the_segment(tmp_path: Path) -> None:
    telemetry, target = Recorder(), memoryview(mmap.mmap(-1, 3 * PIECE))
    with contextlib.closing(open_store(tmp_path, telemetry=telemetry)) as store:
        handles = write_segments(store, [(1, 2), (2, 2)])
        slabs = [handles[1][0], handles[1][1], handles[2][0]]
        at = store.path.read_bytes().index(bytes(payload(1, 1, 4096))) + 300
        with store.path.open("r+b") as file:
            file.seek(at)
            file.write(b"\xff\x00\xff")
            os.fsync(file.fileno())
        ended = read_firsts(store, slabs, target)
        assert sorted(ended.tags.tolist()) == [0, 2]
        (failed,) = ended.failed
        assert (failed.tag, failed.source) == (1, slabs[1])
        assert isinstance(failed.error, SlabCorruptError)
        assert (failed.error.key.segment, failed.error.key.layer) == (1, 1)
        assert telemetry.value(names.CORRUPT_SLABS, tier="nvme") == 1
        assert telemetry.value(names.READ_BYTES, tier="nvme") == 2 * PIECE
        again = read_firsts(store, slabs, target)
        assert again.tags.tolist() == [2]
        assert sorted(unit.tag for unit in again.failed) == [0, 1]
        assert all(isinstance(unit.error, SlabCorruptError) for unit in again.failed)
        assert target[2 * PIECE :] == payload(2, 0, PIECE)
        assert telemetry.value(names.CORRUPT_SLABS, tier="nvme") == 1
        store.release(handles[1])
        store.check_integrity()
    with contextlib.closing(open_store(tmp_path)) as store:
        assert sorted(restore(store)) == [2]


def test_read_that_the_device_refuses_can_be_tried_again(tmp_path: Path) -> None:
    telemetry, target = Recorder(), memoryview(mmap.mmap(-1, 2 * PIECE))
    plan = FaultPlan(kinds=frozenset({READ}))
    opened = open_store(tmp_path, telemetry=telemetry, engine=lambda files: FaultyFiles(files, plan))
    with contextlib.closing(opened) as store:
        handles = write_segments(store, [(1, 2)])[1]
        plan.number = plan.done + 2
        ended = read_firsts(store, handles, target)
        assert ended.tags.tolist() == [0]
        assert [(unit.tag, type(unit.error)) for unit in ended.failed] == [(1, TierBrokenError)]
        assert telemetry.value(names.IO_ERRORS, tier="nvme", kind="read") == 1
        assert sorted(read_firsts(store, handles, target).tags.tolist()) == [0, 1]
        store.check_integrity()


@pytest.mark.parametrize("broken", [1, 2, 3])
def test_reads_that_a_test_breaks_end_with_its_fault_and_the_others_come(tmp_path: Path, broken: int) -> None:
    target = memoryview(mmap.mmap(-1, 2 * PIECE))
    inner = open_store(tmp_path)
    with contextlib.closing(FaultyStore(inner, broken_units=[broken])) as store:
        handles = write_segments(inner, [(1, 2)])[1]
        failures = [unit for _ in range(2) for unit in read_firsts(store, handles, target).failed]
        assert [type(unit.error) for unit in failures] == [InjectedFaultError]
        assert failures[0].tag == (broken - 1) % 2
        assert failures[0].source == handles[(broken - 1) % 2]
        store.check_integrity()
