from __future__ import annotations

import errno
import fcntl
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Literal, cast

import numpy as np
import pytest

from h3kv import _native
from h3kv.core.errors import ConfigError, TierClosedError
from h3kv.testing.io_file import WAIT_NS, IoFile, run
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
    describe,
    direct_file,
)

SIZE = 1 << 20
PAGE = 4096


@pytest.fixture
def ring() -> None:
    descriptor = os.open("/dev/null", os.O_RDONLY)
    probe = IoEngine.open([descriptor], depth=1)
    probe.close()
    os.close(descriptor)
    if probe.backend != "io_uring":
        pytest.skip(f"no io_uring here: {probe.fallback_reason}")


@pytest.fixture(params=["io_uring", "threads"])
def backend(request: pytest.FixtureRequest) -> Literal["io_uring", "threads"]:
    if request.param == "io_uring":
        request.getfixturevalue("ring")
    return cast(Literal["io_uring", "threads"], request.param)


@pytest.fixture
def file(tmp_path: Path) -> Iterator[IoFile]:
    file = IoFile(tmp_path / "file", SIZE)
    yield file
    file.close()


@pytest.fixture
def engine(file: IoFile, backend: Literal["io_uring", "threads"]) -> Iterator[IoEngine]:
    engine = IoEngine.open([file.descriptor], depth=8, buffers=[file.buffer], backend=backend)
    yield engine
    engine.close()
    assert engine.statistics().in_flight == engine.statistics().pending == 0


