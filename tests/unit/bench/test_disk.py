"""Where the device's bandwidth is measured, and what is said of places that are no disk."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from h3kv.bench.disk import READ_BYTES, DiskLimit, describe_folder, read_bandwidth
from h3kv.bench.io import WORKLOADS
from h3kv.bench.limit import huge_buffer
from h3kv.core.errors import ConfigError, TierBrokenError
from h3kv.tiers.io import IoEngine

MEMORY = Path("/dev/shm")
PAGE = 4096


class CountingEngine(IoEngine):
    """Knows the most reads that it was ever asked for and has not answered."""

    asked = 0
    most_asked = 0

    def submit(self, ops_N: NDArray[np.void]) -> None:
        self.asked += ops_N.size
        self.most_asked = max(self.most_asked, self.asked)
        super().submit(ops_N)

    def poll(self) -> NDArray[np.void]:
        results_N = super().poll()
        self.asked -= results_N.size
        return results_N


@pytest.fixture
def engine(tmp_path: Path) -> Iterator[CountingEngine]:
    (tmp_path / "data").write_bytes(bytes(64 * PAGE))
    file = os.open(tmp_path / "data", os.O_RDONLY)
    engine = CountingEngine.open([file], depth=64)
    yield engine
    engine.close()
    os.close(file)


def test_no_more_reads_are_asked_for_than_the_buffer_holds(engine: CountingEngine) -> None:
    buffer = huge_buffer(16 * PAGE)
    room = (buffer.data_ptr(), buffer.numel())
    offsets_N = np.arange(7, dtype=np.uint64) * np.uint64(PAGE)
    assert read_bandwidth(engine, offsets_N, io_bytes=PAGE, buffer=room, seconds=0.01) > 0
    assert (engine.most_asked, engine.asked) == (16, 0)


def test_workloads_have_room_for_their_depth_as_fio_has() -> None:
    assert [workload.buffer_bytes // workload.io_bytes for workload in WORKLOADS] == [16, 64, 128]


def test_a_read_that_fails_ends_the_measurement(engine: CountingEngine) -> None:
    buffer = huge_buffer(4 * PAGE)
    beyond_N = np.array([64 * PAGE], dtype=np.uint64)
    with pytest.raises(TierBrokenError, match="the file ends too early"):
        read_bandwidth(engine, beyond_N, io_bytes=PAGE, buffer=(buffer.data_ptr(), buffer.numel()), seconds=0.01)
    engine.close()


def test_only_what_was_written_is_read(tmp_path: Path) -> None:
    path = tmp_path / "store"
    with path.open("wb") as file:
        file.write(bytes(2 * READ_BYTES))
        file.truncate(16 * READ_BYTES)
    with DiskLimit(path) as limit:
        assert limit.bytes_per_second(0.01) > 0
    with path.open("r+b") as file:
        file.truncate(READ_BYTES // 2)
    with pytest.raises(ConfigError, match="store more"):
        DiskLimit(path)


def test_a_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="No such file"):
        DiskLimit(tmp_path / "missing")


def test_places_that_are_no_disk_are_named(tmp_path: Path) -> None:
    message = describe_folder(tmp_path, is_direct=False)
    assert message is not None and str(tmp_path) in message
    if not MEMORY.exists():
        pytest.skip("this machine has no tmpfs at /dev/shm")
    message = describe_folder(MEMORY, is_direct=True)
    assert message is not None and "main memory" in message
