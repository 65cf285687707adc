"""Seams between the parts. Each is small enough to fake, and each has one conformance suite.

What `h3kv.policy` decides needs no class here: it comes as functions of plain values, `policy.placement.step` first.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from h3kv.core.types import (
    BlockKey,
    BlockLocation,
    Completion,
    Fetch,
    Move,
    SegmentId,
    SlabKey,
    SlotHandle,
    StoredSegment,
    StoreStatistics,
    Tier,
)


class BlockStore(Protocol):
    """One tier of slabs.

    Two-phase: a slab is visible to `lookup` only after the completion of its move was polled. No call but `wait` waits
    for a device. Not thread-safe: one owner calls it.
    """

    tier: Tier

    def reserve(self, blocks: Sequence[int]) -> list[SlotHandle]:
        """Take room for slabs of so many blocks each, all or nothing. Each size is rounded up to an extent class.

        A store that outlives the process keeps whole segments: there the sizes come segment by segment, the same one
        for each layer.

        Raises:
            TierFullError: not all of them fit; nothing was taken.
            TierBrokenError: the store takes nothing more.
            TierClosedError: after `close`.
        """
        ...

    def submit(self, moves: Sequence[Move | Fetch]) -> None:
        """Start moves into reserved slots, and fetches out of visible ones.

        Raises:
            SlabBusyError: a move of that key is in flight, or the key is visible already. Nothing was started.
            StaleHandleError: a target or source was released. Nothing was started.
            TierBrokenError: the store takes no more moves. Nothing was started; fetches alone may still pass.
        """
        ...

    def poll(self) -> list[Completion]:
        """Moves and fetches that ended since the last call, the oldest of each kind first; each successful move becomes
        visible now.
        """
        ...

    def wait(self, timeout_ns: int) -> None:
        """Return as soon as `poll` would give something, or nothing is in flight, or the time is over."""
        ...

    def lookup(self, key: SlabKey) -> SlotHandle | None:
        """The slot of a visible slab."""
        ...

    def release(self, handles: Sequence[SlotHandle]) -> None:
        """Give slots back. Their slabs vanish from `lookup`, their handles go stale.

        Room that a fetch or move in flight still uses is handed out again only after that has ended.

        Raises:
            StaleHandleError: a handle was released before. Nothing was given back.
        """
        ...

    def erase(self, handles: Sequence[SlotHandle]) -> None:
        """Give slots back as `release` does; zeros lie over what they held before their room is handed out again.

        In memory that is done when this returns. A store that outlives the process does it as soon as nothing reads or
        writes there, and its `erasing` tells when.

        Raises:
            StaleHandleError: as `release`.
        """
        ...

    def statistics(self) -> StoreStatistics:
        """Occupancy and totals now."""
        ...

    def check_integrity(self) -> None:
        """Assert that every slot is free or owned exactly once."""
        ...

    def close(self) -> None:
        """Release everything. Calling it again does nothing."""
        ...


class AddressableStore(BlockStore, Protocol):
    """A tier in memory that this process can reach: slabs are read and written where they lie."""

    def address(self, handle: SlotHandle) -> int:
        """Address of the slot's first byte, valid until `release`. Raises StaleHandleError."""
        ...


@dataclass(frozen=True, slots=True)
class FailedRead:
    """A read of `PersistentStore.read_units` that brought nothing; its target holds anything."""

    tag: int
    source: SlotHandle
    """Of the slab."""
    error: Exception
    """SlabCorruptError: the segment is given up. TierBrokenError: it cannot be read now."""


@dataclass(frozen=True, slots=True)
class EndedReads:
    """Reads of `PersistentStore.read_units` that ended."""

    tags: memoryview
    """u64: of those that brought what was written, in the order in which they ended."""
    failed: tuple[FailedRead, ...]


