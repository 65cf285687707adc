"""A store that breaks chosen moves and calls of another one.

What it may do to us: end a move with an error instead of making its slab visible, or refuse a call that then did
nothing; any number of them, once each.
What it may not do: lose a completion, break a move after its slab was visible, or change bytes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from typing import Literal

from h3kv.core.errors import TierError
from h3kv.core.ports import BlockStore
from h3kv.core.types import Completion, Move, SlabKey, SlotHandle, StoreStatistics

Call = Literal["reserve", "address", "submit"]
"""What can be refused."""


class InjectedFaultError(TierError):
    """A fault that a test asked for."""

    reason = "INJECTED_FAULT"
    injected = True


class FaultyStore:
    """Satisfies `BlockStore` by passing everything on to `inner`, but for the moves that it breaks.

    Args:
        inner: the store that works.
        broken_moves: numbers of the moves that end with InjectedFaultError, counted from 1 over all calls of `submit`.
        broken_calls: numbers of the calls that are refused, counted from 1 for each method.
        refusal: what a broken call raises; InjectedFaultError where None.
    """

    def __init__(
        self,
        inner: BlockStore,
        *,
        broken_moves: Collection[int] = (),
        broken_calls: Mapping[Call, Collection[int]] | None = None,
        refusal: BaseException | None = None,
    ) -> None:
        self.tier = inner.tier
        self._inner = inner
        self._broken_moves = frozenset(broken_moves)
        self._broken_calls = {} if broken_calls is None else dict(broken_calls)
        self._refusal = refusal
        self._calls: Counter[Call] = Counter()
        self._submitted = 0
        self._failed: list[Completion] = []

    def reserve(self, blocks: Sequence[int]) -> list[SlotHandle]:
        """See `BlockStore.reserve`."""
        self._count("reserve")
        return self._inner.reserve(blocks)

    def address(self, handle: SlotHandle) -> int:
        """See `BlockStore.address`."""
        self._count("address")
        return self._inner.address(handle)

    def submit(self, moves: Sequence[Move]) -> None:
        """See `BlockStore.submit`."""
        self._count("submit")
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

    def _count(self, call: Call) -> None:
        self._calls[call] += 1
        if self._calls[call] in self._broken_calls.get(call, ()):
            fault = InjectedFaultError(f"{call} number {self._calls[call]} was refused on purpose", tier=self.tier)
            raise fault if self._refusal is None else self._refusal