def test_many_more_reads_than_the_depth_all_arrive(file: IoFile, engine: IoEngine) -> None:
    ops = [file.op(READ, page * PAGE, PAGE, tag=page) for page in range(SIZE // PAGE)]
    results_N = run(engine, *ops)
    assert sorted(results_N["tag"].tolist()) == list(range(SIZE // PAGE))
    assert set(results_N["status"].tolist()) == {OK}
    assert np.array_equal(file.read_N, file.bytes_N)
    statistics = engine.statistics()
    assert (statistics.reads, statistics.bytes_read, statistics.failed) == (SIZE // PAGE, SIZE, 0)


def test_what_was_written_and_flushed_is_in_the_file(file: IoFile, engine: IoEngine) -> None:
    file.memory_N[:SIZE] = file.bytes_N[::-1]
    halves = [file.op(WRITE, start, SIZE // 2) for start in (0, SIZE // 2)]
    assert run(engine, *halves)["status"].tolist() == [OK, OK]
    assert run(engine, file.op(FLUSH, tag=9))[["tag", "status"]].tolist() == [(9, OK)]
    assert file.path.read_bytes() == file.bytes_N[::-1].tobytes()


def test_a_write_fills_in_checksums_that_a_read_is_compared_with(file: IoFile, engine: IoEngine) -> None:
    crcs_N = np.zeros(SIZE // PAGE, dtype=np.uint32)
    write, read = file.op(WRITE, 0, SIZE), file.op(READ, 0, SIZE)
    for op in (write, read):
        op["crcs"], op["page_bytes"] = crcs_N.ctypes.data, PAGE
    assert run(engine, write)["status"].tolist() == [OK]
    expected = [_native.crc32c(file.address + page * PAGE, PAGE) for page in range(SIZE // PAGE)]
    assert crcs_N.tolist() == expected
    assert run(engine, read)["status"].tolist() == [OK]
    assert np.array_equal(file.read_N, file.bytes_N)


def test_the_first_page_that_does_not_match_is_named(file: IoFile, engine: IoEngine) -> None:
    crcs_N = np.array([_native.crc32c(file.address + page * PAGE, PAGE) for page in range(SIZE // PAGE)], np.uint32)
    with file.path.open("r+b") as other:
        for page in (40, 33):
            other.seek(page * PAGE + 17)
            other.write(bytes([file.bytes_N[page * PAGE + 17] ^ 1]))
        other.flush()
        os.fsync(other.fileno())
    op = file.op(READ, 0, SIZE)
    op["crcs"], op["page_bytes"] = crcs_N.ctypes.data, PAGE
    (result,) = run(engine, op)
    assert (int(result["status"]), int(result["page"])) == (CHECKSUM_MISMATCH, 33)
    assert describe(result) == "the checksum of page 33 does not match"
    assert engine.statistics().checksum_mismatches == 1


def test_a_read_beyond_the_end_is_an_error(file: IoFile, engine: IoEngine) -> None:
    over, behind = file.op(READ, SIZE - PAGE, 2 * PAGE, tag=1), file.op(READ, SIZE, PAGE, tag=2)
    over["address"] = behind["address"] = file.address
    results_N = run(engine, over, behind)
    assert results_N["status"].tolist() == [END_OF_FILE, END_OF_FILE]
    assert describe(results_N[0]) == "the file ends too early"


def test_a_file_of_no_whole_pages_ends_with_an_error_and_no_spinning(file: IoFile, engine: IoEngine) -> None:
    os.truncate(file.path, SIZE - 1000)
    before = engine.statistics().kernel_calls
    (result,) = run(engine, file.op(READ, SIZE - 2 * PAGE, 2 * PAGE))
    assert int(result["status"]) == END_OF_FILE
    assert engine.statistics().kernel_calls - before < 10


def test_unsound_ops_are_refused_one_by_one(file: IoFile, engine: IoEngine) -> None:
    kind, index, size, pages = (file.op(READ, 0, PAGE, tag=tag) for tag in range(4))
    kind["kind"], index["file"], size["size"] = 3, 1, 0
    pages["crcs"], pages["page_bytes"] = file.address, 1000
    results_N = run(engine, kind, index, size, pages, file.op(READ, 0, PAGE, tag=4))
    by_tag = {int(tag): (int(status), int(error)) for tag, status, error in results_N[["tag", "status", "error"]]}
    assert by_tag == {0: (ERROR, errno.EINVAL), 1: (ERROR, errno.EINVAL), 2: (ERROR, errno.EINVAL),
                      3: (ERROR, errno.EINVAL), 4: (OK, 0)}  # fmt: skip


def test_the_errno_of_the_kernel_is_passed_on(file: IoFile, backend: Literal["io_uring", "threads"]) -> None:
    descriptor = os.open(file.path, os.O_RDONLY)
    engine = IoEngine.open([descriptor], depth=1, backend=backend)
    (result,) = run(engine, file.op(WRITE, 0, PAGE))
    assert (int(result["status"]), int(result["error"])) == (ERROR, errno.EBADF)
    assert describe(result) == "Bad file descriptor (EBADF)"
    engine.close()
    os.close(descriptor)


def test_memory_outside_the_buffers_works_unregistered(file: IoFile, backend: Literal["io_uring", "threads"]) -> None:
    engine = IoEngine.open([file.descriptor], depth=2, buffers=[(file.address, SIZE + PAGE)], backend=backend)
    inside, across, outside = (file.op(READ, offset, 2 * PAGE) for offset in (0, PAGE, 8 * PAGE))
    assert set(run(engine, inside, across, outside)["status"].tolist()) == {OK}
    assert np.array_equal(file.read_N[: 3 * PAGE], file.bytes_N[: 3 * PAGE])
    assert np.array_equal(file.read_N[8 * PAGE : 10 * PAGE], file.bytes_N[8 * PAGE : 10 * PAGE])
    engine.close()


def test_close_waits_and_drops_what_is_pending(file: IoFile, backend: Literal["io_uring", "threads"]) -> None:
    engine = IoEngine.open([file.descriptor], depth=2, backend=backend)
    engine.submit(np.concatenate([file.op(READ, page * PAGE, PAGE, tag=page) for page in range(SIZE // PAGE)]))
    engine.close()
    engine.close()
    file.read_N[:] = 0
    results_N = engine.poll()
    assert sorted(results_N["tag"].tolist()) == list(range(SIZE // PAGE))
    assert set(results_N["status"].tolist()) <= {OK, CANCELLED}
    assert not file.read_N.any()
    with pytest.raises(TierClosedError, match="closed"):
        engine.submit(file.op(READ, 0, PAGE))


def test_cancel_all_gives_every_op_its_result(file: IoFile, engine: IoEngine) -> None:
    engine.submit(np.concatenate([file.op(READ, page * PAGE, PAGE, tag=page) for page in range(SIZE // PAGE)]))
    engine.cancel_all()
    engine.wait(WAIT_NS, results=SIZE // PAGE)
    results_N = engine.poll()
    assert sorted(results_N["tag"].tolist()) == list(range(SIZE // PAGE))
    assert set(results_N["status"].tolist()) <= {OK, CANCELLED}
    assert run(engine, file.op(READ, 0, PAGE))["status"].tolist() == [OK]


def test_waiting_for_nothing_returns(engine: IoEngine) -> None:
    engine.wait(WAIT_NS)
    assert engine.poll().size == 0


def test_a_wait_ends_with_its_time(file: IoFile, backend: Literal["io_uring", "threads"]) -> None:
    reader, writer = os.pipe()
    engine = IoEngine.open([reader], depth=1, backend=backend)
    engine.submit(file.op(READ, 0, 5))
    engine.wait(1_000_000)
    if backend == "io_uring":
        os.write(writer, b"hello")
        engine.wait(WAIT_NS)
        assert file.read_N[:5].tobytes() == b"hello"
    else:
        engine.wait(WAIT_NS)
        assert engine.poll()["error"].tolist() == [errno.ESPIPE]
    engine.close()
    os.close(reader)
    os.close(writer)


def test_a_read_that_the_kernel_cannot_finish_is_cancelled_at_its_deadline(file: IoFile, ring: None) -> None:
    reader, writer = os.pipe()
    engine = IoEngine.open([reader, file.descriptor], depth=2, backend="io_uring")
    stuck, other = file.op(READ, 0, PAGE, tag=1, deadline_ms=5), file.op(READ, PAGE, PAGE, tag=2)
    other["file"] = 1
    results_N = run(engine, stuck, other)
    assert results_N[["tag", "status"]].tolist() == [(2, OK), (1, DEADLINE)]
    os.write(writer, bytes(range(200)))
    assert not file.read_N[:PAGE].any()
    engine.submit(file.op(READ, 0, 200, tag=3))
    engine.submit(file.op(READ, 0, 200, tag=4))
    engine.wait(WAIT_NS)
    engine.cancel_all()
    engine.wait(WAIT_NS, results=2)
    assert sorted(engine.poll()[["tag", "status"]].tolist()) == [(3, OK), (4, CANCELLED)]
    engine.close()
    os.close(reader)
    os.close(writer)


@pytest.mark.slow
def test_ten_thousand_ops_leave_no_descriptor_behind(file: IoFile, backend: Literal["io_uring", "threads"]) -> None:
    before = len(list(Path("/proc/self/fd").iterdir()))
    for _ in range(10):
        engine = IoEngine.open([file.descriptor], depth=64, buffers=[file.buffer], backend=backend)
        ops = [file.op(READ, page % 256 * PAGE, PAGE, tag=page) for page in range(1000)]
        assert set(run(engine, *ops)["status"].tolist()) == {OK}
        engine.close()
        del engine
    assert len(list(Path("/proc/self/fd").iterdir())) == before


def test_a_depth_out_of_range_is_named(file: IoFile) -> None:
    with pytest.raises(ConfigError, match="from 1 to 4096"):
        IoEngine.open([file.descriptor], depth=0)


def test_a_closed_engine_that_is_still_referenced_holds_no_descriptor(
    file: IoFile, backend: Literal["io_uring", "threads"]
) -> None:
    before = descriptors()
    engines = [IoEngine.open([file.descriptor], depth=4, buffers=[file.buffer], backend=backend) for _ in range(4)]
    if backend == "io_uring":
        assert descriptors() != before
    for engine in engines:
        assert run(engine, file.op(READ, 0, PAGE))["status"].tolist() == [OK]
        engine.close()
    assert descriptors() == before
    assert {(engine.backend, engine.statistics().reads, engine.poll().size) for engine in engines} == {(backend, 1, 0)}


def descriptors() -> list[str]:
    """Numbers and targets of what this process has open, but for the folder that is read for it."""
    with os.scandir("/proc/self/fd") as entries:
        pairs = [(entry.name, str(Path(entry.path).readlink())) for entry in entries]
    return sorted(f"{name} {target}" for name, target in pairs if not target.endswith("/fd"))


def test_direct_files_read_past_the_page_cache_where_the_file_system_allows(tmp_path: Path) -> None:
    descriptor, is_direct = direct_file(tmp_path / "new", os.O_RDWR | os.O_CREAT)
    assert os.fstat(descriptor).st_mode & 0o777 == 0o600
    assert is_direct == bool(fcntl.fcntl(descriptor, fcntl.F_GETFL) & os.O_DIRECT)
    os.close(descriptor)
    with pytest.raises(FileNotFoundError):
        direct_file(tmp_path / "missing", os.O_RDONLY)