class PersistentStore(BlockStore, Protocol):
    """A tier that outlives the process. Its moves carry labels."""

    def restore(self, number: Callable[[], SegmentId]) -> list[StoredSegment]:
        """Segments kept from earlier processes, oldest first, visible under the numbers that the callback gives.

        Called once, before anything is reserved. A stored segment's owner releases it like any other.
        """
        ...

    def read_units(self, slabs: Sequence[SlotHandle], reads: memoryview) -> None:
        """Start many small reads of visible slabs, straight into memory, each checked on its own. Never waits.

        One read, 32 bytes; a contiguous array of them is what `reads` views:

            0        8           16       20         24       28           32
            +--------+-----------+--------+----------+--------+------------+
            | tag    | target    | slab   | offset   | size   | is_ahead   |
            | u64    | address   | u32    | u32      | u32    | u32        |
            +--------+-----------+--------+----------+--------+------------+

        `tag` comes back from `poll_units`. `slab` is an index into `slabs`; `offset` and `size` are bytes in that slab,
        whole checked units. `target` is a multiple of 4 KiB; the memory stays the store's until the read has ended.
        Reads whose `is_ahead` is 1 are begun after those whose is 0, also later ones.

        Args:
            slabs: each slab once; none is wrapped, see `is_wrapped`. The same tuple again costs nothing while no slab
                was released.
            reads: copied.

        Raises:
            SlabBusyError: a slab is not visible. Nothing was started.
            StaleHandleError: a slot was released. Nothing was started.
        """
        ...

    def poll_units(self) -> EndedReads:
        """Reads of `read_units` that ended since the last call."""
        ...

    def wait_units(self, timeout_ns: int, *, reads: int = 1) -> None:
        """Return as soon as `poll_units` would give so many reads, or none is in flight, or the time is over."""
        ...

    def is_wrapped(self, handle: SlotHandle) -> bool:
        """Whether a slab can only be read whole: `read_units` refuses it. Raises StaleHandleError."""
        ...

    @property
    def erasing(self) -> int:
        """What was given to `erase` and may still lie there, in parts of any size; 0: nothing does.

        Zeros come first, then a flush, and only then the segment is forgotten: a process that ends in between finds it
        again by its keys, though no longer its bytes. Stays above 0 in a store that is degraded.
        """
        ...

    @property
    def is_degraded(self) -> bool:
        """Whether writing failed, so that the store takes no more moves. What it holds can still be fetched."""
        ...


class AttendCall(NamedTuple):
    """One attention over pages in main memory, as the native core takes it: addresses and numbers.

    `attend.hpp` says what each means; types and encoding are the numbers of `h3::DType` and `h3::Encoding`.
    """

    q: int
    out: int
    lse: int
    pages: int
    pages_stride: int
    q_dtype: int
    out_dtype: int
    page_dtype: int
    encoding: int
    tokens: int
    heads: int
    kv_heads: int
    head_dim: int
    page_count: int
    position: int
    scale: float
    threads: int
    page_first: int
    page_last: int
    state: int


class BatchCall(NamedTuple):
    """The newest tokens of several sequences, which are written into their pages and attended to all of them.

    `attend_batch.hpp` says what each means; types and encoding are the numbers of `h3::DType` and `h3::Encoding`.
    """

    q: int
    k: int
    v: int
    out: int
    rows: int
    sequences: int
    heads: int
    kv_heads: int
    head_dim: int
    dtype: int
    encoding: int
    scale: float
    threads: int


class Offload(Protocol):
    """Who computes attention over pages in main memory, and searches their index: threads of this process, or other
    processes besides.

    The numbers are the same, bit for bit, whoever computes them.
    """

    def attend(self, call: AttendCall) -> None:
        """Attend; `out` and `lse` are written when this returns. It waits for nobody beyond a bound."""
        ...

    def attend_batch(self, call: BatchCall) -> None:
        """The same for one token of each of several sequences: every one gets the numbers that it gets alone."""
        ...

    def scanner(self) -> object | None:
        """What the native core gives the scan of an index to, for a retrieval that begins now; None: to nobody."""
        ...


class Directory(Protocol):
    """Where the KV of a block is. Answers are hints until the segment is pinned."""

    def find(self, keys: Sequence[BlockKey]) -> list[BlockLocation]:
        """Locations of the longest known prefix of `keys`, in order."""
        ...

    def publish(self, keys: Sequence[BlockKey], segment: SegmentId) -> None:
        """Say that `segment` holds these blocks, first block first. A key that is known already keeps its place."""
        ...

    def withdraw(self, keys: Sequence[BlockKey], segment: SegmentId) -> None:
        """Forget these blocks as far as `segment` is where they are."""
        ...


class Clock(Protocol):
    """Time, handed in so that tests and simulations own it."""

    def now_ns(self) -> int:
        """Monotonic nanoseconds."""
        ...


class Telemetry(Protocol):
    """Where measurements go. Names are declared in `h3kv.telemetry.names`."""

    def count(self, name: str, amount: float = 1.0, **labels: str) -> None:
        """Add to a counter."""
        ...

    def gauge(self, name: str, value: float, **labels: str) -> None:
        """Set a gauge."""
        ...

    def observe(self, name: str, value: float, **labels: str) -> None:
        """Add one observation to a histogram."""
        ...
