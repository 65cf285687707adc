"""Carries out what the policy of placement decides, between steps.

    events of the table --> policy.placement.step --> Copy, Drop --> home and cold store --> completions --> events

Nothing is dropped while attention reads: a step only takes notice of fetches that ended (`poll_cold`); plans are
carried out in `tick`, before a step, and in `make_room`, when a segment is opened after one.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence

from h3kv.core.errors import H3Error, SlabCorruptError, TierFullError
from h3kv.core.ports import Clock, Telemetry
from h3kv.core.types import Completion, Fetch, Move, SegmentId, SlabKey, SlotHandle, Tier
from h3kv.core.units import NS_PER_MS, NS_PER_S
from h3kv.engine.copies import Arriving, Copying
from h3kv.engine.interrupts import check_interrupt, interrupts_deferred
from h3kv.engine.segment import Arrival, Phase, Segment, return_slots
from h3kv.engine.segments import SegmentTable
from h3kv.engine.stream import ViewableStore
from h3kv.policy import placement as policy
from h3kv.policy.eviction import Candidate, order_evictions
from h3kv.telemetry import names

WAIT_NS = 30 * NS_PER_S
"""Longest time that room may take to come free: a device that takes longer is broken."""


class Placer:
    """Satisfies `segments.RoomMaker`. Not thread-safe.

    Args:
        table: whose segments are placed.
        host: the table's home, as a store whose slots can be viewed; None where there is no cold store.
        config: of the policy.
        telemetry: receives moves.
        clock: for the policy and for bounds on waiting.
    """

    def __init__(
        self,
        table: SegmentTable,
        *,
        host: ViewableStore | None,
        config: policy.PlacementConfig,
        telemetry: Telemetry,
        clock: Clock,
    ) -> None:
        self._table = table
        self._host = host
        self._cold = table.cold
        self._state = policy.PlacementState(config)
        self._telemetry = telemetry
        self._clock = clock
        self._copies: dict[SegmentId, Copying] = {}
        self._arrivals: dict[SegmentId, Arriving] = {}
        # Copies for which room is being erased: they begin when it is there.
        self._postponed: list[policy.Copy] = []
        # Ended moves and fetches that nobody took notice of yet.
        self._ended: deque[Completion] = deque()
        # Slots of arrivals that failed.
        self._refused: list[tuple[SlotHandle, ...]] = []
        self._events: list[policy.Event] = []
        self._end_fetch: Callable[[Completion], bool] = lambda _: False
        table.serve_room(self)

    @property
    def is_moving(self) -> bool:
        """Whether something goes on that needs a look now and then: a copy, perhaps one for which room is erased."""
        return bool(self._copies or self._arrivals or self._is_erasing)

    @property
    def refused_blocks(self) -> int:
        """Blocks of the home whose arrivals failed, given back with the next tick."""
        return sum(handles_L[0].blocks for handles_L in self._refused)

    def serve_fetches(self, end_fetch: Callable[[Completion], bool]) -> None:
        """Say who fetches slabs besides: it is asked first whether an ended fetch is its own."""
        self._end_fetch = end_fetch

    def tick(self) -> None:
        """Take notice of everything that ended, and carry out what the policy decides."""
        self._table.poll()
        self.poll_cold()
        self._plan([])

    def poll_cold(self) -> None:
        """Take notice of moves and fetches of the cold store that ended. Drops nothing."""
        if self._cold is None:
            return
        with interrupts_deferred():
            self._ended.extend(self._cold.poll())
            # One by one: what raises here leaves the others for the next call.
            while self._ended:
                completion = self._ended.popleft()
                if isinstance(completion.move, Move):
                    self._end_copy(completion)
                elif not self._end_fetch(completion):
                    self._end_arrival(completion)

    def make_room(self, blocks: int, *, waits: bool) -> bool:
        """See `RoomMaker.make_room`."""
        before = self._table.free_blocks()
        deadline_ns = self._clock.now_ns() + WAIT_NS
        try:
            while True:
                self._plan([policy.RoomNeeded(Tier.HOST, blocks)])
                if self._table.free_blocks() > before:
                    return True
                left_ns = deadline_ns - self._clock.now_ns()
                if self._cold is None or not (waits and self.is_moving) or left_ns <= 0:
                    return False
                check_interrupt()
                if not self._wait(min(left_ns, NS_PER_S)):
                    return False
        finally:
            self._plan([policy.RoomNeeded(Tier.HOST, 0)])

    def _wait(self, timeout_ns: int) -> bool:
        """Wait for the cold store, and take notice of what ended. False where nothing can be waited for."""
        assert self._cold is not None
        began_ns, erasing = self._clock.now_ns(), self._cold.erasing
        is_in_flight = bool(self._copies or self._arrivals)
        self._cold.wait(timeout_ns)
        self.poll_cold()
        has_waited = self._clock.now_ns() - began_ns >= NS_PER_MS
        return is_in_flight or has_waited or self._cold.erasing < erasing

    def freeable_blocks(self) -> int:
        """See `RoomMaker.freeable_blocks`."""
        sealed = [segment for segment in self._table.sealed() if segment.home_L is not None]
        leaving = self._table.leaving_blocks + self.refused_blocks
        if self._cold is not None and not self._cold.is_degraded:
            return leaving + sum(segment.room_blocks for segment in sealed)
        free_to_go = {segment.id for segment in sealed if segment.cold_L is not None} | set(self._evictable())
        return leaving + sum(segment.room_blocks for segment in sealed if segment.id in free_to_go)

    def evict_all(self) -> int:
        """Give up every segment that nobody pins, in all tiers. Returns how many."""
        evicted = self._evictable()
        for segment_id in evicted:
            segment = self._table.find(segment_id)
            assert segment is not None
            self.give_up(segment)
        self._plan([])
        return len(evicted)

    def ask(self, segments: Iterable[SegmentId], target: Tier, *, reason: str) -> None:
        """Begin moves that others decided, between two steps. `is_asked` says which are still to end."""
        self._plan([policy.MoveAsked(segment, target, reason) for segment in segments])

    def ask_no_more(self, segment: SegmentId) -> None:
        """What was asked for and has not begun does not begin."""
        self._plan([policy.MoveNotAsked(segment)])

    def is_asked(self, segment: SegmentId) -> bool:
        """Whether what was asked for it has not ended, well or not."""
        return segment in self._state.asked

    def settle(self, timeout_ns: int) -> None:
        """Write what is to be written, as far as the time allows."""
        deadline_ns = self._clock.now_ns() + timeout_ns
        self.tick()
        while self._cold is not None and self.is_moving and (left_ns := deadline_ns - self._clock.now_ns()) > 0:
            if not self._wait(left_ns):
                return
            self.tick()

    def _evictable(self) -> list[SegmentId]:
        candidates = [
            Candidate(segment=segment.id, parent=segment.parent, last_used=0, pins=segment.pins + segment.holds)
            for segment in self._table.sealed()
        ]
        return list(order_evictions(candidates))

    def _plan(self, events: Sequence[policy.Event]) -> None:
        """Tell the policy what happened, and do what it says, until it says nothing."""
        while self._refused:
            self._table.home.release(self._refused.pop())
        for _ in range(len(self._postponed)):
            self._copy_out(self._postponed.pop(0))
        pending = [*self._take_events(), *events, *self._wanted_again()]
        while pending:
            self._state, plan = policy.step(self._state, [*self._rooms(), *pending], self._clock.now_ns())
            arrivals = []
            for command in plan:
                if isinstance(command, policy.Drop):
                    self._drop(command)
                elif command.target is Tier.NVME:
                    self._copy_out(command)
                else:
                    arrivals += self._copy_in(command)
            self._fetch(arrivals)
            pending = self._take_events()

    def _wanted_again(self) -> list[policy.Event]:
        """Demotions that were asked for, of what a sequence has begun to read whole since."""
        asked = (self._table.find(each.segment) for each in self._state.asked.values() if each.target is Tier.NVME)
        return [policy.MoveNotAsked(segment.id) for segment in asked if segment is not None and segment.is_read_whole]

    def _take_events(self) -> list[policy.Event]:
        events, self._events = [*self._table.take_events(), *self._events], []
        return events

    def _rooms(self) -> list[policy.Event]:
        block_bytes = self._table.layout.block_bytes
        stores = {Tier.HOST: self._table.home, Tier.NVME: self._cold}
        rooms: list[policy.Event] = []
        for tier, store in stores.items():
            if store is not None:
                statistics = store.statistics()
                capacity, free = statistics.capacity_bytes // block_bytes, statistics.free_bytes // block_bytes
                rooms.append(policy.RoomReported(tier, capacity, free))
        return rooms

    def _drop(self, command: policy.Drop) -> None:
        segment = self._table.find(command.segment)
        if segment is None or segment.phase is not Phase.SEALED:
            return
        other = segment.cold_L if command.tier is Tier.HOST else segment.home_L
        if other is None:
            if segment.pins == segment.holds == 0:
                self.give_up(segment)
            return
        if command.tier is Tier.HOST:
            self._table.release_home(segment)
        else:
            self._table.release_cold(segment)
        self._events.append(policy.SegmentLeft(segment.id, command.tier))

    def give_up(self, segment: Segment) -> None:
        """Forget a sealed segment that nobody pins, wherever it lies."""
        tier = self._table.tier if segment.home_L is not None else Tier.NVME
        self._table.give_up(segment)
        self._telemetry.count(names.EVICTED_SEGMENTS, tier=tier)

    def _copy_out(self, command: policy.Copy) -> None:
        segment = self._table.find(command.segment)
        handles_L = None
        if segment is not None and segment.home_L is not None and self._host is not None:
            handles_L = self._reserve_cold(segment)
            if handles_L is None and self._is_erasing:
                self._postponed.append(command)
                return
        if segment is None or segment.home_L is None or handles_L is None or self._cold is None or self._host is None:
            self._events.append(policy.MoveFailed(command.segment, Tier.NVME))
            return
        content_bytes = self._table.layout.slab.content_bytes(segment.room_blocks)
        views_L = [self._host.view(handle)[:content_bytes] for handle in segment.home_L]
        moves = [
            Move(SlabKey(segment.id, layer), handle, view, segment.label)
            for layer, (handle, view) in enumerate(zip(handles_L, views_L, strict=True))
        ]
        self._copies[segment.id] = Copying(
            segment, handles_L, command.reason, layers_left=len(moves), start_ns=self._clock.now_ns()
        )
        segment.is_copied = True
        try:
            self._cold.submit(moves)
        except BaseException as error:
            del self._copies[segment.id]
            segment.is_copied = False
            self._cold.release(handles_L)
            self._events.append(policy.MoveFailed(segment.id, Tier.NVME))
            if not isinstance(error, H3Error):
                raise

    def _reserve_cold(self, segment: Segment) -> tuple[SlotHandle, ...] | None:
        """Room for a segment in the cold store; None where there is none, or none yet."""
        assert self._cold is not None
        sizes = [segment.room_blocks] * self._table.layout.layers
        while True:
            free_bytes = self._cold.statistics().free_bytes
            try:
                return tuple(self._cold.reserve(sizes))
            except TierFullError as error:
                if self._is_erasing or error.free_bytes < error.needed_bytes:
                    return None
            except H3Error:
                return None
            # Enough is free, but it lies apart: one more is dropped at a time.
            self._drop_cold(free_bytes // self._table.layout.block_bytes + 1)
            if self._cold.statistics().free_bytes <= free_bytes:
                return None

    @property
    def _is_erasing(self) -> bool:
        """Whether room in the cold store comes free by itself. A degraded one never ends what it was to erase."""
        return self._cold is not None and self._cold.erasing > 0 and not self._cold.is_degraded

    def _drop_cold(self, blocks: int) -> None:
        """Drop copies in the cold store until so many blocks are free there, as far as that goes."""
        for wanted in (blocks, 0):
            events = [*self._take_events(), *self._rooms(), policy.RoomNeeded(Tier.NVME, wanted)]
            self._state, plan = policy.step(self._state, events, self._clock.now_ns())
            for command in plan:
                if isinstance(command, policy.Drop):
                    self._drop(command)
                else:
                    # Not now: it may be asked for again.
                    self._events.append(policy.MoveFailed(command.segment, command.target))

    def _end_copy(self, completion: Completion) -> None:
        copying = self._copies[completion.move.key.segment]
        copying.layers_left -= 1
        copying.error = copying.error or completion.error
        if copying.layers_left > 0:
            return
        segment = copying.segment
        del self._copies[segment.id]
        segment.is_copied = False
        is_there = self._table.find(segment.id) is segment and segment.phase is Phase.SEALED
        if copying.error is not None or not is_there:
            assert self._cold is not None
            return_slots(self._cold, segment, copying.handles_L)
            self._table.end_leaving(segment)
            self._events.append(policy.MoveFailed(segment.id, Tier.NVME))
            return
        segment.cold_L = copying.handles_L
        self._table.note_changed(segment)
        self._events.append(policy.SegmentPlaced(segment.id, Tier.NVME))
        self._count_move(segment, copying.reason, source=self._table.tier, target=Tier.NVME, start_ns=copying.start_ns)

    def _copy_in(self, command: policy.Copy) -> list[Fetch]:
        """Reserve room in the home for a segment. Returns the fetches that fill it."""
        segment = self._table.find(command.segment)
        if segment is None or segment.cold_L is None or segment.home_L is not None or self._host is None:
            self._events.append(policy.MoveFailed(command.segment, Tier.HOST))
            return []
        try:
            handles_L = tuple(self._table.home.reserve([segment.room_blocks] * self._table.layout.layers))
        except H3Error:
            self._events.append(policy.MoveFailed(segment.id, Tier.HOST))
            return []
        addresses_L = tuple(self._table.home.address(handle) for handle in handles_L)
        segment.arrival = Arrival(handles_L, addresses_L)
        self._arrivals[segment.id] = Arriving(segment, segment.arrival, command.reason, self._clock.now_ns())
        content_bytes = self._table.layout.slab.content_bytes(segment.room_blocks)
        return [
            Fetch(SlabKey(segment.id, layer), source, self._host.view(target)[:content_bytes])
            for layer, (source, target) in enumerate(zip(segment.cold_L, handles_L, strict=True))
        ]

    def _fetch(self, fetches: list[Fetch]) -> None:
        """Start fetches, layer by layer: the sequence that waits for them reads them in that order."""
        if not fetches:
            return
        assert self._cold is not None
        ordered = sorted(fetches, key=lambda fetch: fetch.key.layer)
        try:
            self._cold.submit(ordered)
        except H3Error as error:
            for fetch in ordered:
                self._end_arrival(Completion(fetch, error))

    def _end_arrival(self, completion: Completion) -> None:
        layer, found = completion.move.key.layer, self._arrivals.get(completion.move.key.segment)
        assert found is not None, "a fetch ended that nobody had started"
        segment, arrival = found.segment, found.arrival
        arrival.ended += 1
        if completion.error is None:
            arrival.arrived.add(layer)
        else:
            arrival.error = completion.error
        if arrival.ended < len(arrival.handles_L):
            return
        del self._arrivals[segment.id]
        segment.arrival = None
        is_there = self._table.find(segment.id) is segment and segment.phase is Phase.SEALED
        if not is_there or arrival.error is not None:
            # Attention may be reading layers of it that did come: the slots are released after the step.
            self._refused.append(arrival.handles_L)
            self._table.end_leaving(segment)
            self._events.append(policy.MoveFailed(segment.id, Tier.HOST))
            if is_there and isinstance(arrival.error, SlabCorruptError):
                self._table.lose(segment)
            return
        moves = [Move(SlabKey(segment.id, at), handle, None) for at, handle in enumerate(arrival.handles_L)]
        self._table.home.submit(moves)
        self._table.poll()
        segment.home_L, segment.addresses_L = arrival.handles_L, arrival.addresses_L
        segment.change_place()
        self._table.note_changed(segment)
        self._events.append(policy.SegmentPlaced(segment.id, Tier.HOST))
        self._count_move(segment, found.reason, source=Tier.NVME, target=self._table.tier, start_ns=found.start_ns)

    def _count_move(self, segment: Segment, reason: str, *, source: Tier, target: Tier, start_ns: int) -> None:
        size_bytes = segment.room_blocks * self._table.layout.block_bytes
        self._telemetry.count(names.MOVES, source=source, target=target, reason=reason)
        self._telemetry.count(names.MOVED_BYTES, size_bytes, source=source, target=target)
        duration_s = (self._clock.now_ns() - start_ns) / NS_PER_S
        self._telemetry.observe(names.MOVE_DURATION, duration_s, source=source, target=target)
