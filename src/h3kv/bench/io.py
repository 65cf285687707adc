"""Random reads of a large file through the I/O engine, against fio with io_uring at the same depth.

Both are given what the other has: direct I/O, buffers for as many reads as are in flight, registered, on huge pages
where they are so large, and a registered file.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np

from h3kv.bench.disk import OFFSETS, read_bandwidth
from h3kv.bench.limit import huge_buffer
from h3kv.bench.measure import Progress, Rounds
from h3kv.bench.results import Results
from h3kv.core.errors import ConfigError
from h3kv.core.units import NS_PER_S, describe_size
from h3kv.tiers.io import FLUSH, OK, OP_DTYPE, WRITE, IoEngine, describe, direct_file

MIB: Final = 1 << 20

FIO_ENVIRONMENT: Final = {"GLIBC_TUNABLES": "glibc.malloc.hugetlb=1"}
"""Makes the C library ask for huge pages where fio's buffers are large enough; fio has no such option of its own."""


@dataclass(frozen=True, slots=True)
class Workload:
    """Reads of one size, so many at a time."""

    label: str
    io_bytes: int
    depth: int

    @property
    def buffer_bytes(self) -> int:
        """Room for the reads in flight and none beyond: as fio, we ask for another when one has ended."""
        return self.depth * self.io_bytes


