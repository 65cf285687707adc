"""How a process stays connected to the owner of the regions and of the cold store, over the owner's restarts.

    connect -> register -> [regions are made: connect and register again] -> list what was kept -> session
       ^                                                                                             |
       +------------------------- the owner's socket closes: a thread of its own -------------------+

The regions stay mapped meanwhile, and the leases stay valid: a restarted owner adopts both. Where it could not, the
link has a `fault`: all that lay in HOST is void then, and the process begins anew.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from h3kv.core.errors import H3Error, PeerTimeoutError, RegionError, TierFullError
from h3kv.core.units import NS_PER_MS, NS_PER_S
from h3kv.memory.region import Region
from h3kv.memory.region_client import Outcome, RegionClient
from h3kv.rpc.client import PeerChannel
from h3kv.rpc.nvme_io_client import NvmeIoClient, Registration, WireLayout
from h3kv.tiers.remote.channel import PURPOSE, ChannelRegion
from h3kv.tiers.remote.session import ColdSession, KeptSegment

HOST: Final = "host"
INDEX: Final = "index"
"""Purposes of the regions with slots."""

CONNECT_NS: Final = 5 * NS_PER_S
"""A successor reads what it adopts before it answers."""
_LOOK_NS: Final = 100 * NS_PER_MS
_RETRY_NS: Final = 50 * NS_PER_MS
_REST_NS: Final = 100 * NS_PER_MS
"""In which an owner that did not answer is not asked for room again: as long as it did not, and at least so long."""

_log = logging.getLogger(__name__)


class NodeLink:
    """Satisfies `SessionSource`. Its methods may be called from any thread, after `open`.

    Args:
        socket_path: where the owner passes its regions.
        channel: to its calls. Stays the caller's.
        layout: how this process lays KV out.
        name: of this process.
        boot_token: 16 random bytes of it.
    """

    def __init__(
        self, socket_path: Path, channel: PeerChannel, *, layout: WireLayout, name: str, boot_token: bytes
    ) -> None:
        self._regions = RegionClient(socket_path, name=name, boot_token=boot_token)
        self.calls = NvmeIoClient(channel, name=name, boot_token=boot_token)
        self._layout = layout
        self._channels: ChannelRegion | None = None
        self._is_closing = threading.Event()
        self._refused: ColdSession | None = None
        self._is_registered = False
        """With the owner whose regions are connected."""
        self._rest_until_ns = 0
        self._thread = threading.Thread(target=self._watch, name="h3-node-link", daemon=True)
        self.current: ColdSession | None = None
        """See `SessionSource`. A node without a cold store has none."""
        self.fault: H3Error | None = None
        """Why the owner cannot be used any more: end this process."""
        self.registration: Registration | None = None
        self.sessions_total = 0

    def open(self, timeout_ns: int) -> None:
        """Map the regions, register, and keep watch from then on.

        Raises:
            PeerError: the owner is not there in that time.
            ConfigError: it serves another layout.
            RegionError: a region cannot be mapped.
        """
        deadline_ns = time.monotonic_ns() + timeout_ns
        while True:
            self._regions.connect(max(deadline_ns - time.monotonic_ns(), 0))
            registration = self._register()
            if registration.purposes <= self._regions.regions.keys() and HOST in registration.purposes:
                break
            # They were made only now, for the layout that we said.
            self._regions.unmap()
            if time.monotonic_ns() > deadline_ns:
                raise PeerTimeoutError("the owner of the regions makes none: see its log", peer="nvme_io")
        self._begin(registration)
        self._is_registered = True
        self._thread.start()

    @property
    def holder(self) -> int:
        """The number under which units are leased to this process."""
        assert self._regions.holder is not None, "after open"
        return self._regions.holder

    def region(self, purpose: str) -> Region | None:
        """A region that is mapped; it stays the link's."""
        return self._regions.regions.get(purpose)

    def lease(self, units: int) -> list[int]:
        """Units of HOST, none where there are not so many or the owner is gone for now. Waits for an answer."""
        if time.monotonic_ns() < self._rest_until_ns:
            return []
        start_ns = time.monotonic_ns()
        try:
            return self.calls.lease_units(self.holder, units)
        except TierFullError:
            return []
        except H3Error as error:
            _log.warning("no units are leased: %s", error)
            now_ns = time.monotonic_ns()
            self._rest_until_ns = now_ns + max(now_ns - start_ns, _REST_NS)
            return []

    def give_back(self, units: Sequence[int]) -> bool:
        """Return units; whether the owner took them."""
        try:
            self.calls.return_units(self.holder, units)
        except H3Error as error:
            _log.warning("units are not given back: %s", error)
            return False
        return True

    def note_pins(self, pins: int) -> None:
        """Say how many pins running sequences have on segments in HOST. Never waits; without a cold store nobody reads
        it.
        """
        channels = self._channels
        if channels is not None and self.current is not None:
            channels.note_pins(self.holder, pins)

    def renew(self, session: ColdSession) -> None:
        """See `SessionSource`. The thread that keeps watch does it."""
        self._refused = session

    def close(self) -> None:
        """Leave the owner, which takes back all leases. No view of a region may be in use: RegionError."""
        self._is_closing.set()
        if self._thread.is_alive():
            self._thread.join()
        self.current = None
        self._channels = None
        self._regions.close()

    def _register(self) -> Registration:
        return self.calls.register(self.holder, self._layout)

    def _begin(self, registration: Registration) -> None:
        """A session with a server of which we are registered."""
        self.registration = registration
        if not registration.cold_capacity_bytes:
            return
        if self._channels is None:
            self._channels = ChannelRegion(self._regions.regions[PURPOSE])
        channels, holder = self._channels, self.holder
        kept = [KeptSegment(each.label, each.handles_L) for each in self.calls.list_stored(holder)]
        self.sessions_total += 1
        self.current = ColdSession(
            channels.join(holder),
            registration.cold_capacity_bytes,
            kept,
            lambda posted: channels.note_posted(holder, posted),
        )

    def _watch(self) -> None:
        while not self._is_closing.is_set() and self.fault is None:
            if self._regions.wait_for_end(_LOOK_NS):
                self.current = None
                self._return()
            elif self._refused is not None or not self._is_registered:
                self._register_again()

    def _register_again(self) -> None:
        """Once; the owner refuses as long as it still reads or writes what we had asked for."""
        if self.current is not None and self.current is not self._refused:
            self._refused = None
            return
        self.current = None
        try:
            self._begin(self._register())
            self._refused = None
            self._is_registered = True
        except H3Error as error:
            _log.info("no other channel to the cold store: %s", error)
            self._is_closing.wait(_RETRY_NS / NS_PER_S)

    def _return(self) -> None:
        """Find the owner's successor, once. One that does not answer calls yet is registered with later."""
        self._is_registered = False
        try:
            outcome = self._regions.connect(CONNECT_NS)
            if outcome is Outcome.KEPT:
                self._begin(self._register())
                self._is_registered = True
                return
            self.fault = RegionError(
                "the owner of the regions began anew without those of before: start this process again", region=HOST
            )
        except RegionError as error:
            self.fault = error
        except H3Error as error:
            _log.info("the owner of the regions is not back: %s", error)
            self._is_closing.wait(_RETRY_NS / NS_PER_S)
