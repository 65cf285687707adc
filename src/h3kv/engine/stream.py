"""Slabs that lie on NVMe, read into staging slots of HOST ahead of the attention that wants them.

    plan      (layer 0: A B C) (layer 1: A B C) ... (layer 29: A B C) and again from layer 0
    fetched              ^ taken      ^ fetched ahead, as far as there are staging slots

The plan of a step is its whole order of reading. While a sequence decodes, the next step reads the same slabs again, so
that reading goes on over the end of the plan: the first layers of the next step come in while this step ends.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final, Protocol

from h3kv.core.errors import H3Error, SlabCorruptError, SlabUnavailableError, TierError
from h3kv.core.limits import ATTEND_BATCH_PAGES
from h3kv.core.ports import Clock, PersistentStore
from h3kv.core.types import Completion, Fetch, SlabKey, SlotHandle
from h3kv.core.units import NS_PER_S
from h3kv.engine.interrupts import check_interrupt, interrupts_deferred
from h3kv.engine.speeds import Speeds


class ViewableStore(Protocol):
    """What the stream needs of the tier that holds the staging slots."""

    def address(self, handle: SlotHandle) -> int:
        """See `AddressableStore.address`."""
        ...

    def view(self, handle: SlotHandle) -> memoryview:
        """A slot's bytes, writable."""
        ...


SLOTS_MIN: Final = ATTEND_BATCH_PAGES
"""Attention reads pages in batches of four, and slabs of one page each may make up a batch: all are held together."""

FETCHES_MAX: Final = 16
"""Slabs on their way at a time: they fill a disk's bandwidth, more only wait for each other."""

FILL_SHARE: Final = 4
"""Fetches start when this part of the slots is free, so that many share the cost of starting."""


@dataclass(frozen=True, slots=True)
class Readable:
    """Where a slab can be had."""

    address: int | None
    """In memory already."""
    is_arriving: bool
    """On its way into memory."""
    handle: SlotHandle | None
    """In the cold store."""
    size_bytes: int
    """Of the slab."""


@dataclass(frozen=True, slots=True, eq=False)
class _Fetching:
    """A fetch under way. The fetch itself tells it from an earlier one of the same slab."""

    fetch: Fetch
    slot: SlotHandle


