"""A store that breaks chosen moves of another one.

What it may do to us: end a move with an error instead of making its slab visible, any number of them, once each.
What it may not do: lose a completion, break a move after its slab was visible, or change bytes.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from h3kv.core.errors import TierError
from h3kv.core.ports import BlockStore
from h3kv.core.types import Completion, Move, SlabKey, SlotHandle, StoreStatistics


class InjectedFaultError(TierError):
    """A fault that a test asked for."""

    reason = "INJECTED_FAULT"
    injected = True


class FaultyStore:
    """Satisfies `BlockStore` by passing everything on to `inner`, but for the moves that it breaks.

    Args:
        inner: the store that works.
        broken_moves: numbers of the moves that end with InjectedFaultError, counted from 1 over all calls of `submit`.
    """

    def __init__(self, inner: BlockStore, *, broken_moves: Collection[int] = ()) -> None:
        self.tier = inner.tier
        self._inner = inner
        self._broken_moves = frozenset(broken_moves)
        self._submitted = 0
        self._failed: list[Completion] = []

    def reserve(self, blocks: Sequence[int]) -> list[SlotHandle]:
        """See `BlockStore.reserve`."""
        return self._inner.reserve(blocks)

    def address(self, handle: SlotHandle) -> int:
        """See `BlockStore.address`."""
        return self._inner.address(handle)

    def shrink(self, handle: SlotHandle, blocks: int) -> SlotHandle:
        """See `BlockStore.shrink`."""
        return self._inner.shrink(handle, blocks)

    def submit(self, moves: Sequence[Move]) -> None:
        """See `BlockStore.submit`."""
        numbers = range(self._submitted + 1, self._submitted + 1 + len(moves))
        broken = [move for number, move in zip(numbers, moves, strict=True) if number in self._broken_moves]
        self._inner.submit([move for move in moves if move not in broken])
        self._submitted += len(moves)
        for move in broken:
            fault = InjectedFaultError(f"move of {move.key} was broken on purpose", tier=self.tier)
            self._failed.append(Completion(move, fault))

    def poll(self) -> list[Completion]:
        """See `BlockStore.poll`."""
        failed, self._failed = self._failed, []
        return [*failed, *self._inner.poll()]

    def lookup(self, key: SlabKey) -> SlotHandle | None:
        """See `BlockStore.lookup`."""
        return self._inner.lookup(key)

    def release(self, handles: Sequence[SlotHandle]) -> None:
        """See `BlockStore.release`."""
        self._inner.release(handles)

    def statistics(self) -> StoreStatistics:
        """See `BlockStore.statistics`."""
        return self._inner.statistics()

    def check_integrity(self) -> None:
        """See `BlockStore.check_integrity`."""
        self._inner.check_integrity()

    def close(self) -> None:
        """See `BlockStore.close`."""
        self._inner.close()
