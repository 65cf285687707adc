"""What one access to HOST memory costs now, and how much that varies: `access_ns` and its jitter.

A sample is a few batches of 64 dependent reads of cache lines drawn at random, timed batch by batch. With the batches
of the last samples, sorted, and the lowest and highest twentieth of them left out:

    mean     of the batch means that are left, in ns
    jitter   their standard deviation (of the population), in ns

What is left out are batches that an interrupt hit, or that found all in a cache. At 64 reads of 100 to 300 ns, a
sample of 16 batches takes 0.1 to 0.3 ms: once a second, that is at most 0.03 % of a core.
"""

from __future__ import annotations

import ctypes
import statistics
from collections import deque
from dataclasses import dataclass
from typing import Final

from h3kv import _native

CACHE_LINE_BYTES: Final = 64
BUFFER_BYTES: Final = 64 << 20
"""Larger than the caches of a core."""
BATCHES: Final = 16
"""Of a sample."""
WINDOW_SAMPLES: Final = 30
TRIMMED: Final = 20
"""One in so many batches is left out at either end."""


@dataclass(frozen=True, slots=True)
class AccessStatistics:
    """The window of samples, as the module says."""

    mean_ns: float
    jitter_ns: float
    batches: int
    """That the numbers come from, those left out included."""


class AccessProbe:
    """Measures when it is told to. It has no thread; one thread at a time may use it.

    Args:
        memory: what is read, some part of HOST that is in use: reads of memory that nobody wrote cost something else.
            A buffer of its own where None. It is only read, and kept for as long as the probe lives.
        window_samples: how many samples the statistics cover.
        seed: of the places that are read.
    """

    def __init__(
        self, memory: memoryview | None = None, *, window_samples: int = WINDOW_SAMPLES, seed: int = 0
    ) -> None:
        view = memoryview(bytearray(b"\x01") * BUFFER_BYTES) if memory is None else memory
        assert view.nbytes >= CACHE_LINE_BYTES + 7, f"{view.nbytes} bytes are too few to probe"
        self._held = (ctypes.c_char * view.nbytes).from_buffer(view)
        address = ctypes.addressof(self._held)
        self._address = -(-address // 8) * 8
        self._size_bytes = view.nbytes - (self._address - address)
        self._seed = seed
        self._batches_ns: deque[float] = deque(maxlen=window_samples * BATCHES)

    def sample(self) -> None:
        """Measure once."""
        self._batches_ns.extend(_native.probe_access(self._address, self._size_bytes, BATCHES, self._seed))
        self._seed += 1

    def statistics(self) -> AccessStatistics | None:
        """Mean and jitter over the window; None before the first sample."""
        return summarize(list(self._batches_ns)) if self._batches_ns else None


def summarize(batches_ns: list[float]) -> AccessStatistics:
    """Mean and jitter of batch means, of which there is at least one."""
    left_out = len(batches_ns) // TRIMMED
    kept = sorted(batches_ns)[left_out : len(batches_ns) - left_out]
    return AccessStatistics(statistics.fmean(kept), statistics.pstdev(kept), len(batches_ns))
