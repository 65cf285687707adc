"""Everything that a kernel may do to us, by a script: short, repeated, stale, late and lost completions, refusals."""

from __future__ import annotations

import errno
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from h3kv import _native
from h3kv.testing.io_file import WAIT_NS, IoFile, run
from h3kv.testing.scripted_io import FOREVER, Effect, IoFault, open_scripted_engine
from h3kv.tiers.io import (
    CANCELLED,
    CHECKSUM_MISMATCH,
    DEADLINE,
    END_OF_FILE,
    ERROR,
    FLUSH,
    OK,
    READ,
    WRITE,
    IoEngine,
)

SIZE = 64 << 10
PAGE = 4096


@pytest.fixture
def file(tmp_path: Path) -> Iterator[IoFile]:
    file = IoFile(tmp_path / "file", SIZE)
    yield file
    file.close()


def scripted(file: IoFile, *faults: IoFault, depth: int = 4) -> IoEngine:
    return open_scripted_engine([file.descriptor], faults, depth=depth)


def whole_read(file: IoFile) -> np.ndarray[tuple[int], np.dtype[np.void]]:
    return file.op(READ, 0, SIZE, tag=7)


@pytest.mark.parametrize("step", [1, 1000, 4096, 5000, SIZE - 1])
def test_the_remainder_of_a_short_read_is_read(file: IoFile, step: int) -> None:
    engine = scripted(file, IoFault("short", value=step))
    assert run(engine, whole_read(file))["status"].tolist() == [OK]
    assert np.array_equal(file.read_N, file.bytes_N)
    assert engine.statistics().short_transfers == 1
    engine.close()


def test_a_read_in_sixteen_pieces_arrives(file: IoFile) -> None:
    engine = scripted(file, IoFault("short", count=FOREVER, value=PAGE))
    assert run(engine, whole_read(file))["status"].tolist() == [OK]
    assert np.array_equal(file.read_N, file.bytes_N)
    assert engine.statistics().short_transfers == SIZE // PAGE - 1
    engine.close()


def test_the_remainder_of_a_short_write_is_written(file: IoFile) -> None:
    file.memory_N[:SIZE] = file.bytes_N[::-1]
    engine = scripted(file, IoFault("short", count=3, value=2 * PAGE))
    assert run(engine, file.op(WRITE, 0, SIZE))["status"].tolist() == [OK]
    assert file.path.read_bytes() == file.bytes_N[::-1].tobytes()
    engine.close()


def test_the_end_of_the_file_is_an_error_after_one_try(file: IoFile) -> None:
    engine = scripted(file, IoFault("short", value=0))
    assert run(engine, whole_read(file))["status"].tolist() == [END_OF_FILE]
    assert run(engine, whole_read(file))["status"].tolist() == [OK]
    engine.close()


def test_an_end_behind_a_short_read_is_found_once(file: IoFile) -> None:
    engine = scripted(file, IoFault("short", value=5000), IoFault("short", first=1, count=FOREVER, value=904))
    # The remainder begins at 4096, where it is aligned; 904 bytes from there end at 5000 again.
    assert run(engine, whole_read(file))["status"].tolist() == [END_OF_FILE]
    assert engine.statistics().short_transfers == 1
    engine.close()


def test_a_write_that_moves_nothing_is_an_error(file: IoFile) -> None:
    engine = scripted(file, IoFault("short", count=FOREVER, value=0))
    assert run(engine, file.op(WRITE, 0, SIZE))[["status", "error"]].tolist() == [(ERROR, errno.EIO)]
    engine.close()


@pytest.mark.parametrize("error", [errno.EIO, errno.ENOSPC, errno.EROFS, errno.ECANCELED])
@pytest.mark.parametrize("kind", [READ, WRITE, FLUSH])
def test_errors_of_the_kernel_end_the_op_and_nothing_else(file: IoFile, kind: int, error: int) -> None:
    engine = scripted(file, IoFault("error", first=1, value=error), depth=1)
    results_N = run(engine, *(file.op(kind, page * PAGE, PAGE, tag=page) for page in range(3)))
    assert results_N[["tag", "status", "error"]].tolist() == [(0, OK, 0), (1, ERROR, error), (2, OK, 0)]
    assert engine.statistics().failed == 1
    engine.close()


@pytest.mark.parametrize("error", [errno.EAGAIN, errno.EINTR])
def test_passing_errors_are_retried(file: IoFile, error: int) -> None:
    engine = scripted(file, IoFault("error", count=3, value=error))
    assert run(engine, whole_read(file), file.op(FLUSH))["status"].tolist().count(OK) == 2
    assert np.array_equal(file.read_N, file.bytes_N)
    assert engine.statistics().retries == 3
    engine.close()


def test_a_passing_error_that_stays_ends_with_the_deadline(file: IoFile) -> None:
    engine = scripted(file, IoFault("error", count=FOREVER, value=errno.EAGAIN))
    assert run(engine, file.op(READ, 0, PAGE, deadline_ms=5))["status"].tolist() == [DEADLINE]
    assert engine.statistics().in_flight == 0
    engine.close()


