"""The cold store as other processes use it: takes their records, checks them, and answers when the store has ended.

    channel -> take -> check against the client's leases and handles -> ColdStore -> poll -> completion -> channel

Order of work. The engine takes ops in order, so priorities are kept by what it is given: of reads that are waited for,
all at once; of reads ahead, `AHEAD_IN_FLIGHT_MAX` at a time; of writes, `WRITE_BEHIND_BYTES`. A read that is waited for
stands behind so much at most. One client's records are taken in their order, of all clients in turn.

Whatever is not as it should be ends the client's channel, never this process.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final

import numpy as np

from h3kv.core.errors import H3Error, RegionError, RequestError
from h3kv.core.types import Completion, Fetch, Move, StoredSegment
from h3kv.telemetry import spans
from h3kv.telemetry.trace_context import TraceContext
from h3kv.telemetry.tracing import NullTracer, Span, Tracer
from h3kv.tiers.cold import ColdStore
from h3kv.tiers.remote import records
from h3kv.tiers.remote.channel import ChannelSide
from h3kv.tiers.remote.leased_memory import LeasedMemory, Units
from h3kv.tiers.remote.ownership import OwnedSegment, Ownership
from h3kv.tiers.remote.records import Kind, Record
from h3kv.tiers.remote.submissions import SlabList, Submissions
from h3kv.tiers.remote.transfer_spans import begin_fetch, begin_reads, begin_write, read_trace

TAKEN_MAX: Final = 64
"""Records of one client that are taken before it is the next one's turn."""
IN_FLIGHT_MAX: Final = 16_384
"""Reads and slabs of one client that are under way before no more of its records are taken."""
UNSENT_MAX: Final = 1024
"""Completions that found no room in the ring, before the same."""

_INDEX_BITS: Final = 24
_INDEX_MASK: Final = (1 << _INDEX_BITS) - 1

_log = logging.getLogger(__name__)


@dataclass(slots=True, eq=False)
class Client:
    """Who has a channel."""

    holder: int
    side: ChannelSide | None
    """None once it has gone, or spoke nonsense."""
    lists: dict[int, SlabList] = field(default_factory=dict)
    unsent: deque[bytes] = field(default_factory=deque)
    in_flight: int = 0
    taken: int = 0
    """Records so far."""
    trace: TraceContext | None = None
    """That what it asks for now belongs to."""


@dataclass(slots=True, eq=False)
class _Write:
    client: Client
    number: int
    owned: OwnedSegment
    units: Units
    left: int
    span: Span
    error: Exception | None = None


@dataclass(slots=True, eq=False)
class _Fetching:
    """The fetches of one record."""

    client: Client
    span: Span
    left: int = 0
    size_bytes: int = 0


@dataclass(slots=True, eq=False)
class _Reading:
    client: Client
    number: int
    units: Units
    left: int
    span: Span


