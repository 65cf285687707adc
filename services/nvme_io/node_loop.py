"""The one thread that owns regions, leases and the cold store: everything else asks it.

    hub -> who came and went            calls of other threads -> queue          channels -> store -> completions

It waits on one bell, which clients ring for records, the I/O engine for what ended, and other threads for calls.
"""

from __future__ import annotations

import concurrent.futures
import logging
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, TypeVar

from h3kv.core.errors import (
    NotRegisteredError,
    PeerBusyError,
    PeerTimeoutError,
    PeerUnavailableError,
    RequestError,
    TierBrokenError,
    TierFullError,
)
from h3kv.core.ports import Telemetry
from h3kv.core.types import StoredSegment, Tier
from h3kv.core.units import NS_PER_MS, NS_PER_S
from h3kv.memory.region_hub import HolderGone, HolderJoined
from h3kv.rpc.nvme_io_client import WireLayout
from h3kv.telemetry import spans
from h3kv.telemetry.event_log import log_event
from h3kv.telemetry.tracing import Tracer
from h3kv.tiers.cold import ColdStore, ColdStoreConfig
from h3kv.tiers.cold.geometry import ColdLayout, LayoutMark
from h3kv.tiers.io import IoEngine, IoStatistics
from h3kv.tiers.remote.link import HOST
from h3kv.tiers.remote.server import ColdServer
from services.nvme_io.layout import check_layout
from services.nvme_io.node_regions import NodeRegions
from services.nvme_io.relay import Relay

LEASES_KEPT: Final = 1024
"""Answers that a repetition of the call gets again."""
_SLICE_NS: Final = 20 * NS_PER_MS
_HUB_NS: Final = 5 * NS_PER_MS
"""Between two looks at the sockets while there is other work."""

_log = logging.getLogger(__name__)

Answer = TypeVar("Answer")


@dataclass(frozen=True, slots=True)
class StorePlace:
    """Where the cold store lies."""

    path: Path
    config: ColdStoreConfig


@dataclass(slots=True)
class ClientRecord:
    """A process that has the regions mapped."""

    holder: int
    name: str
    boot_token: bytes
    is_registered: bool = False


