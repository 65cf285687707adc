"""A file, memory and ops between the two, for tests of I/O."""

from __future__ import annotations

import mmap
import os
from pathlib import Path
from typing import Final

import numpy as np
from numpy.typing import NDArray

from h3kv.core.units import NS_PER_S
from h3kv.tiers.io import OP_DTYPE, WRITE, IoEngine, direct_file

WAIT_NS: Final = 60 * NS_PER_S
"""A test that waits so long has failed."""


class IoFile:
    """A file of random bytes that are known, opened for direct I/O where possible, and memory of twice its size.

    The first half of the memory holds the file's bytes, the second half zeros.
    """

    def __init__(self, path: Path, size_bytes: int, *, seed: int = 0) -> None:
        self.path = path
        self.size_bytes = size_bytes
        self.bytes_N: NDArray[np.uint8] = np.random.default_rng(seed).integers(0, 256, size_bytes, dtype=np.uint8)
        path.write_bytes(self.bytes_N.tobytes())
        self.descriptor, self.is_direct = direct_file(path, os.O_RDWR)
        self.memory_N: NDArray[np.uint8] = np.frombuffer(mmap.mmap(-1, 2 * size_bytes), dtype=np.uint8)
        self.memory_N[:size_bytes] = self.bytes_N

    @property
    def address(self) -> int:
        """Of the memory's first byte; page-aligned."""
        return int(self.memory_N.ctypes.data)

    @property
    def buffer(self) -> tuple[int, int]:
        """All of the memory, to be registered."""
        return self.address, self.memory_N.size

    @property
    def read_N(self) -> NDArray[np.uint8]:
        """The second half of the memory, where reads of `op` put their bytes."""
        return self.memory_N[self.size_bytes :]

    def op(self, kind: int, offset: int = 0, size: int = 0, *, tag: int = 0, deadline_ms: int = 0) -> NDArray[np.void]:
        """One op, OP_DTYPE [1]: a write out of the first half of the memory, a read into the second, same place."""
        op_N = np.zeros(1, dtype=OP_DTYPE)
        start = self.address + offset + (0 if kind == WRITE else self.size_bytes)
        op_N["kind"], op_N["offset"], op_N["size"], op_N["address"] = kind, offset, size, start
        op_N["tag"], op_N["deadline_ms"] = tag, deadline_ms
        return op_N

    def close(self) -> None:
        """Close the descriptor."""
        os.close(self.descriptor)


def run(engine: IoEngine, *ops: NDArray[np.void]) -> NDArray[np.void]:
    """Submit ops together, wait for all of them, and give their results, RESULT_DTYPE [N]."""
    ops_N = np.concatenate(ops)
    engine.submit(ops_N)
    engine.wait(WAIT_NS, results=ops_N.size)
    results_N = engine.poll()
    assert results_N.size == ops_N.size, f"{results_N.size} of {ops_N.size} ops ended: {engine.statistics()}"
    return results_N
