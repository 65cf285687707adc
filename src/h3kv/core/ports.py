"""Seams between the parts. Each is small enough to fake, and each has one conformance suite.

What `h3kv.policy` decides needs no class here: it comes as functions of plain values. Where slabs lie is not decided
yet: there is one tier, and a policy of placement comes with the others.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from h3kv.core.types import (
    BlockKey,
    BlockLocation,
    Completion,
    Move,
    SegmentId,
    SlabKey,
    SlotHandle,
    StoreStatistics,
    Tier,
)


class BlockStore(Protocol):
    """One tier of slabs.

    Two-phase: a slab is visible to `lookup` only after the completion of its move was polled. No call waits for a
    device. Not thread-safe: one owner calls it.
    """

    tier: Tier

    def reserve(self, blocks: Sequence[int]) -> list[SlotHandle]:
        """Take room for slabs of so many blocks each, all or nothing. Each size is rounded up to an extent class.

        Raises:
            TierFullError: not all of them fit; nothing was taken.
            TierClosedError: after `close`.
        """
        ...

    def address(self, handle: SlotHandle) -> int:
        """Address of the slot's first byte, valid until `release`. Raises StaleHandleError."""
        ...

    def submit(self, moves: Sequence[Move]) -> None:
        """Start moves into reserved slots.

        Raises:
            SlabBusyError: a move of that key is in flight, or the key is visible already. Nothing was started.
            StaleHandleError: a target was released. Nothing was started.
        """
        ...

    def poll(self) -> list[Completion]:
        """Moves that ended since the last call, oldest first; each successful one becomes visible now."""
        ...

    def lookup(self, key: SlabKey) -> SlotHandle | None:
        """The slot of a visible slab."""
        ...

    def release(self, handles: Sequence[SlotHandle]) -> None:
        """Give slots back. Their slabs vanish from `lookup`, their handles go stale. Raises StaleHandleError."""
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
