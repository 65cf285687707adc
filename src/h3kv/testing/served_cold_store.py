"""A cold store behind a channel, served by a thread of this process: `services.nvme_io` without processes."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator

from h3kv.core.types import Tier
from h3kv.core.units import NS_PER_MS
from h3kv.memory.bell import Bell
from h3kv.memory.leases import LeasedRoom, LeaseTable
from h3kv.memory.region import Region, RegionKind
from h3kv.memory.region_format import RegionGeometry
from h3kv.tiers.cold import ColdStore
from h3kv.tiers.remote import RemoteColdStore
from h3kv.tiers.remote.channel import GEOMETRY, ChannelRegion
from h3kv.tiers.remote.leased_memory import LeasedMemory
from h3kv.tiers.remote.server import ColdServer
from h3kv.tiers.remote.session import ColdSession, KeptSegment, SharedRanges

HOLDER = 2
_SLICE_NS = 20 * NS_PER_MS

OpenStore = Callable[[Bell], ColdStore]
"""Opens the store; is given the bell to ring when something has ended in it."""


class ServedColdStore:
    """Regions, a server that can be ended and started again, and the session of one client. Satisfies `SessionSource`.

    Args:
        open_store: opens the store, once for each life of the server.
        regions: with slots, of which the client leases everything. Closed by `close`.
    """

    def __init__(self, open_store: OpenStore, regions: tuple[Region, ...]) -> None:
        self._open_store = open_store
        self.regions = regions
        self._channels_region = Region.create(GEOMETRY, kinds=(RegionKind.MEMFD,))
        self.channels = ChannelRegion(self._channels_region)
        self.leases = [LeaseTable(region.table) for region in regions]
        for leases in self.leases:
            leases.lease(HOLDER, leases.free_units)
        self.memory = SharedRanges(regions)
        self.current: ColdSession | None = None
        self.server: ColdServer | None = None
        self._thread: threading.Thread | None = None
        self._is_ending = False
        self._refused: ColdSession | None = None
        self.start()

    def start(self) -> None:
        """A new life of the server, and the client's session with it."""
        bell = self.channels.server_bell
        server = ColdServer(self._open_store(bell), LeasedMemory(self.regions))
        self.channels.take_all_back()
        self.server, self._is_ending = server, False
        self.current = self._register(server)
        self._thread = threading.Thread(target=self._serve, args=(server,), daemon=True)
        self._thread.start()

    def renew(self, session: ColdSession) -> None:
        """See `SessionSource`."""
        if self.current is session:
            self._refused = session
            self.channels.server_bell.ring()

    def end(self) -> None:
        """End the server as a process does that is killed, but for the store's file, which must be closed."""
        self.current = None
        self._is_ending = True
        self.channels.server_bell.ring()
        if self._thread is not None:
            self._thread.join()
        if self.server is not None:
            self.server.store.close()
            self.server = None

    def open_client(self) -> RemoteColdStore:
        """The store as a client has it."""
        assert self.server is not None
        return RemoteColdStore(self.server.store.layout, self, self.memory)

    def room(self, region: int) -> LeasedRoom:
        """All units of a region, leased to the client."""
        units = self.leases[region].units_of(HOLDER)

        def more(wanted: int) -> list[int]:
            taken, units[:wanted] = units[:wanted], []
            return taken

        return LeasedRoom(Tier.HOST, self.regions[region].table, more)

    def close(self) -> None:
        """End everything."""
        self.end()
        del self.channels
        self._channels_region.close()
        for region in self.regions:
            region.close()

    def _register(self, server: ColdServer) -> ColdSession:
        """As a client does that has the regions mapped."""
        server.let_in(HOLDER, self.channels.give(HOLDER))
        return ColdSession(
            self.channels.join(HOLDER),
            server.store.statistics().capacity_bytes,
            [KeptSegment(each.label, each.handles_L) for each in server.list_kept(HOLDER)],
            lambda posted: self.channels.note_posted(HOLDER, posted),
        )

    def _serve(self, server: ColdServer) -> None:
        bell = self.channels.server_bell
        while not self._is_ending:
            seen = bell.signal
            if self._refused is not None and server.may_come(HOLDER):
                self.current = self._register(server)
                self._refused = None
            if not server.pump():
                bell.wait(seen, _SLICE_NS)


@contextlib.contextmanager
def region_memory(region: Region) -> Iterator[Callable[[int], memoryview]]:
    """Memory in a region's slots, zeroed, page-aligned, given out once; from the beginning again at its end."""
    at = 0

    def allocate(size_bytes: int) -> memoryview:
        nonlocal at
        room_bytes = -(-size_bytes // 4096) * 4096
        if at + room_bytes > region.geometry.data_bytes:
            at = 0
        view = region.slots[at : at + size_bytes]
        view[:] = bytes(size_bytes)
        at += room_bytes
        return view

    yield allocate


def slots_region(block_bytes: int, units: int) -> Region:
    """A region with room for so many units."""
    return Region.create(RegionGeometry(block_bytes, units * 16), kinds=(RegionKind.MEMFD,))
