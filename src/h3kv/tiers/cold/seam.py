"""What the cold store asks of an engine that reads and writes files: `tiers.io.IoEngine`, or one that breaks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from h3kv import _native


class Engine(Protocol):
    """The part of `IoEngine` that the cold store uses; see there."""

    @property
    def backend(self) -> str:
        """Which kind runs."""
        ...

    def submit(self, ops_N: NDArray[np.void]) -> None:
        """Start ops of `io.OP_DTYPE`; never waits."""
        ...

    def poll(self) -> NDArray[np.void]:
        """Results of `io.RESULT_DTYPE` since the last call."""
        ...

    def wait(self, timeout_ns: int, *, results: int = 1) -> None:
        """Return when so many results can be polled, or all that are still to come, or the time is over."""
        ...

    def cancel_all(self) -> None:
        """End what can be ended."""
        ...

    def close(self) -> None:
        """Afterwards no memory is touched."""
        ...


EngineFactory = Callable[[Sequence[int]], Engine]
"""Makes the engine for a list of open descriptors."""


def crc32c(data: bytes | bytearray) -> int:
    """Checksum of some bytes, as the engine computes it."""
    return _native.crc32c(np.frombuffer(data, dtype=np.uint8).ctypes.data, len(data))
