"""Slabs on their way from the disk into memory, each page checked."""

from __future__ import annotations

import mmap
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from h3kv.core.types import Fetch
from h3kv.tiers.cold.commit import Commits
from h3kv.tiers.cold.extents import Extent
from h3kv.tiers.cold.ops import Op, Outcome, address_of, aligned_memory
from h3kv.tiers.cold.record import SECTOR_BYTES
from h3kv.tiers.cold.volume import Volume
from h3kv.tiers.io import READ


@dataclass(slots=True, eq=False)
class _Pending:
    number: int
    fetch: Fetch
    extent: Extent
    copy: mmap.mmap | None
    """Where the bytes land first, if the target is not aligned."""
    fault: Outcome | None = None


class Fetches:
    """Starts reads and collects their ends."""

    def __init__(self, volume: Volume, commits: Commits, *, page_bytes: int) -> None:
        self._volume = volume
        self._commits = commits
        self._page_bytes = page_bytes
        self._started = 0
        self._ended: list[_Pending] = []
        self.read_bytes = 0
        """In total, by reads that brought what was written."""

    @property
    def has_ended(self) -> bool:
        """Whether `ended` would give something."""
        return bool(self._ended)

    def start(self, wanted: Sequence[tuple[Fetch, Extent, int]]) -> None:
        """Begin to read slabs: of each the extent and the layer."""
        reads = [self._read(fetch, extent, layer) for fetch, extent, layer in wanted]
        self._volume.ops.submit_each([read for read in reads if read is not None])

    def _read(self, fetch: Fetch, extent: Extent, layer: int) -> tuple[Op, Callable[[Outcome], None]] | None:
        """The op of one slab and what its end does; None where there is nothing to read."""
        self._started += 1
        extent.fetches += 1
        size = min(fetch.target.nbytes, extent.pages * self._page_bytes)
        if size == 0:
            self._ended.append(_Pending(self._started, fetch, extent, None))
            return None
        assert size % self._page_bytes == 0, "a fetch takes whole pages"
        address = address_of(fetch.target)
        copy = aligned_memory(size) if address % SECTOR_BYTES else None
        op = Op(
            kind=READ,
            offset=self._commits.slab_offset(extent, layer),
            address=address if copy is None else address_of(copy),
            size=size,
            crcs=self._commits.crcs_address(extent, layer),
            page_bytes=self._page_bytes,
            keep=(fetch.target, copy),
        )
        pending = _Pending(self._started, fetch, extent, copy)
        return op, lambda outcome: self._end(pending, outcome, size)

    def ended(self) -> list[tuple[Fetch, Extent, Outcome | None]]:
        """Reads that ended since the last call, in the order in which they began; each with its fault."""
        ended, self._ended = sorted(self._ended, key=lambda pending: pending.number), []
        for pending in ended:
            pending.extent.fetches -= 1
        return [(pending.fetch, pending.extent, pending.fault) for pending in ended]

    def _end(self, pending: _Pending, outcome: Outcome, size: int) -> None:
        if not outcome.is_good:
            pending.fault = outcome
        else:
            self.read_bytes += size
            if pending.copy is not None:
                pending.fetch.target.cast("B")[:size] = pending.copy[:size]
        self._ended.append(pending)
