"""Single pages of slabs that lie on NVMe, kept in slots of HOST for the steps that take them again.

    slot of HOST   | unit | unit | unit | ... | unit |   a unit is a page, or the 4 KiB that hold a smaller one
    table          (segment, layer, unit of the slab) -> slot: native, `page_slots`

What a layer wants and is not there is read at once, all of it, before what is read ahead for the layers behind it.
Shapes: N pages that a layer wants, S slots.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final, TypeVar

import numpy as np
from numpy.typing import NDArray

from h3kv.core.errors import ConfigError, SlabCorruptError, SlabUnavailableError, TierError, TierFullError
from h3kv.core.layout import CacheLayout
from h3kv.core.limits import CLUSTER_TOKENS
from h3kv.core.ports import Clock, Telemetry
from h3kv.core.types import SegmentId, SlabKey, SlotHandle, Tier
from h3kv.core.units import NS_PER_S, describe_size
from h3kv.engine.interrupts import check_interrupt, interrupts_deferred
from h3kv.engine.page_reads import UnitReader, UnitStore
from h3kv.engine.page_slots import (
    FAILED,
    READY,
    PageCounts,
    PageSlots,
    Pins,
    Reads,
    carve,
    slots_of,
    unit_bytes,
)
from h3kv.engine.page_waits import PageWaits
from h3kv.engine.predictor import Pace, Predictor
from h3kv.engine.stream import ViewableStore
from h3kv.telemetry import names

_T = TypeVar("_T")

RUN_BYTES: Final = 64 << 10
"""Longest row of neighbours that is read at once: a longer read takes longer, and two of them run side by side."""

FIRST_AHEAD_BYTES: Final = 128 << 10
"""Read ahead in a gap before anything was measured, and enough to measure the speed of the store with."""

AHEAD_SHARE: Final = 4
"""Part of the slots that are read into ahead, at most: the others stay for what is taken again."""


@dataclass(frozen=True, slots=True)
class PageCacheStatistics:
    """Totals since the start."""

    capacity_bytes: int
    units: PageCounts
    waits: PageWaits
    """Of each page that was taken."""
    takes: int
    stall_ns: int
    """Time in which a layer waited."""
    absent: int
    """Pages that best effort did without."""
    bytes_per_s: float | None
    """Speed of reads that were waited for; None: none was."""


class PageCache:
    """What the sequences of a pool share; each takes through a `page_lane.PageLane` of its own. Not thread-safe.

    Args:
        store: where slabs are read from.
        host: holds the slots.
        slots: room for slabs of full segments, at least one; the caller releases them after `drain`.
        layout: of the model's KV, in a clustered encoding.
        locate: a slab's slot in the store; None where it has none now.
        clock: bounds waiting, and measures gaps.
        telemetry: receives totals, see `report`.
        wait_ns: longest time that pages may take.
        reads_ahead: whether anything is read before it is taken.
    """

    def __init__(
        self,
        store: UnitStore,
        host: ViewableStore,
        slots: Sequence[SlotHandle],
        *,
        layout: CacheLayout,
        locate: Callable[[SlabKey], SlotHandle | None],
        clock: Clock,
        telemetry: Telemetry,
        wait_ns: int = 30 * NS_PER_S,
        reads_ahead: bool = True,
    ) -> None:
        assert layout.slab.page.encoding.is_clustered, "pages are chosen in clustered encodings alone"
        self._layout = layout
        self._page_bytes = layout.slab.page.size_bytes
        self._unit_bytes = unit_bytes(layout.slab)
        self._addresses_S = carve([host.address(slot) for slot in slots], layout.slab)
        run_units = max(RUN_BYTES // self._unit_bytes, 1)
        self._slots = PageSlots(
            self._addresses_S, unit_bytes=self._unit_bytes, page_bytes=self._page_bytes, run_units=run_units
        )
        self._reader = UnitReader(store, locate, layers=layout.layers)
        self._clock = clock
        self._telemetry = telemetry
        self._wait_ns = wait_ns
        self._reads_ahead = reads_ahead
        self._pace = Pace(layout.layers, first_bytes=FIRST_AHEAD_BYTES)
        self._waits = PageWaits()
        # By slot: why the last read into it failed.
        self._failures: dict[int, Exception] = {}
        # Reads of the current taking that have not ended, and what their tags begin with.
        self._own_reads = self._own_ticket = 0
        # The layer whose taking ended last, and when.
        self._gap: tuple[int, int] | None = None
        self._takes = self._stall_ns = self._absent = 0
        self._reported, self._reported_stall_ns = self._slots.counts(), 0

    @property
    def capacity_bytes(self) -> int:
        """Bytes of all slots."""
        return len(self._addresses_S) * self._unit_bytes

    def check_budget(self, budget_tokens: int) -> None:
        """See that two layers of one step fit: one that is attended to while the next one is read.

        Raises:
            ConfigError: they do not.
        """
        units = 2 * self._layout.slab.kv_heads * -(-budget_tokens // CLUSTER_TOKENS)
        if units > len(self._addresses_S):
            raise ConfigError(
                f"a budget of {budget_tokens} tokens takes up to {units} pages of {self._unit_bytes} bytes in two "
                f"layers ({self._layout.slab.kv_heads} KV heads x {budget_tokens} / {CLUSTER_TOKENS} clusters x 2 = "
                f"{describe_size(units * self._unit_bytes)}), but the page cache has "
                f"{describe_size(self.capacity_bytes)}: raise host.kv_bytes, or lower the budget",
                field="host.kv_bytes",
            )

    def forget(self, segment: SegmentId) -> None:
        """A segment left, was lost, or lies in HOST now: its pages are of no use. What is taken stays readable."""
        with interrupts_deferred():
            self._slots.forget(segment)
            self._reader.forget(segment)

    def drain(self) -> None:
        """Wait until nothing is written into the slots any more, as long as a page may take."""
        deadline_ns = self._clock.now_ns() + self._wait_ns
        self._poll()
        while self._slots.in_flight and self._clock.now_ns() < deadline_ns:
            self._reader.wait(NS_PER_S, reads=1)
            self._poll()

    def statistics(self) -> PageCacheStatistics:
        """Totals now."""
        return PageCacheStatistics(
            capacity_bytes=self.capacity_bytes,
            units=self._slots.counts(),
            waits=self._waits.copy(),
            takes=self._takes,
            stall_ns=self._stall_ns,
            absent=self._absent,
            bytes_per_s=self._pace.bytes_per_s,
        )

    def report(self) -> None:
        """Pass on what was counted since the last time: between steps."""
        now, before = self._slots.counts(), self._reported
        self._reported = now
        taken = {"ready": now.hits - before.hits, "late": now.late - before.late, "missed": now.misses - before.misses}
        ahead = {
            "started": now.read_ahead - before.read_ahead,
            "useful": now.useful - before.useful,
            "wasted": now.wasted - before.wasted,
        }
        for outcome, units in taken.items():
            self._telemetry.count(names.PAGE_CACHE_TAKEN, units, outcome=outcome)
        for outcome, units in ahead.items():
            self._telemetry.count(names.PAGE_CACHE_READ_AHEAD, units, outcome=outcome)
        stall_ns, self._reported_stall_ns = self._stall_ns - self._reported_stall_ns, self._stall_ns
        self._telemetry.count(names.PAGE_CACHE_STALL, stall_ns / NS_PER_S)
        self._telemetry.gauge(names.PAGE_CACHE_CAPACITY, self.capacity_bytes)

    def check_integrity(self) -> None:
        """Assert that every slot has one use."""
        self._slots.check_integrity()

    @property
    def reads_ahead(self) -> bool:
        """Whether anything is read before it is taken."""
        return self._reads_ahead

    def keys(self, layer: int, wanted_N: NDArray[np.void]) -> NDArray[np.void]:
        """The units that hold pages (WANTED_DTYPE): KEY_DTYPE."""
        return self._slots.keys(layer, wanted_N)

    def pin_present(self, layer: int, wanted_N: NDArray[np.void], pins: Pins) -> bool:
        """Pin pages (WANTED_DTYPE) if all of them are there; or change nothing. An interrupt loses no pin."""
        if not self._slots.take_present(layer, wanted_N, pins):
            return False
        self._takes += 1
        self._end_gap()
        self._waits.add(0, len(wanted_N))
        return True

    def pin(self, layer: int, wanted_N: NDArray[np.void], pins: Pins, *, patience_ns: int | None) -> None:
        """Pin pages so that all are there, or with patience those that came in time.

        After an error they are pinned still: the caller gives them back.
        """
        self._takes += 1
        self._end_gap()
        deadline_ns = self._clock.now_ns() + self._wait_ns
        key, units = SlabKey(SegmentId(int(wanted_N["segment"][0])), layer), len(wanted_N)
        taking = self._make_room(lambda: self._slots.take_pages(layer, wanted_N, pins), deadline_ns, key, units=units)
        slots_N, loading = pins.slots_N, taking.loading
        self._waits.add(0, len(slots_N) - loading)
        self._start(layer, taking.reads)
        if patience_ns is None:
            if self._wait_for(slots_N, deadline_ns, loading=loading, missing=taking.missing) or self._failures:
                self._try_again(layer, pins, deadline_ns)
                self._check_all(layer, pins)
            return
        important_N = slots_N[wanted_N["reserved"] == 0]
        deadline_ns = min(deadline_ns, self._clock.now_ns() + patience_ns)
        # For these alone, one by one: others come meanwhile, and say nothing of the pace.
        self._own_reads, awaited = 1, self._slots.loading(important_N)
        self._waits.add(0, loading - awaited)
        self._wait_for(important_N, deadline_ns, loading=awaited, missing=0)
        self._check_damage(slots_N)

    def give_back(self, pins: Pins) -> None:
        """Take back what is pinned. An interrupt loses no pin, and a second time does nothing."""
        self._slots.give_back_pins(pins)

    def give_back_absent(self, pins: Pins) -> NDArray[np.bool_]:
        """Take back what does not hold its page, whole and checked, and count it as absent: which ones these are."""
        is_absent_N: NDArray[np.bool_] = self._slots.states(pins.slots_N) != READY
        if is_absent_N.any():
            absent_N = pins.slots_N[is_absent_N]
            pins.keep(~is_absent_N)
            self._slots.give_back(absent_N)
            self._absent += len(absent_N)
        return is_absent_N

    def begin_gap(self, layer: int) -> None:
        """A layer has what it took."""
        self._gap = (layer, self._clock.now_ns())

    @property
    def units(self) -> int:
        """Slots."""
        return len(self._addresses_S)

    @property
    def uses(self) -> int:
        """See `PageSlots.uses`."""
        return self._slots.uses

    @property
    def kept_since(self) -> int:
        """What was taken since the table counted so many uses is still there, unless half of the slots are pinned."""
        return self._slots.uses - len(self._addresses_S) // 2

    def read_ahead(self, layer: int, predictor: Predictor) -> None:
        """After a layer's taking: read what is expected of the next ones, as far as the gap carries."""
        if not self._reads_ahead:
            return
        carried = min(self._pace.carries_bytes(layer) // self._unit_bytes, len(self._addresses_S) // AHEAD_SHARE)
        units = carried - self._slots.in_flight
        for following, keys_N in predictor.ahead(layer, kept_since=self.kept_since):
            if units <= 0:
                return
            dealt_with = self._slots.present(keys_N)
            if dealt_with < len(keys_N):
                # What was handed out has to be read: no interrupt comes in between.
                with interrupts_deferred():
                    reads, more = self._slots.read_ahead(keys_N[dealt_with:], units=units)
                    self._reader.start(following, reads)
                units -= reads.units(self._unit_bytes)
                dealt_with += more
            predictor.drop(following, dealt_with)
            if dealt_with < len(keys_N):
                return

    def _make_room(self, take: Callable[[], _T | None], deadline_ns: int, key: SlabKey, *, units: int) -> _T:
        """Take units as soon as there is room for those that are missing.

        Raises:
            TierFullError: the cache is smaller than what one layer wants.
            SlabUnavailableError: what is being read does not come, so that no room comes free in time.
        """
        self._poll()
        while (taken := take()) is None:
            check_interrupt()
            if self._slots.in_flight and self._clock.now_ns() > deadline_ns:
                message = f"pages do not come within {self._wait_ns / NS_PER_S:.0f} s: they are computed again"
                raise SlabUnavailableError(message, key=key)
            if not self._slots.in_flight:
                raise TierFullError(
                    f"a layer wants {units} pages of {self._unit_bytes} bytes at once, but the page cache has "
                    f"{describe_size(self.capacity_bytes)}: raise host.kv_bytes, or lower the retrieval budget",
                    tier=Tier.HOST,
                    needed_bytes=units * self._unit_bytes,
                    free_bytes=self._slots.counts().evictable * self._unit_bytes,
                )
            self._reader.wait(NS_PER_S, reads=1)
            self._poll()
        self._failures.clear()
        return taken

    def _start(self, layer: int, reads: Reads) -> None:
        self._own_reads, self._own_ticket = len(reads), reads.ticket
        self._reader.start(layer, reads)

    def _wait_for(self, slots_N: NDArray[np.uint32], deadline_ns: int, *, loading: int, missing: int) -> int:
        """Wait until nothing is read into slots any more, or the time is over. Returns how many still are read into."""
        if not loading:
            return 0
        start_ns = now_ns = self._clock.now_ns()
        while loading and now_ns < deadline_ns:
            check_interrupt()
            # All of its own reads at once, which costs one wake-up; what was read ahead and is late, one by one.
            self._reader.wait(min(deadline_ns - now_ns, NS_PER_S), reads=max(self._own_reads, 1))
            self._poll()
            still_loading = self._slots.loading(slots_N)
            now_ns = self._clock.now_ns()
            self._waits.add(now_ns - start_ns, loading - still_loading)
            loading = still_loading
        self._waits.add(now_ns - start_ns, loading)
        self._stall_ns += now_ns - start_ns
        if missing and not loading:
            self._pace.note_speed(missing * self._unit_bytes, now_ns - start_ns)
        return loading

    def _try_again(self, layer: int, pins: Pins, deadline_ns: int) -> None:
        """Read once more what could not be read: perhaps that was long ago, when nobody waited for it.

        A page lies at the same place of its new slot.
        """
        slots_N = pins.slots_N
        self._check_damage(slots_N)
        failed_N = np.flatnonzero(self._slots.states(slots_N) == FAILED)
        if not len(failed_N):
            return
        keys_N, old_N = pins.keys_N[failed_N], slots_N[failed_N]
        key = SlabKey(SegmentId(int(keys_N["segment"][0])), layer)
        again_N, reads = self._make_room(lambda: self._slots.take(keys_N), deadline_ns, key, units=len(keys_N))
        slots_N[failed_N] = again_N
        pins.addresses_N[failed_N] += self._addresses_S[again_N] - self._addresses_S[old_N]
        self._slots.give_back(old_N)
        self._start(layer, reads)
        missing = reads.units(self._unit_bytes)
        self._wait_for(again_N, deadline_ns, loading=self._slots.loading(again_N), missing=missing)

    def _check_all(self, layer: int, pins: Pins) -> None:
        states_N = self._slots.states(pins.slots_N)
        if (states_N == READY).all():
            return
        self._check_damage(pins.slots_N)
        at = int(np.flatnonzero(states_N != READY)[0])
        key = SlabKey(SegmentId(int(pins.keys_N["segment"][at])), layer)
        error = self._failures.get(int(pins.slots_N[at])) if states_N[at] == FAILED else None
        if error is None:
            message = f"a page of {key} did not come within {self._wait_ns / NS_PER_S:.0f} s: it is computed again"
            raise SlabUnavailableError(message, key=key)
        if isinstance(error, TierError):
            raise SlabUnavailableError(f"{key} cannot be read ({error}): it is computed again", key=key) from error
        raise error

    def _check_damage(self, slots_N: NDArray[np.uint32]) -> None:
        """Raise SlabCorruptError where a page is damaged."""
        if self._failures:
            wanted = set(slots_N.tolist())
            for slot, error in self._failures.items():
                if slot in wanted and isinstance(error, SlabCorruptError):
                    raise error

    def _end_gap(self) -> None:
        if self._gap is not None:
            layer, start_ns = self._gap
            self._pace.note_gap(layer, self._clock.now_ns() - start_ns)
            self._gap = None

    def _poll(self) -> None:
        """Take notice of reads that ended."""
        if not self._slots.in_flight:
            return
        ended = self._reader.ended()
        self._own_reads -= self._slots.end(ended.good_R, well=True, ticket=self._own_ticket)
        for tag, error in ended.failed:
            self._own_reads -= self._slots.end(np.array([tag], dtype=np.uint64), well=False, ticket=self._own_ticket)
            self._failures.update(dict.fromkeys(slots_of(tag), error))