def test_a_full_queue_keeps_ops_pending_in_order(file: IoFile) -> None:
    engine = scripted(file, IoFault("full", first=2, value=3), IoFault("full", first=5, count=4, value=1), depth=16)
    results_N = run(engine, *(file.op(READ, page * PAGE, PAGE, tag=page) for page in range(SIZE // PAGE)))
    assert results_N[["tag", "status"]].tolist() == [(page, OK) for page in range(SIZE // PAGE)]
    assert np.array_equal(file.read_N, file.bytes_N)
    engine.close()


@pytest.mark.parametrize("effect", ["repeat", "stale"])
def test_completions_of_requests_that_ended_are_ignored_and_counted(file: IoFile, effect: Effect) -> None:
    engine = scripted(file, IoFault(effect, count=FOREVER), IoFault("short", first=3, count=9, value=PAGE))
    results_N = run(engine, *(file.op(READ, part * 2 * PAGE, 2 * PAGE, tag=part) for part in range(8)))
    assert sorted(results_N["tag"].tolist()) == list(range(8))
    assert set(results_N["status"].tolist()) == {OK}
    assert np.array_equal(file.read_N, file.bytes_N)
    engine.close()
    assert engine.poll().size == 0
    assert engine.statistics().stale_completions >= 8


def test_a_stuck_op_ends_with_its_deadline_once_the_kernel_lets_go(file: IoFile) -> None:
    engine = scripted(file, IoFault("hold"))
    results_N = run(engine, file.op(READ, 0, PAGE, tag=1, deadline_ms=5), file.op(READ, PAGE, PAGE, tag=2))
    assert results_N[["tag", "status"]].tolist() == [(2, OK), (1, DEADLINE)]
    assert not file.read_N[:PAGE].any()
    engine.close()


def test_what_ends_whole_after_its_deadline_counts(file: IoFile) -> None:
    engine = scripted(file, IoFault("late"))
    results_N = run(engine, file.op(READ, 0, PAGE, deadline_ms=5))
    assert results_N["status"].tolist() == [OK]
    assert int(results_N["duration_ns"][0]) > 0
    assert np.array_equal(file.read_N[:PAGE], file.bytes_N[:PAGE])
    engine.close()


def test_no_remainder_is_asked_for_after_the_deadline(file: IoFile) -> None:
    engine = scripted(file, IoFault("short", value=PAGE), IoFault("hold", first=1))
    assert run(engine, file.op(READ, 0, SIZE, deadline_ms=5))["status"].tolist() == [DEADLINE]
    engine.close()


def test_ops_that_wait_for_a_stuck_one_meet_their_own_deadline(file: IoFile) -> None:
    engine = scripted(file, IoFault("hold"), depth=1)
    stuck, waiting = file.op(READ, 0, PAGE, tag=1, deadline_ms=10_000), file.op(READ, PAGE, PAGE, tag=2, deadline_ms=5)
    engine.submit(np.concatenate([stuck, waiting]))
    engine.wait(WAIT_NS)
    assert engine.poll()[["tag", "status"]].tolist() == [(2, DEADLINE)]
    engine.cancel_all()
    engine.wait(WAIT_NS)
    assert engine.poll()[["tag", "status"]].tolist() == [(1, CANCELLED)]
    engine.close()


def test_cancel_all_ends_what_is_pending_held_and_to_be_retried(file: IoFile) -> None:
    engine = scripted(file, IoFault("hold"), IoFault("error", first=1, count=FOREVER, value=errno.EAGAIN), depth=2)
    engine.submit(np.concatenate([file.op(READ, page * PAGE, PAGE, tag=page) for page in range(4)]))
    engine.cancel_all()
    engine.wait(WAIT_NS, results=4)
    assert sorted(engine.poll()[["tag", "status"]].tolist()) == [(tag, CANCELLED) for tag in range(4)]
    engine.close()


def test_a_flipped_byte_is_found_by_the_checksum(file: IoFile) -> None:
    crcs_N = np.array([_native.crc32c(file.address + page * PAGE, PAGE) for page in range(SIZE // PAGE)], np.uint32)
    op = whole_read(file)
    op["crcs"], op["page_bytes"] = crcs_N.ctypes.data, PAGE
    engine = scripted(file, IoFault("flip", value=11 * PAGE + 5))
    assert run(engine, op)[["status", "page"]].tolist() == [(CHECKSUM_MISMATCH, 11)]
    assert run(engine, op)[["status", "page"]].tolist() == [(OK, 0)]
    engine.close()


def test_a_torn_write_is_an_error_and_its_checksums_tell(file: IoFile) -> None:
    file.memory_N[:SIZE] = file.bytes_N[::-1]
    crcs_N = np.zeros(SIZE // PAGE, dtype=np.uint32)
    write, read = file.op(WRITE, 0, SIZE), file.op(READ, 0, SIZE)
    for op in (write, read):
        op["crcs"], op["page_bytes"] = crcs_N.ctypes.data, PAGE
    engine = scripted(file, IoFault("torn", value=errno.EIO))
    assert run(engine, write)[["status", "error"]].tolist() == [(ERROR, errno.EIO)]
    assert run(engine, read)[["status", "page"]].tolist() == [(CHECKSUM_MISMATCH, SIZE // PAGE // 2)]
    engine.close()


@pytest.mark.parametrize("count", [1, FOREVER])
def test_failing_the_nth_request_for_every_n_leaves_nothing_in_flight(file: IoFile, count: int) -> None:
    for first in range(12):
        faults = [IoFault("error", first, count, errno.EIO), IoFault("short", 2, 3, PAGE)]
        engine = scripted(file, *faults, depth=3)
        results_N = run(engine, *(file.op(READ, part * SIZE // 4, SIZE // 4, tag=part) for part in range(4)))
        assert sorted(results_N["tag"].tolist()) == list(range(4))
        good = {int(tag) for tag in results_N["tag"][results_N["status"] == OK]}
        for part in good:
            place = slice(part * SIZE // 4, (part + 1) * SIZE // 4)
            assert np.array_equal(file.read_N[place], file.bytes_N[place])
        statistics = engine.statistics()
        assert (statistics.in_flight, statistics.pending, statistics.failed) == (0, 0, 4 - len(good))
        engine.close()
