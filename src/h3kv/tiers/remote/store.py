"""The cold tier of a process that has none of its own: satisfies `PersistentStore` over a channel to the server.

    reserve, is_wrapped     a record and its answer, some microseconds; the latter once for a segment
    submit, read_units      a record; checked here as the store would, so that errors are raised at once
    release                 a record
    poll, lookup, ...       no exchange at all

When the server goes, what is in flight ends with an error once the kernel can no longer write into its targets: with
the next session (the store's file is locked as long as the kernel has requests on it), or after `GONE_NS`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Final

from h3kv.core.errors import StaleHandleError, TierBrokenError, TierClosedError
from h3kv.core.ports import EndedReads
from h3kv.core.types import (
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
from h3kv.core.units import NS_PER_MS, NS_PER_S
from h3kv.memory.buddy import extent_class
from h3kv.tiers.cold.extents import Extent, Phase
from h3kv.tiers.cold.geometry import ColdLayout
from h3kv.tiers.remote.exchange import Exchange
from h3kv.tiers.remote.remote_units import RemoteUnits
from h3kv.tiers.remote.session import ColdSession, SessionSource, SharedRanges
from h3kv.tiers.remote.slab_mirror import SlabMirror
from h3kv.tiers.remote.transfers import Transfers

ANSWER_NS: Final = 2 * NS_PER_S
"""For an answer that is waited for. Without one the tier counts as broken for now."""
GONE_NS: Final = 2 * NS_PER_S
"""After which nothing of a server that ended is written into our memory any more: the kernel ends a ring's requests
with its process, in milliseconds."""
_SLICE_NS: Final = 50 * NS_PER_MS


class RemoteColdStore:
    """See above. Not thread-safe.

    Args:
        layout: of the model, the same as the server's.
        sessions: finds the server. It has one now.
        memory: that the server reaches: sources and targets lie there.
    """

    tier = Tier.NVME

    def __init__(self, layout: ColdLayout, sessions: SessionSource, memory: SharedRanges) -> None:
        session = sessions.current
        if session is None:
            raise self._gone()
        self._sessions = sessions
        self._layers = layout.layers
        self._mirror = SlabMirror(layout)
        self._exchange = Exchange()
        self._transfers = Transfers(self._mirror, self._exchange, memory)
        self._units = RemoteUnits(self._mirror, self._exchange, memory)
        self._exchange.serve(self._transfers.take, self._units.take)
        self._session: ColdSession | None = None
        self._gone_since_ns: int | None = None
        self._rests_until_ns = self._heard_before = 0
        self._capacity_bytes = session.capacity_bytes
        self._is_closed = False
        self._kept: list[Extent] = []
        self._enter(session)
        self._kept = [self._mirror.add_kept(kept) for kept in session.kept]

    @property
    def is_degraded(self) -> bool:
        """See `PersistentStore.is_degraded`."""
        return self._exchange.is_degraded

    @property
    def is_connected(self) -> bool:
        """Whether the server is there, as far as is known."""
        return self._session is not None

    @property
    def exchanges(self) -> int:
        """Answers that were waited for so far."""
        return self._exchange.awaited_total

    def trace(self, context: bytes) -> None:
        """Say which trace what is begun from now on belongs to, as `pack_context` packs it."""
        self._exchange.trace(context)

    def restore(self, number: Callable[[], SegmentId]) -> list[StoredSegment]:
        """See `PersistentStore.restore`."""
        self._check_open()
        kept, self._kept = self._kept, []
        return [self._mirror.segments.show(extent, number()) for extent in kept]

    def reserve(self, blocks: Sequence[int]) -> list[SlotHandle]:
        """See `BlockStore.reserve`. TierBrokenError also while the server is gone: it may come back.

        One that did not answer is not asked again for as long as it was waited for, or until it says something.
        """
        self._check_open()
        sizes = [extent_class(size) for size in blocks[:: self._layers]]
        assert [extent_class(size) for size in blocks] == [size for size in sizes for _ in range(self._layers)], (
            f"sizes come segment by segment, the same one for each of {self._layers} layers"
        )
        if not sizes:
            return []
        self._check_takes_moves()
        deadline_ns = time.monotonic_ns() + ANSWER_NS
        try:
            firsts = self._transfers.reserve(sizes, deadline_ns=deadline_ns)
        except TierBrokenError:
            if time.monotonic_ns() >= deadline_ns:
                self._rests_until_ns = time.monotonic_ns() + ANSWER_NS
                self._heard_before = self._exchange.heard_total
            raise
        return [handle for first in firsts for handle in self._mirror.add(first).handles_L]

    def submit(self, moves: Sequence[Move | Fetch]) -> None:
        """See `BlockStore.submit`. Sources and targets lie in memory that the server reaches."""
        self._check_open()
        self._notice_server()
        writes = [move for move in moves if isinstance(move, Move)]
        if writes:
            self._check_takes_moves()
        targets = self._mirror.segments.check_moves(writes)
        if any(self._mirror.theirs(extent) is None for extent, _ in targets):
            raise StaleHandleError("the server that had reserved this room has ended: reserve it again")
        fetches = [move for move in moves if isinstance(move, Fetch)]
        sources = [self._mirror.segments.check_fetch(fetch) for fetch in fetches]
        self._transfers.check_memory(moves)
        for move, (extent, layer) in zip(writes, targets, strict=True):
            self._transfers.join(extent, layer, move)
        self._transfers.fetch(fetches, sources)
        self._exchange.flush()

    def poll(self) -> list[Completion]:
        """See `BlockStore.poll`."""
        self._check_open()
        self._pump()
        return self._transfers.take_ended()

    def wait(self, timeout_ns: int) -> None:
        """See `BlockStore.wait`."""
        self._check_open()
        self._wait(timeout_ns, lambda: self._transfers.has_ended or not self._transfers.in_flight)

    def lookup(self, key: SlabKey) -> SlotHandle | None:
        """See `BlockStore.lookup`."""
        self._check_open()
        return self._mirror.segments.visible.get(key)

    def release(self, handles: Sequence[SlotHandle]) -> None:
        """See `BlockStore.release`."""
        self._transfers.release(self._give_back(handles))

    def erase(self, handles: Sequence[SlotHandle]) -> None:
        """See `BlockStore.erase`. The server does it.

        One that ended meanwhile finds the segments again when it is back: it is told then to erase what nobody here
        knows.
        """
        theirs = self._give_back(handles)
        self._transfers.erase(theirs, blocks=sum(handle.blocks for handle in handles))

    @property
    def erasing(self) -> int:
        """See `PersistentStore.erasing`: counts calls."""
        return len(self._transfers.erasing)

    def statistics(self) -> StoreStatistics:
        """See `BlockStore.statistics`."""
        segments = self._mirror.segments
        return StoreStatistics(
            tier=self.tier,
            capacity_bytes=self._capacity_bytes,
            used_bytes=self._mirror.geometry.slab_bytes(
                segments.extents.owned_blocks + sum(self._transfers.erasing.values())
            ),
            slabs_visible=len(segments.visible),
            moves_total=segments.moves_total,
            bytes_moved_total=segments.bytes_moved_total,
        )

    def is_wrapped(self, handle: SlotHandle) -> bool:
        """See `PersistentStore.is_wrapped`. Asks the server once for a segment of an earlier session."""
        self._check_open()
        extent, layer = self._mirror.segments.extents.find(handle)
        wrapped_L = self._mirror.wrapped(extent)
        if wrapped_L is None:
            theirs_L = self._mirror.theirs(extent)
            if theirs_L is None or self._session is None:
                raise self._gone()
            wrapped_L = self._transfers.ask_wrapped(theirs_L, deadline_ns=time.monotonic_ns() + ANSWER_NS)
            self._mirror.note_wrapped(extent, wrapped_L)
        return wrapped_L[layer]

    def read_units(self, slabs: Sequence[SlotHandle], reads: memoryview) -> None:
        """See `PersistentStore.read_units`. Targets lie in memory that the server reaches."""
        self._check_open()
        self._notice_server()
        self._units.start(slabs, reads)

    def poll_units(self) -> EndedReads:
        """See `PersistentStore.poll_units`."""
        self._check_open()
        self._pump()
        return self._units.take_ended()

    def wait_units(self, timeout_ns: int, *, reads: int = 1) -> None:
        """See `PersistentStore.wait_units`."""
        self._check_open()
        self._wait(timeout_ns, lambda: self._units.ended >= reads or not self._units.in_flight)

    def check_integrity(self) -> None:
        """See `BlockStore.check_integrity`."""
        self._mirror.check_integrity()

    def close(self) -> None:
        """See `BlockStore.close`. What is in flight goes on until this client's leases end."""
        if self._is_closed:
            return
        self._is_closed = True
        self._exchange.leave()
        self._mirror.segments.visible.clear()

    def _give_back(self, handles: Sequence[SlotHandle]) -> list[SlotHandle]:
        """Give slots back here. The server's handles of those that it still has."""
        self._check_open()
        for handle in handles:
            self._mirror.segments.extents.find(handle)
        theirs = self._mirror.translate(handles)
        extents = self._mirror.segments.release(handles)
        for extent in extents:
            if extent.phase is Phase.RESERVED:
                self._transfers.end_waiting(extent)
        self._mirror.forget_released(extents)
        return theirs

    def _wait(self, timeout_ns: int, is_over: Callable[[], bool]) -> None:
        deadline_ns = time.monotonic_ns() + timeout_ns
        while True:
            seen = self._exchange.signal
            self._pump()
            left_ns = deadline_ns - time.monotonic_ns()
            if is_over() or left_ns <= 0:
                return
            self._exchange.wait(seen, min(left_ns, _SLICE_NS))

    def _pump(self) -> None:
        """Take what came."""
        self._notice_server()
        self._exchange.pump()

    def _notice_server(self) -> None:
        """See whether it went or came, or shut us out."""
        if self._exchange.fault is not None and self._session is not None:
            self._sessions.renew(self._session)
        current = self._sessions.current
        if current is not self._session:
            if self._session is not None:
                self._leave()
            if current is not None:
                self._end_lost()
                self._enter(current)
                self._rejoin(current)
        if self._gone_since_ns is not None and time.monotonic_ns() - self._gone_since_ns > GONE_NS:
            self._end_lost()

    def _enter(self, session: ColdSession) -> None:
        self._session = session
        self._gone_since_ns = None
        self._capacity_bytes = session.capacity_bytes
        self._exchange.enter(session.side, session.note_posted)

    def _leave(self) -> None:
        self._exchange.pump()
        self._exchange.leave()
        # What was written before is looked for when the server is back.
        self._transfers.publish()
        self._session = None
        self._gone_since_ns = time.monotonic_ns()
        self._mirror.leave()
        self._units.leave()

    def _end_lost(self) -> None:
        """End what the server took with it."""
        self._gone_since_ns = None
        error = self._gone()
        self._transfers.end_all(error)
        self._units.end_all(error)

    def _rejoin(self, session: ColdSession) -> None:
        rejoined = self._mirror.rejoin(session.kept)
        for extent in rejoined.lost:
            self._mirror.segments.retire(extent)
        self._kept = [extent for extent in self._kept if extent.phase is Phase.VISIBLE]
        if not self._transfers.erasing:
            self._transfers.release(rejoined.strangers)
            return
        # What they are is not known; that it was to be erased is likely.
        self._transfers.erasing.clear()
        self._transfers.erase(rejoined.strangers, blocks=sum(handle.blocks for handle in rejoined.strangers))

    def _check_takes_moves(self) -> None:
        self._pump()
        if self._session is None:
            raise self._gone()
        if self._heard_before == self._exchange.heard_total and time.monotonic_ns() < self._rests_until_ns:
            raise TierBrokenError(
                "the process that owns the cold store does not answer: it is asked again soon", tier=self.tier
            )
        if self._exchange.is_degraded:
            raise TierBrokenError(
                "the server of the cold store cannot write any more: see its log, and start it again", tier=self.tier
            )

    def _check_open(self) -> None:
        if self._is_closed:
            raise TierClosedError("the cold tier was closed: open the store again", tier=self.tier)

    def _gone(self) -> TierBrokenError:
        return TierBrokenError(
            "the process that owns the cold store has ended: it is used again once it is back", tier=self.tier
        )
