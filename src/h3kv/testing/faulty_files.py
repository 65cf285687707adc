"""An engine that reads and writes files in place, and breaks what it is told to.

What it may do to us
- fail an operation, once or from then on, with an errno, after writing all, a part or nothing of it (a torn write);
- flip a bit in what was read or written;
- crash: stop doing anything, and leave of the writes that were not flushed all, none, or any sectors of them.

What it may not do: lose a write that was flushed, or change bytes that nobody wrote.
"""

from __future__ import annotations

import ctypes
import errno
import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Literal

import numpy as np
from numpy.typing import NDArray

from h3kv.tiers.cold.ops import aligned_memory
from h3kv.tiers.cold.record import SECTOR_BYTES
from h3kv.tiers.cold.seam import crc32c
from h3kv.tiers.io import CHECKSUM_MISMATCH, END_OF_FILE, ERROR, FLUSH, OK, OP_DTYPE, READ, RESULT_DTYPE, WRITE

DEVICE_SECTOR_BYTES: Final = 512
"""The least that a device writes whole."""

Mode = Literal["error", "torn", "flip", "crash"]


class CrashError(BaseException):
    """The machine stopped. Like `KeyboardInterrupt`, nothing that is tested may catch it."""


@dataclass(slots=True)
class FaultPlan:
    """Which operation breaks, and how. Shared by all engines of one life of a store, so that it counts through."""

    number: int | None = None
    """The operation that breaks, counted from 1; None: none does."""
    mode: Mode = "error"
    for_ever: bool = False
    """Whether every later operation of its kind breaks too; `error` only."""
    error: int = errno.EIO
    kinds: frozenset[int] = frozenset({READ, WRITE, FLUSH})
    """Which kinds are counted and broken."""
    kept: Literal["none", "all", "some"] = "none"
    """What a crash leaves of the writes that were not flushed."""
    seed: int = 0
    """Decides which sectors `some` means."""
    done: int = 0
    """Operations counted so far."""

    def breaks(self, kind: int) -> bool:
        """Count one operation; whether it breaks."""
        if kind not in self.kinds:
            return False
        self.done += 1
        if self.number is None:
            return False
        return self.done == self.number or (self.for_ever and self.done > self.number)


class FaultyFiles:
    """Satisfies the cold store's `Engine`.

    Args:
        files: open descriptors; an operation names one by its index.
        plan: what breaks.
    """

    backend = "faulty"

    def __init__(self, files: Sequence[int], plan: FaultPlan) -> None:
        self._files = list(files)
        self._plan = plan
        self._results: list[tuple[int, int, int, int, int, int]] = []
        # What writes since the last flush overwrote, oldest first: (file, offset, before, after).
        self._unflushed: list[tuple[int, int, bytes, bytes]] = []
        self._has_crashed = False

    def submit(self, ops_N: NDArray[np.void]) -> None:
        """Do them all now; their ends come from `poll`."""
        assert ops_N.dtype == OP_DTYPE
        for op in ops_N:
            if self._has_crashed:
                raise CrashError
            status, error, page = self._do(op)
            self._results.append((int(op["tag"]), status, error, page, 0, 0))

    def poll(self) -> NDArray[np.void]:
        """Ends since the last call."""
        results_N = np.array(self._results, dtype=RESULT_DTYPE)
        self._results.clear()
        return results_N

    def wait(self, timeout_ns: int, *, results: int = 1) -> None:
        """Everything has ended already."""

    def cancel_all(self) -> None:
        """Nothing is in flight."""

    def close(self) -> None:
        """Nothing to give back: the descriptors are the caller's."""

    def _do(self, op: np.void) -> tuple[int, int, int]:
        kind, file = int(op["kind"]), self._files[int(op["file"])]
        broken = self._plan.breaks(kind)
        if broken and self._plan.mode == "crash":
            self._crash(op)
        if broken and self._plan.mode == "error":
            return ERROR, self._plan.error, 0
        if kind == FLUSH:
            os.fdatasync(file)
            self._unflushed.clear()
            return OK, 0, 0
        memory = (ctypes.c_char * int(op["size"])).from_address(int(op["address"]))
        if kind == READ:
            return self._read(op, file, memory, flip=broken)
        self._write(
            op, file, memory, flip=broken and self._plan.mode == "flip", torn=self._plan.mode == "torn" and broken
        )
        return (ERROR, self._plan.error, 0) if broken and self._plan.mode == "torn" else (OK, 0, 0)

    def _read(self, op: np.void, file: int, memory: ctypes.Array[ctypes.c_char], *, flip: bool) -> tuple[int, int, int]:
        if os.preadv(file, [memory], int(op["offset"])) < len(memory):
            return END_OF_FILE, 0, 0
        if flip:
            memory[len(memory) // 2] = bytes([memory[len(memory) // 2][0] ^ 1])
        for page, (start, end) in enumerate(_pages(op)):
            if crc32c(memory.raw[start:end]) != _crcs(op)[page]:
                return CHECKSUM_MISMATCH, 0, page
        return OK, 0, 0

    def _write(self, op: np.void, file: int, memory: ctypes.Array[ctypes.c_char], *, flip: bool, torn: bool) -> None:
        data = bytearray(memory.raw)
        for page, (start, end) in enumerate(_pages(op)):
            _crcs(op)[page] = crc32c(data[start:end])
        if flip:
            data[len(data) // 2] ^= 1
        if torn:
            data = data[: len(data) // 2 // DEVICE_SECTOR_BYTES * DEVICE_SECTOR_BYTES]
        self._put(file, int(op["offset"]), bytes(data))

    def _put(self, file: int, offset: int, data: bytes) -> None:
        before = _read_aligned(file, offset, len(data))
        _write_aligned(file, offset, data)
        self._unflushed.append((file, offset, before, data))

    def _crash(self, op: np.void) -> None:
        """Undo what was not flushed, but for what the plan keeps, and stop."""
        self._has_crashed = True
        for file, offset, before, _ in reversed(self._unflushed):
            _write_aligned(file, offset, before)
        if int(op["kind"]) == WRITE:
            memory = (ctypes.c_char * int(op["size"])).from_address(int(op["address"]))
            self._unflushed.append((self._files[int(op["file"])], int(op["offset"]), b"", memory.raw))
        rng = np.random.default_rng([self._plan.seed, self._plan.done])
        for file, offset, _, after in self._unflushed if self._plan.kept != "none" else ():
            for start in range(0, len(after), SECTOR_BYTES):
                if self._plan.kept == "all" or rng.random() < 0.5:
                    _write_aligned(file, offset + start, after[start : start + SECTOR_BYTES])
        raise CrashError


def _pages(op: np.void) -> list[tuple[int, int]]:
    """Start and end of each page with a checksum."""
    if not int(op["crcs"]):
        return []
    size, page = int(op["size"]), int(op["page_bytes"])
    return [(start, min(start + page, size)) for start in range(0, size, page)]


def _crcs(op: np.void) -> ctypes.Array[ctypes.c_uint32]:
    return (ctypes.c_uint32 * len(_pages(op))).from_address(int(op["crcs"]))


def _read_aligned(file: int, offset: int, size: int) -> bytes:
    memory = _memory(size)
    os.preadv(file, [memory], offset)
    return bytes(memory)


def _write_aligned(file: int, offset: int, data: bytes) -> None:
    memory = _memory(len(data))
    memory[:] = data
    os.pwritev(file, [memory], offset)


def _memory(size: int) -> memoryview:
    return memoryview(aligned_memory(size))[:size]
