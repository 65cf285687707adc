"""The physical limit of reads from the cold store: how fast the device under its file reads."""

from __future__ import annotations

import os
import random
import time
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import Final, Self

import numpy as np

from h3kv.bench.limit import huge_buffer
from h3kv.core.errors import ConfigError, TierBrokenError
from h3kv.core.limits import DIRECT_IO_BYTES
from h3kv.core.types import Tier
from h3kv.core.units import NS_PER_S
from h3kv.tiers.io import OK, OP_DTYPE, READ, IoEngine, describe, direct_file

READ_BYTES: Final = 4 << 20
DEPTH: Final = 16
SECONDS: Final = 0.5
"""Of one measurement: hundreds of reads on a slow disk."""

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
            self._places = _places(self._file, path)
            self._buffer = huge_buffer(DEPTH * READ_BYTES)
            room = (self._buffer.data_ptr(), self._buffer.numel())
            self._engine = IoEngine.open([self._file], depth=DEPTH, buffers=[room])
        except BaseException:
            os.close(self._file)
            raise
        self._chance = random.Random(len(self._places))

    def bytes_per_second(self, seconds: float = SECONDS) -> float:
        """Bandwidth now.

        Raises:
            TierBrokenError: a read failed.
        """
        ops_N = np.zeros(DEPTH, dtype=OP_DTYPE)
        ops_N["tag"] = np.arange(DEPTH)
        ops_N["address"] = self._buffer.data_ptr() + ops_N["tag"] * np.uint64(READ_BYTES)
        ops_N["size"], ops_N["kind"] = READ_BYTES, READ
        begin_ns = time.perf_counter_ns()
        started = done = 0
        free_N = ops_N["tag"].astype(np.int64)
        while done < started or started == 0:
            is_over = time.perf_counter_ns() - begin_ns > seconds * NS_PER_S
            if free_N.size and not is_over:
                batch_N = ops_N[free_N]
                batch_N["offset"] = self._chance.choices(self._places, k=free_N.size)
                self._engine.submit(batch_N)
                started += free_N.size
            self._engine.wait(NS_PER_S)
            results_N = self._engine.poll()
            failed_N = results_N[results_N["status"] != OK]
            if failed_N.size:
                raise TierBrokenError(f"measuring the read bandwidth: {describe(failed_N[0])}", tier=Tier.NVME)
            free_N = results_N["tag"].astype(np.int64)
            done += free_N.size
        return done * READ_BYTES * NS_PER_S / (time.perf_counter_ns() - begin_ns)

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


def describe_folder(folder: Path, *, is_direct: bool) -> str | None:
    """What a reader of the figures must know of the file system under a folder; None where all is as it should be."""
    kind = _file_system(folder)
    if kind in MEMORY_FILE_SYSTEMS:
        return f"{folder} lies in main memory ({kind}): figures of the cold store speak of no disk; give --store"
    if not is_direct:
        return f"{folder}: its file system has no direct I/O, so figures of the cold store are the page cache's"
    return None


def _places(file: int, path: Path) -> list[int]:
    """Offsets of reads that find data."""
    places = [
        start
        for begin, end in _written_ranges(file)
        for start in range(-(-begin // DIRECT_IO_BYTES) * DIRECT_IO_BYTES, end - READ_BYTES + 1, READ_BYTES)
    ]
    if not places:
        raise ConfigError(f"{path} holds less than {READ_BYTES} bytes in one piece: store more", field="store")
    return places


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