class SlabStream:
    """Satisfies `attention.paged.SlabSource`. Not thread-safe.

    Args:
        cold: where slabs are fetched from.
        host: holds the staging slots.
        slots: room for one slab of the largest class each, at least `SLOTS_MIN`; the caller releases them.
        locate: where a slab is now.
        poll: takes notice of what the cold store has ended, and passes ended fetches to `end_fetch`.
        clock: bounds waiting.
        wait_ns: longest time that a slab may take.
        speeds: are told of waits and of what came. None: of no interest.
    """

    def __init__(
        self,
        cold: PersistentStore,
        host: ViewableStore,
        slots: Sequence[SlotHandle],
        *,
        locate: Callable[[SlabKey], Readable],
        poll: Callable[[], None],
        clock: Clock,
        wait_ns: int = 30 * NS_PER_S,
        speeds: Speeds | None = None,
    ) -> None:
        assert len(slots) >= SLOTS_MIN, "attention waits for slabs that find no slot"
        self._cold = cold
        self._views = {slot: (host.address(slot), host.view(slot)) for slot in slots}
        self._free: deque[SlotHandle] = deque(slots)
        self._locate = locate
        self._poll = poll
        self._clock = clock
        self._wait_ns = wait_ns
        self._speeds = speeds or Speeds(clock)
        self._plan: list[SlabKey] = []
        self._next = 0
        self._repeats = True
        self._fetching: dict[SlabKey, _Fetching] = {}
        self._ready: dict[SlabKey, SlotHandle] = {}
        self._taken: dict[SlabKey, SlotHandle] = {}
        self._failed: dict[SlabKey, Exception] = {}
        # Of an abandoned plan: their slots are free when they end.
        self._orphans: list[_Fetching] = []
        self.bytes_fetched_total = 0

    def plan(self, slabs: Sequence[SlabKey], *, repeats: bool = True) -> None:
        """Read these slabs ahead, in this order. The same order again goes on where the last one ended.

        Args:
            slabs: of the next step.
            repeats: whether the step after it is expected to read them again.
        """
        self._repeats = repeats
        if list(slabs) != self._plan:
            self._abandon()
            self._plan = list(slabs)
            self._next = 0
        elif self._plan:
            # What was read beyond the end of the last step is the beginning of this one.
            self._next %= len(self._plan)
        self._fill()

    def take(self, slabs: Sequence[SlabKey]) -> list[int]:
        """See `SlabSource.take`."""
        addresses: list[int] = []
        try:
            with interrupts_deferred():
                self._poll()
                self._take_group(slabs, addresses)
                # The device has work while these are attended to.
                self._fill()
        except BaseException:
            self.give_back(slabs[: len(addresses)])
            raise
        return addresses

    def give_back(self, slabs: Sequence[SlabKey]) -> None:
        """See `SlabSource.give_back`."""
        with interrupts_deferred():
            for slab in slabs:
                slot = self._taken.pop(slab, None)
                if slot is not None:
                    self._free.append(slot)
            self._fill()

    def end_fetch(self, completion: Completion) -> bool:
        """Take notice of a fetch that ended. Returns whether it was one of this stream's."""
        orphan = next((one for one in self._orphans if one.fetch is completion.move), None)
        if orphan is not None:
            self._orphans.remove(orphan)
            self._free.append(orphan.slot)
            return True
        slab = completion.move.key
        fetching = self._fetching.get(slab)
        if fetching is None or fetching.fetch is not completion.move:
            return False
        del self._fetching[slab]
        if completion.error is None:
            self._ready[slab] = fetching.slot
            self.bytes_fetched_total += fetching.fetch.target.nbytes
        else:
            self._failed[slab] = completion.error
            self._free.append(fetching.slot)
        return True

    def drain(self) -> None:
        """Forget the plan and wait until nothing is written into the staging slots any more, as long as a slab may
        take.
        """
        self._plan = []
        self._abandon()
        deadline_ns = self._clock.now_ns() + self._wait_ns
        while self._orphans and self._clock.now_ns() < deadline_ns:
            self._cold.wait(deadline_ns - self._clock.now_ns())
            self._poll()

    def check_integrity(self) -> None:
        """Assert that every staging slot has one use."""
        reading = [one.slot for one in (*self._fetching.values(), *self._orphans)]
        used = [*reading, *self._ready.values(), *self._taken.values()]
        assert sorted(slot.slot for slot in [*used, *self._free]) == sorted(slot.slot for slot in self._views)

    def _take_group(self, slabs: Sequence[SlabKey], addresses: list[int]) -> None:
        """Append the addresses of the first slabs.

        A group at a time, since each taking and each attention over what was taken costs as much for one as for many;
        of what has come besides, half of the slots at most: the others are filled meanwhile.
        """
        group = max(len(self._views) // FILL_SHARE, 1)
        addresses.append(self._wait_for(slabs[0]))
        try:
            for slab in slabs[1:group]:
                if slab not in self._fetching and slab not in self._ready:
                    break
                addresses.append(self._wait_for(slab))
        except H3Error as error:
            # Its turn comes: it is the first one next time.
            self._failed[slabs[len(addresses)]] = error
            return
        for slab in slabs[len(addresses) : len(self._views) // 2]:
            address = self._take_ready(slab)
            if address is None:
                return
            addresses.append(address)

    def _wait_for(self, slab: SlabKey) -> int:
        deadline_ns = self._clock.now_ns() + self._wait_ns
        while True:
            address = self._try_take(slab)
            if address is not None:
                return address
            check_interrupt()
            left_ns = deadline_ns - self._clock.now_ns()
            if left_ns <= 0:
                message = f"slab {slab} did not come within {self._wait_ns / NS_PER_S:.0f} s: it is computed again"
                raise SlabUnavailableError(message, key=slab)
            with self._speeds.waiting():
                self._cold.wait(min(left_ns, NS_PER_S))
                self._poll()

    def _try_take(self, slab: SlabKey) -> int | None:
        """The address of a slab that is there. What is not there is on its way afterwards."""
        address = self._take_ready(slab)
        failure = self._failed.pop(slab, None)
        if address is not None or slab in self._fetching:
            return address
        if failure is not None:
            raise _lost(slab, failure) from failure
        found = self._locate(slab)
        if found.is_arriving:
            return None
        if found.handle is None:
            raise SlabUnavailableError(f"slab {slab} is gone: it is computed again", key=slab)
        if not self._free and self._ready:
            # Read ahead for a later time, the newest for the latest: this one is wanted now.
            self._free.append(self._ready.popitem()[1])
        if self._free:
            self._fetch([(slab, found.handle, found.size_bytes)])
            # Reading ahead goes on from here: it skips what it has, and takes up what was discarded.
            self._next = self._plan.index(slab) + 1 if slab in self._plan else self._next
        return None

    def _is_to_fetch(self, found: Readable) -> bool:
        return found.handle is not None and found.address is None and not found.is_arriving

    def _take_ready(self, slab: SlabKey) -> int | None:
        """The address of a slab that was fetched, or that came into memory by itself."""
        slot = self._ready.pop(slab, None)
        if slot is None:
            return None if slab in self._fetching else self._locate(slab).address
        self._taken[slab] = slot
        return self._views[slot][0]

    def _fill(self) -> None:
        """Start fetches of the plan, many at a time; on from its beginning where it repeats."""
        if len(self._free) < max(len(self._views) // FILL_SHARE, 1):
            return
        wanted: dict[SlabKey, tuple[SlabKey, SlotHandle, int]] = {}
        ahead = len(self._plan) if self._repeats else max(len(self._plan) - self._next, 0)
        for _ in range(ahead):
            slab = self._plan[self._next % len(self._plan)]
            if len(wanted) == len(self._free) or len(wanted) + len(self._fetching) >= FETCHES_MAX:
                break
            self._next += 1
            if slab in self._fetching or slab in self._ready or slab in self._taken or slab in wanted:
                continue
            found = self._locate(slab)
            if found.handle is not None and self._is_to_fetch(found):
                wanted[slab] = (slab, found.handle, found.size_bytes)
        self._fetch(list(wanted.values()))

    def _fetch(self, wanted: Sequence[tuple[SlabKey, SlotHandle, int]]) -> None:
        """Start fetches into free slots, of which there are enough."""
        started: list[_Fetching] = []
        for slab, handle, size_bytes in wanted:
            slot = self._free.popleft()
            started.append(_Fetching(Fetch(slab, handle, self._views[slot][1][:size_bytes]), slot))
        try:
            self._cold.submit([one.fetch for one in started])
        except H3Error as error:
            for one in started:
                self._free.append(one.slot)
                self._failed[one.fetch.key] = error
        else:
            self._fetching.update((one.fetch.key, one) for one in started)

    def _abandon(self) -> None:
        self._free.extend(self._ready.values())
        self._ready.clear()
        self._failed.clear()
        self._orphans.extend(self._fetching.values())
        self._fetching.clear()


def _lost(slab: SlabKey, error: Exception) -> Exception:
    """What taking a slab raises when fetching it ended so."""
    if isinstance(error, SlabCorruptError):
        return error
    if isinstance(error, TierError):
        return SlabUnavailableError(f"slab {slab} cannot be read ({error}): it is computed again", key=slab)
    return error