WORKLOADS: Final = (Workload("4m", 4 * MIB, 16), Workload("64k", MIB // 16, 64), Workload("4k", 4096, 128))


@dataclass(frozen=True, slots=True)
class Setting:
    """What to read and for how long."""

    file: Path | None
    """An existing file or device, which is only read. None: one is made in `folder` and removed."""
    folder: Path
    size_bytes: int
    """Of the file that is made."""
    repetitions: int
    seconds: float
    """Of each contestant in each repetition."""
    progress: Progress


def run(results: Results, setting: Setting) -> None:
    """Measure every workload.

    Args:
        results: receives `io.*`.
        setting: file, repetitions.

    Raises:
        ConfigError: the file cannot be read or made.
        TierBrokenError: a read failed.
    """
    fio = shutil.which("fio")
    if fio is None:
        setting.progress("fio is not on the PATH: our own figures only")
    with _file(setting) as path:
        for workload in WORKLOADS:
            setting.progress(f"io {workload.label} x {workload.depth}: {setting.repetitions} repetitions")
            _measure(results, workload, path, fio=fio, setting=setting)


def _measure(results: Results, workload: Workload, path: Path, *, fio: str | None, setting: Setting) -> None:
    try:
        descriptor, is_direct = direct_file(path, os.O_RDONLY)
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}; choose another --file", field="file") from error
    try:
        size_bytes = os.lseek(descriptor, 0, os.SEEK_END)
        if size_bytes < workload.io_bytes:
            message = f"{path} has {describe_size(size_bytes)}; choose one of 4 GiB or more"
            raise ConfigError(message, field="file")
        if not is_direct:
            setting.progress(f"{path}: its file system refuses direct I/O, so this measures the page cache")
        buffer = huge_buffer(workload.buffer_bytes)
        room = (buffer.data_ptr(), buffer.numel())
        chance = np.random.default_rng(workload.io_bytes)
        # Whatever fails, no read is in flight any more when the buffer goes.
        with contextlib.closing(IoEngine.open([descriptor], depth=workload.depth, buffers=[room])) as engine:
            if engine.backend != "io_uring" or not engine.fixed_buffers:
                why = engine.fallback_reason or engine.buffers_reason
                setting.progress(f"io: {engine.backend}, fixed buffers: {engine.fixed_buffers} ({why})")

            def ours() -> float:
                starts_N = chance.integers(0, size_bytes // workload.io_bytes, OFFSETS, dtype=np.uint64)
                offsets_N = starts_N * np.uint64(workload.io_bytes)
                return read_bandwidth(
                    engine, offsets_N, io_bytes=workload.io_bytes, buffer=room, seconds=setting.seconds
                )

            contestants: dict[str, Callable[[], float]] = {"ours": ours}
            if fio is not None:
                command = _fio_command(fio, path, workload, size_bytes=size_bytes, setting=setting)
                contestants["fio"] = lambda: _fio(command)
            ours()
            rounds = Rounds.run(contestants, repetitions=setting.repetitions)
    finally:
        os.close(descriptor)
    name = f"io.read_{workload.label}"
    results.put(f"{name}.gb_per_s", rounds.median("ours") / 1e9)
    if fio is not None:
        results.put(f"{name}.fio_gb_per_s", rounds.median("fio") / 1e9)
        results.put(f"{name}.vs_fio", rounds.ratio("ours", "fio"))


def _fio_command(fio: str, path: Path, workload: Workload, *, size_bytes: int, setting: Setting) -> list[str]:
    return [
        fio,
        "--name=read",
        f"--filename={path}",
        f"--size={size_bytes // workload.io_bytes * workload.io_bytes}",
        "--rw=randread",
        "--readonly",
        "--randrepeat=0",
        f"--bs={workload.io_bytes}",
        f"--iodepth={workload.depth}",
        "--ioengine=io_uring",
        "--direct=1",
        "--fixedbufs",
        "--registerfiles",
        "--time_based",
        f"--runtime={round(setting.seconds * 1000)}ms",
        "--output-format=json",
    ]


def _fio(command: list[str]) -> float:
    """Bytes per second, by fio's own clock."""
    environment = os.environ | FIO_ENVIRONMENT
    done = subprocess.run(command, check=False, capture_output=True, text=True, env=environment)
    if done.returncode != 0:
        message = f"fio failed: {(done.stderr or done.stdout).strip()}; mend it, or take it off the PATH"
        raise ConfigError(message, field="file")
    return float(json.loads(done.stdout[done.stdout.index("{") :])["jobs"][0]["read"]["bw_bytes"])


@contextlib.contextmanager
def _file(setting: Setting) -> Iterator[Path]:
    """The file to be read."""
    if setting.file is not None:
        yield setting.file
        return
    try:
        handle, name = tempfile.mkstemp(prefix="h3-bench-io-", dir=setting.folder)
    except OSError as error:
        message = f"cannot write to {setting.folder}: {error.strerror}; choose another --folder"
        raise ConfigError(message, field="folder") from error
    os.close(handle)
    path = Path(name)
    try:
        setting.progress(f"io: writing {describe_size(setting.size_bytes)} to {path}")
        _fill(path, setting.size_bytes)
        yield path
    finally:
        path.unlink(missing_ok=True)


def _fill(path: Path, size_bytes: int) -> None:
    """Random bytes, past the page cache; no two MiB alike, so that no device can do with fewer."""
    chunk_bytes = 16 * MIB
    buffer = huge_buffer(chunk_bytes)
    bytes_N = buffer.numpy()
    bytes_N[:] = np.random.default_rng(1).integers(0, 256, chunk_bytes, dtype=np.uint8)
    descriptor, _ = direct_file(path, os.O_RDWR)
    engine = IoEngine.open([descriptor], depth=16)
    ops_N = np.zeros(chunk_bytes // MIB, dtype=OP_DTYPE)
    starts_N = np.arange(ops_N.size, dtype=np.uint64) * np.uint64(MIB)
    ops_N["kind"], ops_N["size"], ops_N["address"] = WRITE, MIB, starts_N + np.uint64(buffer.data_ptr())
    flush = np.zeros(1, dtype=OP_DTYPE)
    flush["kind"] = FLUSH
    try:
        for chunk in range(size_bytes // chunk_bytes):
            bytes_N.view(np.uint64)[:: MIB // 8] = np.arange(ops_N.size) + chunk * ops_N.size
            ops_N["offset"] = starts_N + np.uint64(chunk * chunk_bytes)
            _finish(engine, ops_N, path)
        _finish(engine, flush, path)
    finally:
        engine.close()
        os.close(descriptor)


def _finish(engine: IoEngine, ops_N: np.ndarray[tuple[int], np.dtype[np.void]], path: Path) -> None:
    engine.submit(ops_N)
    engine.wait(600 * NS_PER_S, results=ops_N.size)
    for result in engine.poll():
        if int(result["status"]) != OK:
            raise ConfigError(f"cannot write {path}: {describe(result)}; choose another --folder", field="folder")