class ColdServer:
    """Serves one store to the clients that were let in. Not thread-safe; no call waits.

    Args:
        store: whose only user this is from now on; the caller closes it.
        memory: that clients may name.
        tracer: receives what was done for requests that are traced; None: nobody does.
    """

    def __init__(self, store: ColdStore, memory: LeasedMemory, tracer: Tracer | None = None) -> None:
        self.store = store
        self._tracer = tracer or NullTracer()
        self.ownership = Ownership(store)
        self._memory = memory
        self._clients: dict[int, Client] = {}
        self._writes: dict[int, _Write] = {}
        self._fetches: dict[int, tuple[_Fetching, int, Units]] = {}
        self._readings: dict[int, _Reading] = {}
        self._next_reading = 1
        self._erasures: list[tuple[Client, bytes]] = []
        self.refused_total = 0
        """Clients whose channel was ended because of what they wrote into it."""
        self._submissions = Submissions(store, self.ownership, memory)

    def let_in(self, holder: int, side: ChannelSide) -> None:
        """Take records from a channel. Its memory was cleared just before.

        A client that comes again begins anew: see `may_come`.
        """
        assert self.may_come(holder)
        if holder in self._clients:
            self.ownership.let_go(holder)
        self._clients[holder] = Client(holder, side)

    def may_come(self, holder: int) -> bool:
        """Whether nothing is under way any more that a client began over an earlier channel."""
        client = self._clients.get(holder)
        return client is None or client.in_flight == 0

    def let_out(self, holder: int) -> None:
        """A client has gone: nothing more is taken or said. What it has in flight goes on, see `is_idle`."""
        client = self._clients.pop(holder, None)
        if client is not None:
            client.side = None
            client.unsent.clear()
        self.ownership.let_go(holder)

    def list_kept(self, holder: int) -> list[StoredSegment]:
        """See `Ownership.list_kept`."""
        return self.ownership.list_kept(holder)

    def taken(self, holder: int) -> int:
        """Records that were taken from a client."""
        client = self._clients.get(holder)
        return 0 if client is None else client.taken

    def pump(self) -> bool:
        """Take what clients want and tell them what ended. Whether there was anything to do."""
        took = [self._take(client) for client in list(self._clients.values())]
        ended = self._collect()
        sent = [self._flush(client) for client in list(self._clients.values())]
        return any(took) or ended or any(sent)

    def check_integrity(self) -> None:
        """Assert that what is in flight is accounted for."""
        self.store.check_integrity()
        self.ownership.check_integrity()
        if not (self._writes or self._fetches or self._readings):
            self._memory.check_idle()
            assert not any(client.in_flight for client in self._clients.values())

    # Taking

    def _take(self, client: Client) -> bool:
        count = 0
        while count < TAKEN_MAX and client.in_flight < IN_FLIGHT_MAX and len(client.unsent) < UNSENT_MAX:
            if client.side is None:
                break
            try:
                data = client.side.incoming.pop()
                if data is None:
                    break
                count += 1
                client.taken += 1
                self._serve(client, records.unpack(data))
            except (RequestError, RegionError) as error:
                self._end_channel(client, error)
        return count > 0

    def _end_channel(self, client: Client, error: H3Error) -> None:
        self.refused_total += 1
        _log.warning("the channel of client %d is ended: %s", client.holder, error)
        self._say(client, records.pack_failure(0, error))
        self._flush(client)
        client.side = None

    def _serve(self, client: Client, record: Record) -> None:
        serve: dict[Kind, Callable[[Client, Record], None]] = {
            Kind.RESERVE: self._reserve,
            Kind.WRITE: self._write,
            Kind.FETCH: self._fetch,
            Kind.RELEASE: self._release,
            Kind.SLABS: self._note_slabs,
            Kind.UNITS: self._read_units,
            Kind.WRAPPED: self._tell_wrapped,
            Kind.TRACE: self._note_trace,
            Kind.ERASE: self._release,
        }
        act = serve.get(record.kind)
        if act is None:
            raise RequestError(f"a client does not send {record.kind.name}")
        act(client, record)

    def _reserve(self, client: Client, record: Record) -> None:
        try:
            rows = self._submissions.reserve(client.holder, record)
        except RequestError:
            raise
        except H3Error as error:
            self._fail(client, record.number, error)
        else:
            self._say(client, records.pack(Kind.RESERVED, record.number, rows, count=record.count))

    def _write(self, client: Client, record: Record) -> None:
        try:
            owned, moves, units = self._submissions.write(client.holder, record)
            self.store.submit(moves)
        except RequestError:
            raise
        except H3Error as error:
            self._fail(client, record.number, error)
            return
        owned.label = moves[0].label
        self._memory.begin(units)
        client.in_flight += len(moves)
        span = begin_write(self._tracer, client.trace, moves)
        self._writes[owned.segment] = _Write(client, record.number, owned, units, len(moves), span)

    def _fetch(self, client: Client, record: Record) -> None:
        fetches = list(self._submissions.fetches(client.holder, record))
        fetching = _Fetching(client, begin_fetch(self._tracer, client.trace))
        for index, (fetch, units) in enumerate(fetches):
            number = record.number + index
            if isinstance(fetch, H3Error):
                self._fail(client, number, fetch)
                continue
            try:
                self.store.submit([fetch])
            except H3Error as error:
                self._fail(client, number, error)
                continue
            self._memory.begin(units)
            client.in_flight += 1
            fetching.left += 1
            fetching.size_bytes += fetch.target.nbytes
            self._fetches[id(fetch)] = (fetching, number, units)
        fetching.span.set({spans.SLABS: fetching.left, spans.SIZE_BYTES: fetching.size_bytes})
        if fetching.left == 0:
            fetching.span.end()

    def _release(self, client: Client, record: Record) -> None:
        handles = records.read_handles(records.items(record, records.HANDLE_DTYPE))
        self.ownership.release(client.holder, handles, is_erased=record.kind is Kind.ERASE)
        if record.kind is Kind.ERASE:
            self._erasures.append((client, records.pack(Kind.ERASED, record.number)))

    def _note_slabs(self, client: Client, record: Record) -> None:
        self._submissions.note_slabs(client.holder, client.lists, record)

    def _read_units(self, client: Client, record: Record) -> None:
        reading = self._next_reading
        try:
            slabs, reads_N, units = self._submissions.units(client.holder, client.lists, record)
            reads_N["tag"] = np.arange(reads_N.size, dtype=np.uint64) + np.uint64(reading << _INDEX_BITS)
            if reads_N.size:
                self.store.read_units(slabs.handles, reads_N.data)
        except RequestError:
            raise
        except H3Error as error:
            self._fail(client, record.number, error, reads=range(record.count))
            return
        if reads_N.size:
            self._next_reading += 1
            self._memory.begin(units)
            client.in_flight += reads_N.size
            span = begin_reads(self._tracer, client.trace, reads_N)
            self._readings[reading] = _Reading(client, record.number, units, reads_N.size, span)

    def _note_trace(self, client: Client, record: Record) -> None:
        client.trace = read_trace(record)

    def _tell_wrapped(self, client: Client, record: Record) -> None:
        handles = records.read_handles(records.items(record, records.HANDLE_DTYPE))
        try:
            for handle in handles:
                self.ownership.find(client.holder, handle)
            wrapped = bytes(self.store.is_wrapped(handle) for handle in handles)
        except H3Error as error:
            self._fail(client, record.number, error)
            return
        self._say(client, records.pack(Kind.IS_WRAPPED, record.number, wrapped, count=len(wrapped)))

    # Telling

    def _collect(self) -> bool:
        ended = self.store.poll()
        fetched: dict[int, tuple[Client, list[int]]] = {}
        for completion in ended:
            if isinstance(completion.move, Move):
                self._end_slab(completion)
            else:
                self._end_fetch(completion.move, completion.error, fetched)
        for client, numbers in fetched.values():
            body = np.array(numbers, dtype=np.uint64).tobytes()
            self._say(client, records.pack(Kind.FETCHED, 0, body, count=len(numbers)))
        while self._erasures and not self.store.erasing:
            self._say(*self._erasures.pop(0))
        return self._collect_units() or bool(ended)

    def _end_slab(self, completion: Completion) -> None:
        write = self._writes[completion.move.key.segment]
        write.error = write.error or completion.error
        write.left -= 1
        write.client.in_flight -= 1
        if write.left:
            return
        del self._writes[completion.move.key.segment]
        self._memory.end(write.units)
        wrapped_L = np.zeros(len(write.owned.handles_L), dtype=np.uint32)
        if write.error is None:
            wrapped_L[:] = [self.store.is_wrapped(handle) for handle in write.owned.handles_L]
            body = wrapped_L.tobytes()
            self._say(write.client, records.pack(Kind.WRITTEN, write.number, body, count=wrapped_L.size))
        else:
            self._fail(write.client, write.number, write.error)
            write.span.fail(write.error)
        write.span.end()
        self.ownership.end_writing(write.owned, write.error)

    def _end_fetch(self, fetch: Fetch, error: Exception | None, fetched: dict[int, tuple[Client, list[int]]]) -> None:
        fetching, number, units = self._fetches.pop(id(fetch))
        client = fetching.client
        self._memory.end(units)
        client.in_flight -= 1
        fetching.left -= 1
        if error is not None:
            self._fail(client, number, error)
            fetching.span.fail(error)
        else:
            fetched.setdefault(client.holder, (client, []))[1].append(number)
        if fetching.left == 0:
            fetching.span.end()

    def _collect_units(self) -> bool:
        ended = self.store.poll_units()
        tag_N = np.frombuffer(ended.tags, dtype=np.uint64)
        reading_N = tag_N >> np.uint64(_INDEX_BITS)
        index_N = (tag_N & np.uint64(_INDEX_MASK)).astype(np.uint32)
        for reading in np.unique(reading_N).tolist():
            mine_N = index_N[reading_N == reading]
            call = self._readings[reading]
            body = mine_N.tobytes()
            self._say(call.client, records.pack(Kind.READ, call.number, body, count=mine_N.size))
            self._end_reads(reading, call, mine_N.size)
        for failed in ended.failed:
            reading = failed.tag >> _INDEX_BITS
            call = self._readings[reading]
            self._fail(call.client, call.number, failed.error, reads=[failed.tag & _INDEX_MASK])
            call.span.fail(failed.error)
            self._end_reads(reading, call, 1)
        return bool(tag_N.size or ended.failed)

    def _end_reads(self, reading: int, call: _Reading, count: int) -> None:
        call.left -= count
        call.client.in_flight -= count
        if call.left == 0:
            del self._readings[reading]
            self._memory.end(call.units)
            call.span.end()

    def _fail(self, client: Client, number: int, error: Exception, *, reads: range | list[int] | None = None) -> None:
        assert isinstance(error, H3Error), f"the store ended with {error!r}"
        self._say(client, records.pack_failure(number, error, reads=() if reads is None else list(reads)))

    def _say(self, client: Client, record: bytes) -> None:
        if client.side is not None:
            client.unsent.append(record)

    def _flush(self, client: Client) -> bool:
        """Push what there is room for, and wake the client. Whether anything went."""
        side, sent = client.side, 0
        try:
            while side is not None and client.unsent:
                record = bytearray(client.unsent[0])
                record[1] = records.IS_DEGRADED if self.store.is_degraded else 0
                if not side.outgoing.push(bytes(record)):
                    break
                client.unsent.popleft()
                sent += 1
        except RegionError as error:
            _log.warning("the channel of client %d is ended: %s", client.holder, error)
            self.refused_total += 1
            client.side = None
        if sent and side is not None:
            side.peer_bell.ring()
        return sent > 0
