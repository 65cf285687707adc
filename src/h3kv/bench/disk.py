"""The physical limit of reads from the cold store: how fast the device under its file reads.

Shapes: N reads.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import Final, Self

import numpy as np
from numpy.typing import NDArray

from h3kv.bench.limit import huge_buffer
from h3kv.core.errors import ConfigError, TierBrokenError
from h3kv.core.limits import DIRECT_IO_BYTES
from h3kv.core.types import Tier
from h3kv.core.units import NS_PER_MS, NS_PER_S
from h3kv.tiers.io import DEADLINE_MS, OK, OP_DTYPE, READ, IoEngine, describe, direct_file

READ_BYTES: Final = 4 << 20
DEPTH: Final = 16
SECONDS: Final = 0.5
"""Of one measurement: hundreds of reads on a slow disk."""

OFFSETS: Final = 1 << 17
"""Drawn for one measurement, before its clock starts."""

MEMORY_FILE_SYSTEMS: Final = frozenset({"tmpfs", "ramfs"})


class DiskLimit:
    """Reads a store's file at random, 4 MiB at a time and 16 at once, past the page cache where it can.

    Only what was written is read: a file system gives the rest without asking the device.

    Args:
        path: of the store's file, which may be in use. It is only read.

    Raises:
        ConfigError: the file cannot be read, or less than one read was written.
    """

    def __init__(self, path: Path) -> None:
        try:
            self._file, self.is_direct = direct_file(path, os.O_RDONLY)
        except OSError as error:
            raise ConfigError(f"cannot read {path}: {error.strerror}; choose another --store", field="store") from error
        try:
            self._starts_N = _written_starts(self._file, path)
            self._buffer = huge_buffer(DEPTH * READ_BYTES)
            room = (self._buffer.data_ptr(), self._buffer.numel())
            self._engine = IoEngine.open([self._file], depth=DEPTH, buffers=[room])
        except BaseException:
            os.close(self._file)
            raise
        self._chance = np.random.default_rng(self._starts_N.size)

    def bytes_per_second(self, seconds: float = SECONDS) -> float:
        """Bandwidth now.

        Raises:
            TierBrokenError: a read failed.
        """
        offsets_N = self._starts_N[self._chance.integers(0, self._starts_N.size, OFFSETS)]
        buffer = (self._buffer.data_ptr(), self._buffer.numel())
        return read_bandwidth(self._engine, offsets_N, io_bytes=READ_BYTES, buffer=buffer, seconds=seconds)

    def close(self) -> None:
        """Close the file."""
        self._engine.close()
        os.close(self._file)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def read_bandwidth(
    engine: IoEngine, offsets_N: NDArray[np.uint64], *, io_bytes: int, buffer: tuple[int, int], seconds: float
) -> float:
    """Bytes per second of reads of an engine's first file; another is asked for when one has ended, never more.

    Args:
        engine: nothing else is in flight.
        offsets_N: where to read, in order and then from the first again.
        io_bytes: of one read.
        buffer: (address, bytes) of memory that is overwritten: room for all reads in flight.
        seconds: how long to read.

    Raises:
        TierBrokenError: a read failed. Others may still be in flight: close the engine before the memory is given back.
    """
    rooms = buffer[1] // io_bytes
    assert rooms > 0 and io_bytes % DIRECT_IO_BYTES == 0
    ops_N = np.zeros(rooms, dtype=OP_DTYPE)
    ops_N["tag"] = np.arange(rooms)
    ops_N["address"] = buffer[0] + ops_N["tag"] * np.uint64(io_bytes)
    ops_N["size"], ops_N["kind"] = io_bytes, READ
    begin_ns = time.perf_counter_ns()
    free_N, started, done = ops_N["tag"], 0, 0
    while started == 0 or time.perf_counter_ns() - begin_ns < seconds * NS_PER_S:
        batch_N = ops_N[free_N]
        batch_N["offset"] = offsets_N.take(np.arange(started, started + free_N.size), mode="wrap")
        engine.submit(batch_N)
        started += free_N.size
        engine.wait(NS_PER_S, results=max(1, rooms // 16))
        free_N = _finished(engine)
        done += free_N.size
    engine.wait(DEADLINE_MS * NS_PER_MS, results=started - done)
    done += _finished(engine).size
    return done * io_bytes * NS_PER_S / (time.perf_counter_ns() - begin_ns)


def _finished(engine: IoEngine) -> NDArray[np.uint64]:
    """Tags of the reads that ended since the last call."""
    results_N = engine.poll()
    failed_N = results_N[results_N["status"] != OK]
    if failed_N.size:
        raise TierBrokenError(f"measuring the read bandwidth: {describe(failed_N[0])}", tier=Tier.NVME)
    tags_N: NDArray[np.uint64] = results_N["tag"]
    return tags_N


def describe_folder(folder: Path, *, is_direct: bool) -> str | None:
    """What a reader of the figures must know of the file system under a folder; None where all is as it should be."""
    kind = _file_system(folder)
    if kind in MEMORY_FILE_SYSTEMS:
        return f"{folder} lies in main memory ({kind}): figures of the cold store speak of no disk; give --store"
    if not is_direct:
        return f"{folder}: its file system has no direct I/O, so figures of the cold store are the page cache's"
    return None


def _written_starts(file: int, path: Path) -> NDArray[np.uint64]:
    """Offsets of reads that find data."""
    starts = [
        start
        for begin, end in _written_ranges(file)
        for start in range(-(-begin // DIRECT_IO_BYTES) * DIRECT_IO_BYTES, end - READ_BYTES + 1, READ_BYTES)
    ]
    if not starts:
        raise ConfigError(f"{path} holds less than {READ_BYTES} bytes in one piece: store more", field="store")
    return np.array(starts, dtype=np.uint64)


def _written_ranges(file: int) -> Iterator[tuple[int, int]]:
    """[begin, end) of each piece of a file that holds data."""
    end, size_bytes = 0, os.lseek(file, 0, os.SEEK_END)
    while end < size_bytes:
        try:
            begin = os.lseek(file, end, os.SEEK_DATA)
        except OSError:  # ENXIO: nothing but a hole up to the end
            return
        end = os.lseek(file, begin, os.SEEK_HOLE)
        yield begin, end


def _file_system(folder: Path) -> str:
    """Name of the file system that a folder lies on, as the kernel lists it; empty where it does not."""
    device = folder.stat().st_dev
    number = f"{os.major(device)}:{os.minor(device)}"
    for line in Path("/proc/self/mountinfo").read_text(encoding="utf-8").splitlines():
        before, _, after = line.partition(" - ")
        if before.split()[2] == number:
            return after.split()[0]
    return ""
