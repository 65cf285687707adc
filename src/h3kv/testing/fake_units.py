"""A store of slabs in a dict that gives single units of them: obvious, late, and broken where a test says so."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from h3kv.core.errors import StaleHandleError
from h3kv.core.ports import EndedReads, FailedRead
from h3kv.core.types import SlotHandle
from h3kv.tiers.cold.unit_reads import UNIT_READ_DTYPE


@dataclass(frozen=True, slots=True)
class StartedRead:
    """One read as it was asked for."""

    source: SlotHandle
    tag: int
    target: int
    offset: int
    size: int
    is_ahead: bool


@dataclass(slots=True)
class FakeUnits:
    """Satisfies `engine.page_reads.UnitStore`. Only polls pass time.

    A broken read leaves half of its target overwritten.
    """

    contents: dict[SlotHandle, bytes]
    latency_polls: int = 1
    """How many polls a read takes; a test may change it at any time for what is in flight too."""
    broken: dict[SlotHandle, Exception] = field(default_factory=dict)
    """What reads of a slab end with."""
    broken_reads: dict[int, Exception] = field(default_factory=dict)
    """What single reads end with, by their number from 1."""
    wrapped: set[SlotHandle] = field(default_factory=set)
    started: list[StartedRead] = field(default_factory=list)
    """Every read so far."""
    _in_flight: list[tuple[int, int, StartedRead]] = field(default_factory=list)
    _polls: int = 0

    def read_units(self, slabs: Sequence[SlotHandle], reads: memoryview) -> None:
        """See `PersistentStore.read_units`."""
        for handle in slabs:
            if handle not in self.contents:
                raise StaleHandleError(f"slot {handle.slot} was released: look the slab up again")
            assert handle not in self.wrapped, "a wrapped slab is read whole"
        for row in np.frombuffer(reads, dtype=UNIT_READ_DTYPE).tolist():
            tag, target, slab, offset, size, is_ahead = row
            assert offset >= 0 and offset + size <= len(self.contents[slabs[slab]])
            read = StartedRead(slabs[slab], tag, target, offset, size, bool(is_ahead))
            self.started.append(read)
            self._in_flight.append((self._polls, len(self.started), read))

    def poll_units(self) -> EndedReads:
        """See `PersistentStore.poll_units`."""
        self._polls += 1
        due = [each for each in self._in_flight if each[0] + self.latency_polls <= self._polls]
        self._in_flight = [each for each in self._in_flight if each[0] + self.latency_polls > self._polls]
        tags, failed = [], []
        for _, number, read in due:
            error = self.broken_reads.get(number) or self.broken.get(read.source)
            size = read.size if error is None else read.size // 2
            data = self.contents[read.source] if read.source in self.contents else bytes(read.offset + read.size)
            ctypes.memmove(read.target, data[read.offset : read.offset + size], size)
            if error is None:
                tags.append(read.tag)
            else:
                failed.append(FailedRead(read.tag, read.source, error))
        return EndedReads(np.array(tags, dtype=np.uint64).data, tuple(failed))

    def wait_units(self, timeout_ns: int, *, reads: int = 1) -> None:
        """See `PersistentStore.wait_units`. Returns at once."""
        assert timeout_ns >= 0 and reads >= 1

    def is_wrapped(self, handle: SlotHandle) -> bool:
        """See `PersistentStore.is_wrapped`."""
        return handle in self.wrapped