class NodeLoop:
    """Run by one thread from `start` to the end of `run`. `call` may be used by any other.

    Args:
        regions: closed by `close`.
        place: of the cold store; None: there is none.
        relay: is told who comes and goes.
        telemetry: of the store.
        tracer: of what is done for requests that are traced.
        look: called about once a second, on the loop's thread.
    """

    def __init__(
        self,
        regions: NodeRegions,
        place: StorePlace | None,
        *,
        relay: Relay,
        telemetry: Telemetry,
        tracer: Tracer,
        look: Callable[[NodeLoop], None],
    ) -> None:
        self.regions = regions
        self.clients: dict[int, ClientRecord] = {}
        self.layout: WireLayout | None = None
        self.server: ColdServer | None = None
        self.began_ns = time.monotonic_ns()
        self._place = place
        self._relay = relay
        self._telemetry = telemetry
        self._tracer = tracer
        self._look = look
        self._engine: IoEngine | None = None
        self._leases: OrderedDict[tuple[int, int], list[int]] = OrderedDict()
        self._calls: deque[tuple[Callable[[], object], concurrent.futures.Future[object]]] = deque()
        self._next_look_ns = self._next_hub_ns = 0
        self._is_over = False

    def run(self, is_over: Callable[[], bool]) -> None:
        """Serve until it is time to end."""
        while not is_over():
            channels = self.regions.channels
            seen = 0 if channels is None else channels.server_bell.signal
            if self.turn() or is_over():
                continue
            if channels is None or channels is not self.regions.channels:
                self._hear(_SLICE_NS)
            else:
                channels.server_bell.wait(seen, _SLICE_NS)

    def turn(self) -> bool:
        """Do what there is to do, without waiting. Whether there was anything."""
        now_ns = time.monotonic_ns()
        did = self._serve_calls()
        if now_ns >= self._next_hub_ns:
            self._next_hub_ns = now_ns + _HUB_NS
            self._hear(0)
        if self.server is not None:
            did |= self.server.pump()
        if now_ns >= self._next_look_ns:
            self._next_look_ns = now_ns + NS_PER_S
            self._look(self)
        return did

    def call(self, act: Callable[[], Answer], *, timeout_ns: int) -> Answer:
        """What `act` gives on the loop's thread, or what it raises there.

        Raises:
            PeerTimeoutError: the loop did not come to it in time.
            PeerUnavailableError: this process ends.
        """
        answer: concurrent.futures.Future[object] = concurrent.futures.Future()
        self._calls.append((act, answer))
        if self._is_over:
            self._refuse_calls()
        channels = self.regions.channels
        if channels is not None:
            channels.server_bell.ring()
        try:
            return answer.result(timeout_ns / NS_PER_S)  # type: ignore[return-value]  # what `act` gave
        except concurrent.futures.TimeoutError as error:
            answer.cancel()
            raise PeerTimeoutError("nvme_io is busy: repeat the call", peer="nvme_io") from error

    def register(self, holder: int, boot_token: bytes, layout: WireLayout | None) -> ClientRecord:
        """See `Register`."""
        client = self.clients.get(holder)
        if client is None or client.boot_token != boot_token:
            raise NotRegisteredError(
                f"no open region socket has number {holder} with this boot token: connect to it first",
                client_id=holder,
            )
        if layout is None:
            client.is_registered = True
            return client
        check_layout(layout, self.layout)
        if not self.regions.by_purpose:
            self.regions.make(layout)
            self.layout = layout
            # Whoever was connected comes again, the one who registers too.
            for each in list(self.clients):
                self._relay.leave(each)
            self.clients.clear()
            log_event(_log, "regions_made", {spans.PEER: client.name})
            return client
        self.regions.check_layout(layout)
        self.layout = layout
        self._open_server(layout)
        self.regions.lease_index(holder)
        if self.server is not None:
            assert self.regions.channels is not None
            if not self.server.may_come(holder):
                raise PeerBusyError("reads and writes of before are under way: register again soon", peer="nvme_io")
            self.server.let_in(holder, self.regions.channels.give(holder))
        client.is_registered = True
        return client

    def lease(self, holder: int, lease_id: int, count: int) -> list[int]:
        """See `LeaseUnits`."""
        self.known(holder)
        if count < 1 or lease_id == 0:
            raise RequestError(f"lease {lease_id} of {count} units: a lease has a number and at least one unit")
        if (holder, lease_id) in self._leases:
            return self._leases[holder, lease_id]
        leases = self.regions.leases.get(HOST)
        units = None if leases is None else leases.lease(holder, count)
        if units is None or leases is None:
            host = self.regions.by_purpose.get(HOST)
            unit_bytes = 0 if host is None else 16 * host.geometry.block_bytes
            free = 0 if leases is None else leases.free_units
            raise TierFullError(
                f"{count} units are asked for and {free} are free: demote something first, or raise host_bytes",
                tier=Tier.HOST,
                needed_bytes=count * unit_bytes,
                free_bytes=free * unit_bytes,
            )
        self._leases[holder, lease_id] = units
        while len(self._leases) > LEASES_KEPT:
            self._leases.popitem(last=False)
        return units

    def give_back(self, holder: int, units: list[int]) -> int:
        """See `ReturnUnits`."""
        self.known(holder)
        self.regions.give_back(holder, units)
        return len(units)

    def list_stored(self, holder: int) -> list[StoredSegment]:
        """See `ListStored`."""
        self.known(holder)
        return [] if self.server is None else self.server.list_kept(holder)

    def evict_cold(self, idle_ns: int, size_bytes: int | None) -> tuple[int, int]:
        """Give up segments of no client, oldest first. Segments and bytes."""
        if self.server is None or time.monotonic_ns() - self.began_ns < idle_ns:
            return 0, 0
        if self.server.store.is_degraded:
            raise TierBrokenError("the cold store is only read: check its disk, start nvme_io again", tier=Tier.NVME)
        mark = self.server.store.layout.mark
        segments = given = 0
        for owned in self.server.ownership.unowned():
            size = owned.handles_L[0].blocks * mark.block_bytes * mark.layers
            if size_bytes is not None and given + size > size_bytes:
                break
            self.server.ownership.drop(owned)
            segments, given = segments + 1, given + size
        return segments, given

    def known(self, holder: int) -> ClientRecord:
        """The client of that number, registered. Raises NotRegisteredError."""
        client = self.clients.get(holder)
        if client is None or not client.is_registered:
            raise NotRegisteredError(f"client {holder} is not registered: register it first", client_id=holder)
        return client

    def io_statistics(self) -> IoStatistics | None:
        """Of the engine under the cold store."""
        return None if self._engine is None else self._engine.statistics()

    @property
    def engine(self) -> IoEngine | None:
        """Under the cold store."""
        return self._engine

    def check_integrity(self) -> None:
        """Assert that leases, segments and I/O under way fit together."""
        self.regions.check_integrity()
        if self.server is not None:
            self.server.check_integrity()

    def close(self) -> None:
        """Refuse calls, close the store, leave the clients."""
        self._is_over = True
        self._refuse_calls()
        if self.server is not None:
            self.server.store.close()
            self.server = None
        self.regions.close()

    def _refuse_calls(self) -> None:
        while self._calls:
            _, answer = self._calls.popleft()
            if not answer.done():
                answer.set_exception(PeerUnavailableError("nvme_io ends: repeat the call", peer="nvme_io"))

    def _serve_calls(self) -> bool:
        count = len(self._calls)
        for _ in range(count):
            act, answer = self._calls.popleft()
            if not answer.set_running_or_notify_cancel():
                continue
            try:
                answer.set_result(act())
            except Exception as error:  # noqa: BLE001  (raised where the call came from)
                answer.set_exception(error)
        return count > 0

    def _hear(self, timeout_ns: int) -> None:
        for event in self.regions.poll(timeout_ns):
            if isinstance(event, HolderJoined):
                self.clients[event.holder] = ClientRecord(event.holder, event.name, event.boot_token)
                self._relay.join(event.holder, event.boot_token)
                log_event(_log, "holder_joined", {spans.PEER: event.name})
            elif isinstance(event, HolderGone):
                self._let_go(event.holder)
                log_event(_log, "holder_gone", {spans.PEER: event.name})
        self.regions.settle()

    def _let_go(self, holder: int) -> None:
        self.clients.pop(holder, None)
        self._relay.leave(holder)
        if self.server is not None:
            self.server.let_out(holder)
        self.regions.retire(holder)
        self._leases = OrderedDict((key, units) for key, units in self._leases.items() if key[0] != holder)

    def _open_server(self, layout: WireLayout) -> None:
        if self._place is None or self.server is not None:
            return
        assert self.regions.memory is not None and self.regions.channels is not None
        mark = LayoutMark(
            layout.encoding.encode().ljust(8, b"\0"),
            layout.layout_version,
            layout.layers,
            layout.block_bytes,
            check_bytes=layout.check_bytes,
        )
        bell, config = self.regions.channels.server_bell, self._place.config

        def make_engine(files: Sequence[int]) -> IoEngine:
            host = self.regions.by_purpose[HOST]
            start = host.address + host.geometry.data_offset
            buffers = [(start, host.geometry.data_bytes)] if host.can_register and _is_small(host.size_bytes) else []
            self._engine = IoEngine.open(
                files, depth=config.depth, buffers=buffers, backend=config.backend, bell=bell.address
            )
            return self._engine

        store = ColdStore.open(
            self._place.path,
            ColdLayout(mark, layout.element_bytes),
            fingerprint=layout.fingerprint,
            config=config,
            telemetry=self._telemetry,
            engine=make_engine,
            bell=bell,
        )
        # The file is locked until the kernel is done with all that a forerunner had begun.
        self.regions.settle_all()
        self.server = ColdServer(store, self.regions.memory, self._tracer)
        log_event(_log, "cold_store_opened", {spans.PEER: str(self._place.path)})


def _is_small(size_bytes: int) -> bool:
    """Registering memory with the kernel commits all of it."""
    return size_bytes <= 1 << 30
