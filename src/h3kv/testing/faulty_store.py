"""A store that breaks chosen moves, fetches and calls of another one.

What it may do to us: end a move with an error instead of making its slab visible; end a fetch with an error, or with
bytes that are not those that were written, which it says; end a read of `read_units` with an error; refuse a call that
then did nothing. Any number of them, once each or from one on for ever.
What it may not do: lose a completion, break a move after its slab was visible, or change bytes and keep silent.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Literal, cast

import numpy as np

from h3kv.core.errors import SlabCorruptError, TierError
from h3kv.core.ports import AddressableStore, BlockStore, EndedReads, FailedRead, PersistentStore
from h3kv.core.types import Completion, Fetch, Move, SegmentId, SlabKey, SlotHandle, StoredSegment, StoreStatistics
from h3kv.tiers.cold.unit_reads import UNIT_READ_DTYPE

Call = Literal["reserve", "address", "submit"]
"""What can be refused."""


class InjectedFaultError(TierError):
    """A fault that a test asked for."""

    reason = "INJECTED_FAULT"
    injected = True


class InjectedCorruptionError(SlabCorruptError):
    """Bytes that a test asked to be changed on their way."""

    injected = True


def ever_from(number: int) -> range:
    """This number and all after it: something breaks and stays broken."""
    return range(number, sys.maxsize)


class FaultyStore:
    """Passes everything on to `inner`, but for what it breaks. Satisfies the port that `inner` satisfies.

    Numbers count from 1: moves and fetches over all calls of `submit`, each kind for itself, calls for each method.

    Args:
        inner: the store that works.
        broken_moves: numbers of the moves that end with InjectedFaultError.
        broken_fetches: numbers of the fetches that end with InjectedFaultError; their target stays as it is.
        corrupt_fetches: numbers of the fetches that bring one flipped bit and InjectedCorruptionError.
        broken_units: numbers of the reads of `read_units` that end with InjectedFaultError.
        broken_calls: numbers of the calls that are refused.
        refusal: what a broken call raises; InjectedFaultError where None.
    """

    def __init__(
        self,
        inner: BlockStore,
        *,
        broken_moves: Collection[int] = (),
        broken_fetches: Collection[int] = (),
        corrupt_fetches: Collection[int] = (),
        broken_units: Collection[int] = (),
        broken_calls: Mapping[Call, Collection[int]] | None = None,
        refusal: BaseException | None = None,
    ) -> None:
        self.tier = inner.tier
        self._inner = inner
        self._broken_moves = broken_moves
        self._broken_fetches = broken_fetches
        self._corrupt_fetches = corrupt_fetches
        self._broken_units = broken_units
        self._units = 0
        self._failed_units: list[FailedRead] = []
        self._broken_calls = {} if broken_calls is None else dict(broken_calls)
        self._refusal = refusal
        self._calls: Counter[Call] = Counter()
        self._moves = 0
        self._fetches = 0
        self._failed: list[Completion] = []
        self._corrupt: list[Fetch] = []

    def reserve(self, blocks: Sequence[int]) -> list[SlotHandle]:
        """See `BlockStore.reserve`."""
        self._count("reserve")
        return self._inner.reserve(blocks)

    def address(self, handle: SlotHandle) -> int:
        """See `AddressableStore.address`, which `inner` must satisfy."""
        self._count("address")
        return cast(AddressableStore, self._inner).address(handle)

    def submit(self, moves: Sequence[Move | Fetch]) -> None:
        """See `BlockStore.submit`."""
        self._count("submit")
        passed: list[Move | Fetch] = []
        broken: list[Move | Fetch] = []
        corrupt: list[Fetch] = []
        count, fetch_count = self._moves, self._fetches
        for work in moves:
            if isinstance(work, Move):
                count += 1
                (broken if count in self._broken_moves else passed).append(work)
                continue
            fetch_count += 1
            (broken if fetch_count in self._broken_fetches else passed).append(work)
            if fetch_count in self._corrupt_fetches:
                corrupt.append(work)
        self._inner.submit(passed)
        self._moves, self._fetches = count, fetch_count
        self._corrupt += corrupt
        for work in broken:
            name = "move" if isinstance(work, Move) else "fetch"
            fault = InjectedFaultError(f"{name} of {work.key} was broken on purpose", tier=self.tier)
            self._failed.append(Completion(work, fault))

    def poll(self) -> list[Completion]:
        """See `BlockStore.poll`."""
        failed, self._failed = self._failed, []
        return [*failed, *(self._spoil(completion) for completion in self._inner.poll())]

    def wait(self, timeout_ns: int) -> None:
        """See `BlockStore.wait`."""
        if not self._failed:
            self._inner.wait(timeout_ns)

    def lookup(self, key: SlabKey) -> SlotHandle | None:
        """See `BlockStore.lookup`."""
        return self._inner.lookup(key)

    def release(self, handles: Sequence[SlotHandle]) -> None:
        """See `BlockStore.release`."""
        self._inner.release(handles)

    def erase(self, handles: Sequence[SlotHandle]) -> None:
        """See `BlockStore.erase`."""
        self._inner.erase(handles)

    @property
    def erasing(self) -> int:
        """See `PersistentStore.erasing`, which `inner` must satisfy."""
        return self._persistent.erasing

    def restore(self, number: Callable[[], SegmentId]) -> list[StoredSegment]:
        """See `PersistentStore.restore`, which `inner` must satisfy."""
        return self._persistent.restore(number)

    def read_units(self, slabs: Sequence[SlotHandle], reads: memoryview) -> None:
        """See `PersistentStore.read_units`, which `inner` must satisfy."""
        reads_N = np.frombuffer(reads, dtype=UNIT_READ_DTYPE)
        numbers = range(self._units + 1, self._units + 1 + reads_N.size)
        broken_N = np.array([number in self._broken_units for number in numbers], dtype=np.bool_)
        self._persistent.read_units(slabs, reads_N[~broken_N].data)
        self._units += reads_N.size
        for read in reads_N[broken_N]:
            source = slabs[int(read["slab"])]
            fault = InjectedFaultError(f"a read of slot {source.slot} was broken on purpose", tier=self.tier)
            self._failed_units.append(FailedRead(int(read["tag"]), source, fault))

    def poll_units(self) -> EndedReads:
        """See `PersistentStore.poll_units`, which `inner` must satisfy."""
        failed, self._failed_units = tuple(self._failed_units), []
        ended = self._persistent.poll_units()
        return EndedReads(ended.tags, (*failed, *ended.failed))

    def wait_units(self, timeout_ns: int, *, reads: int = 1) -> None:
        """See `PersistentStore.wait_units`, which `inner` must satisfy."""
        missing = reads - len(self._failed_units)
        if missing > 0:
            self._persistent.wait_units(timeout_ns, reads=missing)

    def is_wrapped(self, handle: SlotHandle) -> bool:
        """See `PersistentStore.is_wrapped`, which `inner` must satisfy."""
        return self._persistent.is_wrapped(handle)

    @property
    def is_degraded(self) -> bool:
        """See `PersistentStore.is_degraded`, which `inner` must satisfy."""
        return self._persistent.is_degraded

    def statistics(self) -> StoreStatistics:
        """See `BlockStore.statistics`."""
        return self._inner.statistics()

    def check_integrity(self) -> None:
        """See `BlockStore.check_integrity`."""
        self._inner.check_integrity()

    def close(self) -> None:
        """See `BlockStore.close`."""
        self._inner.close()

    @property
    def _persistent(self) -> PersistentStore:
        return cast(PersistentStore, self._inner)

    def _spoil(self, completion: Completion) -> Completion:
        fetch = next((each for each in self._corrupt if each is completion.move), None)
        if fetch is None:
            return completion
        self._corrupt = [each for each in self._corrupt if each is not fetch]
        if completion.error is not None:
            return completion
        fetch.target[fetch.target.nbytes // 2] ^= 0x10
        fault = InjectedCorruptionError(f"a bit of slab {fetch.key} was flipped on purpose", key=fetch.key)
        return Completion(fetch, fault)

    def _count(self, call: Call) -> None:
        self._calls[call] += 1
        if self._calls[call] in self._broken_calls.get(call, ()):
            fault = InjectedFaultError(f"{call} number {self._calls[call]} was refused on purpose", tier=self.tier)
            raise fault if self._refusal is None else self._refusal
