"""Reads of units out of the cold store: where each slab lies there, and what came of the reads.

Shapes: R reads, S slabs of one layer.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from h3kv import _native
from h3kv.core.errors import H3Error, SlabBusyError, SlabUnavailableError, StaleHandleError
from h3kv.core.ports import EndedReads
from h3kv.core.types import SegmentId, SlabKey, SlotHandle
from h3kv.engine.page_slots import Reads


class UnitStore(Protocol):
    """The part of `PersistentStore` that single units are read with; see there."""

    def read_units(self, slabs: Sequence[SlotHandle], reads: memoryview) -> None:
        """See `PersistentStore.read_units`."""
        ...

    def poll_units(self) -> EndedReads:
        """See `PersistentStore.poll_units`."""
        ...

    def wait_units(self, timeout_ns: int, *, reads: int = 1) -> None:
        """See `PersistentStore.wait_units`."""
        ...

    def is_wrapped(self, handle: SlotHandle) -> bool:
        """See `PersistentStore.is_wrapped`."""
        ...


@dataclass(slots=True)
class _LayerSlabs:
    """Slabs of one layer that were read from, in the order of their segments' numbers. The tuple stays the same object
    while nothing changes: the store knows it again.
    """

    segments_S: NDArray[np.uint64] = field(default_factory=lambda: np.zeros(0, dtype=np.uint64))
    handles_S: tuple[SlotHandle, ...] = ()

    def find(self, reads: Reads) -> bool:
        """Fill in which slab each read is of, if all of them are known."""
        return _native.find_slabs(
            reads.reads_R.ctypes.data,
            reads.segments_R.ctypes.data,
            len(reads),
            self.segments_S.ctypes.data,
            len(self.segments_S),
        )


@dataclass(frozen=True, slots=True)
class Ended:
    """What came of reads."""

    good_R: NDArray[np.uint64]
    """Tags of those that brought their bytes."""
    failed: list[tuple[int, Exception]]
    """Tags of the others, and why."""


class UnitReader:
    """Starts reads and collects their ends.

    Args:
        store: where slabs lie.
        locate: a slab's slot there; None where it has none now.
        layers: of the model.
    """

    def __init__(self, store: UnitStore, locate: Callable[[SlabKey], SlotHandle | None], *, layers: int) -> None:
        self._store = store
        self._locate = locate
        self._slabs_L = [_LayerSlabs() for _ in range(layers)]
        self._refused: list[tuple[int, Exception]] = []

    def start(self, layer: int, reads: Reads) -> None:
        """Begin to read units of one layer. What cannot be begun ends with an error."""
        if not len(reads):
            return
        try:
            try:
                self._submit(layer, reads)
            except (StaleHandleError, SlabBusyError):
                # Slabs left since they were looked up, perhaps not those that are wanted.
                self._slabs_L[layer] = _LayerSlabs()
                self._submit(layer, reads)
        except H3Error as error:
            self._refused += [(tag, error) for tag in reads.reads_R["tag"].tolist()]

    def ended(self) -> Ended:
        """What ended since the last call."""
        ended = self._store.poll_units()
        failed, self._refused = self._refused, []
        failed += [(read.tag, read.error) for read in ended.failed]
        return Ended(np.frombuffer(ended.tags, dtype=np.uint64), failed)

    def wait(self, timeout_ns: int, *, reads: int) -> None:
        """Return when so many reads have ended, or all, or the time is over."""
        if not self._refused:
            self._store.wait_units(timeout_ns, reads=reads)

    def forget(self, segment: SegmentId) -> None:
        """A segment's slabs are not read any more."""
        for slabs in self._slabs_L:
            at = int(np.searchsorted(slabs.segments_S, np.uint64(segment)))
            if at < len(slabs.segments_S) and slabs.segments_S[at] == segment:
                slabs.segments_S = np.delete(slabs.segments_S, at)
                slabs.handles_S = slabs.handles_S[:at] + slabs.handles_S[at + 1 :]

    def _submit(self, layer: int, reads: Reads) -> None:
        slabs = self._slabs_L[layer]
        if not slabs.find(reads):
            self._add(layer, slabs, np.unique(reads.segments_R))
            assert slabs.find(reads)
        self._store.read_units(slabs.handles_S, reads.reads_R.data)

    def _add(self, layer: int, slabs: _LayerSlabs, segments_S: NDArray[np.uint64]) -> None:
        """Look the slabs of segments up that are new here."""
        known = dict(zip(slabs.segments_S.tolist(), slabs.handles_S, strict=True))
        for number in segments_S.tolist():
            if number not in known:
                known[number] = self._handle(SlabKey(SegmentId(number), layer))
        slabs.segments_S = np.array(sorted(known), dtype=np.uint64)
        slabs.handles_S = tuple(known[number] for number in sorted(known))

    def _handle(self, slab: SlabKey) -> SlotHandle:
        handle = self._locate(slab)
        if handle is None:
            raise SlabUnavailableError(f"slab {slab} is gone: it is computed again", key=slab)
        if self._store.is_wrapped(handle):
            message = f"slab {slab} is compressed as a whole, so that no page of it can be read alone: compute it again"
            raise SlabUnavailableError(message, key=slab)
        return handle
