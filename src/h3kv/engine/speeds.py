"""How fast this process computes prompts and reads the cold store, as it did lately.

    chunk of prefill   (start, tokens, duration)               kept unless a step of it waited for the cold store
    wait for slabs     (reads, bytes that came, duration)      the disk was what held attention up

Reading is measured only while something waits for it: what comes in beside computing costs nothing, and a disk that
keeps nobody waiting is fast enough. What was read long ago is forgotten, so that a disk which was slow for a while is
tried again.
"""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

from h3kv.core.limits import BLOCK_TOKENS
from h3kv.core.ports import Clock
from h3kv.core.units import NS_PER_MS, NS_PER_S
from h3kv.policy.load_or_recompute import PrefillSpeed, ReadSpeed, fit_line

SAMPLES_MAX: Final = 32
"""Newest ones that count: 496 pairs, in which a handful of odd ones do not matter."""

POSITION_SPREAD: Final = 4.0 * BLOCK_TOKENS
"""Chunks nearer to each other differ by chance more than by depth."""

READS_SPREAD: Final = 1 / (1 << 20)
"""Reads per byte: samples must differ by a read in 1 MiB to tell what a read costs beside its bytes."""

WAIT_SAMPLE_NS: Final = 2 * NS_PER_MS
"""Waits are added up to so much for one sample: single ones are as long as chance has it."""

WAIT_SHARE_MAX: Final = 0.02
"""A chunk that waited for more of its time says nothing about computing."""

READS_KEPT_NS: Final = 300 * NS_PER_S
"""For how long a sample of reading counts."""


@dataclass(slots=True)
class _Reads:
    """What came while attention waited."""

    count: int = 0
    size_bytes: int = 0
    duration_ns: int = 0


class Speeds:
    """Takes measurements and gives what they say. Not thread-safe: the engine's thread calls it.

    Args:
        clock: by which waits are measured and samples age.
    """

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._chunks: deque[tuple[float, float]] = deque(maxlen=SAMPLES_MAX)
        self._reads: deque[tuple[int, float, float]] = deque(maxlen=SAMPLES_MAX)
        """When, reads per byte, ns per byte."""
        self._came = _Reads()
        self._is_waiting = False
        self._chunk: object = None
        self._is_stepping = False
        self._waited_ns = 0
        """Of the chunk that is being computed, in its own steps."""
        self._prefill: PrefillSpeed | None = None

    def prefilled(self, start: int, tokens: int, duration_ns: int) -> None:
        """A chunk of a prompt was computed.

        Args:
            start: tokens before it.
            tokens: of the chunk. Few of them mostly cost what any step costs, and do not count.
            duration_ns: that the chunk itself took, without what ran between its parts.
        """
        waited_ns, self._waited_ns = self._waited_ns, 0
        if tokens >= BLOCK_TOKENS and duration_ns > 0 and waited_ns <= WAIT_SHARE_MAX * duration_ns:
            self._chunks.append((start + tokens / 2, duration_ns / tokens))
            self._prefill = None

    @contextlib.contextmanager
    def stepping(self, chunk: object) -> Iterator[None]:
        """Around a step of a chunk. What waits between its steps are others.

        Args:
            chunk: the same object for all its steps, up to the one that calls `prefilled`.
        """
        if chunk is not self._chunk:
            self._chunk, self._waited_ns = chunk, 0
        self._is_stepping = True
        try:
            yield
        finally:
            self._is_stepping = False

    @contextlib.contextmanager
    def waiting(self) -> Iterator[None]:
        """Around a wait of attention for the cold store, in which `fetched` may be called."""
        began_ns, self._is_waiting = self._clock.now_ns(), True
        try:
            yield
        finally:
            self._is_waiting = False
            duration_ns = self._clock.now_ns() - began_ns
            if self._is_stepping:
                self._waited_ns += duration_ns
            self._came.duration_ns += duration_ns
            if self._came.duration_ns >= WAIT_SAMPLE_NS and self._came.size_bytes:
                self._keep(self._came)
                self._came = _Reads()

    def fetched(self, size_bytes: int) -> None:
        """A read of the cold store ended well: it counts where attention waits."""
        if self._is_waiting and size_bytes > 0:
            self._came.count += 1
            self._came.size_bytes += size_bytes

    def prefill(self) -> PrefillSpeed | None:
        """Of prompts; None before the first chunk was measured."""
        if self._prefill is None:
            line = fit_line(self._chunks, spread_min=POSITION_SPREAD)
            self._prefill = None if line is None else PrefillSpeed(line)
        return self._prefill

    def reading(self) -> ReadSpeed | None:
        """Of the cold store; None where nothing waited for it lately."""
        since_ns = self._clock.now_ns() - READS_KEPT_NS
        while self._reads and self._reads[0][0] < since_ns:
            self._reads.popleft()
        line = fit_line([(x, y) for _, x, y in self._reads], spread_min=READS_SPREAD)
        return None if line is None else ReadSpeed(line)

    def _keep(self, came: _Reads) -> None:
        sample = (self._clock.now_ns(), came.count / came.size_bytes, came.duration_ns / came.size_bytes)
        self._reads.append(sample)
