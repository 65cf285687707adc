"""The side of the process that owns regions: it passes them on, knows who lives, and adopts what its forerunner left.

    open -> adopt -> serve -> poll, poll, ... -> close

Between `open` and `serve` nobody is given anything. `adopt` ends in one of three ways: with the regions of the
forerunner, offered by somebody who has them mapped; with nothing, once nobody has any of them mapped; with an error.
So there are never two regions of one purpose.
"""

from __future__ import annotations

import contextlib
import os
import selectors
import socket
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from h3kv.core.errors import H3Error, StoreBusyError
from h3kv.core.units import NS_PER_MS, NS_PER_S
from h3kv.memory.leases import HOLDER_MAX, OWNER
from h3kv.memory.meeting_place import MeetingPlace
from h3kv.memory.messages import (
    Hello,
    MarkedHolder,
    Marker,
    Message,
    Refused,
    UnmapFirst,
    Welcome,
    close_all,
    decode,
    encode,
    receive,
)
from h3kv.memory.region import Region

CLIENTS_MAX: Final = 256
HELLO_NS: Final = 10 * NS_PER_S
"""A client that has said nothing after so long is shown out."""
_LOOK_NS: Final = 50 * NS_PER_MS
"""Between two looks whether anybody still has the forerunner's regions."""


@dataclass(frozen=True, slots=True)
class HolderJoined:
    """A client has the regions from now on."""

    holder: int
    name: str
    boot_token: bytes
    has_returned: bool
    """Whether it was the forerunner's, and still has its leases."""


@dataclass(frozen=True, slots=True)
class HolderGone:
    """A client has ended, or did not return in time: take back what it had leased."""

    holder: int
    name: str


HubEvent = HolderJoined | HolderGone


@dataclass(slots=True, eq=False)
class _Client:
    channel: socket.socket
    since_ns: int
    hello: Hello | None = None
    fds: list[int] = field(default_factory=list)
    """That came with the hello, until it was answered."""
    holder: int | None = None


class RegionHub:
    """Passes regions to clients over a unix socket. Not thread-safe; never blocks but in `adopt` and `poll`.

    Args:
        place: where to listen; its folder is shared with the clients.
        boot_token: 16 random bytes of this process.

    Raises:
        AddressInUseError: another process owns regions there.
        StoreError: the folder is missing or closed to us.
        ConfigError: the path is too long for a socket.
    """

    def __init__(self, place: MeetingPlace, *, boot_token: bytes) -> None:
        self._place = place
        self._boot_token = boot_token
        self._owner_lock: int | None = place.lock_owner()
        self._clients: dict[int, _Client] = {}
        self._regions: tuple[Region, ...] | None = None
        self._awaited: dict[int, MarkedHolder] = {}
        self._awaited_until_ns = 0
        self._last_holder = OWNER
        self.refused_total = 0
        """Clients that were shown out: malformed or oversized messages, regions that are none, silence."""
        try:
            self._listener = place.listen()
        except BaseException:
            os.close(self._owner_lock)
            raise
        self._selector = selectors.EpollSelector()
        self._selector.register(self._listener, selectors.EVENT_READ)

    @classmethod
    def open(cls, socket_path: Path, *, boot_token: bytes, mode: int = 0o600) -> RegionHub:
        """A hub that listens there; see the class."""
        return cls(MeetingPlace(socket_path, mode=mode), boot_token=boot_token)

    def fileno(self) -> int:
        """A descriptor that is readable when `poll` has something to do, for a loop of another kind."""
        return self._selector.fileno()

    @property
    def holders(self) -> dict[int, str]:
        """Names of the clients that have the regions, by holder number."""
        clients = self._clients.values()
        return {each.holder: each.hello.name for each in clients if each.holder is not None and each.hello is not None}

    @property
    def awaited(self) -> frozenset[int]:
        """Holders of the forerunner that may still return. Their leases are left alone until they are reported gone."""
        return frozenset(self._awaited)

    def adopt(self, timeout_ns: int) -> tuple[Region, ...]:
        """The regions of the forerunner, all of them, or none once nobody has any of them mapped.

        Holders that do not return within that time are reported gone by `poll`. Whatever else the slot tables name as
        leased belongs to holders that had gone already, or to the forerunner itself: take it back.

        Args:
            timeout_ns: to wait for a holder to offer them, and again as long for holders to let go of them.

        Raises:
            StoreBusyError: somebody has regions of the forerunner mapped, and neither offers them nor lets go.
        """
        assert self._regions is None, "adopt comes before serve"
        marker = self._place.read_marker()
        start_ns = time.monotonic_ns()
        while self._place.has_holders():
            now_ns = time.monotonic_ns()
            if marker is not None and now_ns >= start_ns + timeout_ns:
                marker = None
            if now_ns >= start_ns + 2 * timeout_ns:
                raise StoreBusyError(
                    f"a process still has memory of the earlier owner of {self._place.socket_path} mapped, and neither "
                    "offers it nor lets go: end it, then start again",
                    path=str(self._place.socket_path),
                )
            self._gather(min(_LOOK_NS, timeout_ns))
            for client in self._waiting():
                assert client.hello is not None
                if not client.hello.regions:
                    continue
                regions = None if marker is None else self._attached(client, marker)
                if regions is not None and marker is not None:
                    self._await(marker, start_ns + timeout_ns)
                    return regions
                self._answer(client, UnmapFirst())
        self._place.remove_marker()
        return ()

    def serve(self, regions: Sequence[Region]) -> None:
        """Give these regions to all who ask, from the next `poll` on. They stay the caller's.

        Raises:
            StoreError: the marker cannot be written.
        """
        assert self._regions is None, "served already"
        identities = [region.identity for region in regions]
        assert all(region.fd is not None and region.identity is not None for region in regions)
        assert len({each.purpose for each in identities if each}) == len(regions), "two regions of one purpose"
        assert len({each.id for each in identities if each}) == len(regions), "two regions at one address"
        self._regions = tuple(regions)
        self._mark()

    def poll(self, timeout_ns: int) -> list[HubEvent]:
        """Who came and went, after waiting for at most so long.

        Take back what somebody had who is gone before anything is leased to somebody who joined.
        """
        assert self._regions is not None, "poll comes after serve"
        events: list[HubEvent] = []
        if not self._waiting():
            events += self._gather(timeout_ns)
        for client in self._waiting():
            joined = self._admit(client)
            if joined is not None:
                events.append(joined)
        if self._awaited and time.monotonic_ns() >= self._awaited_until_ns:
            events += [HolderGone(each.holder, each.name) for each in self._awaited.values()]
            self._awaited.clear()
        if any(isinstance(event, HolderGone) for event in events):
            self._mark()
        return events

    def close(self) -> None:
        """Stop listening and leave all clients: they keep the regions mapped. Calling it again does nothing."""
        if self._owner_lock is None:
            return
        for client in list(self._clients.values()):
            self._drop(client)
        self._selector.close()
        self._listener.close()
        self._place.remove_socket()
        if not self._place.has_holders():
            self._place.remove_marker()
        os.close(self._owner_lock)
        self._owner_lock = None

    def check_integrity(self) -> None:
        """Assert that every holder has one number, and that nothing is kept of clients that have gone."""
        numbers = [client.holder for client in self._clients.values() if client.holder is not None]
        assert len(set(numbers)) == len(numbers), "two clients have one number"
        assert not set(numbers) & set(self._awaited), "a holder is here and awaited"
        assert all(fd == client.channel.fileno() for fd, client in self._clients.items())
        assert len(self._selector.get_map()) == len(self._clients) + 1

    def _waiting(self) -> list[_Client]:
        return [client for client in self._clients.values() if client.hello is not None and client.holder is None]

    def _gather(self, timeout_ns: int) -> list[HubEvent]:
        """Take in what clients say and whether they ended."""
        events: list[HubEvent] = []
        for key, _ in self._selector.select(max(timeout_ns, 0) / NS_PER_S):
            if key.fileobj is self._listener:
                self._accept()
                continue
            client = self._clients[key.fd]
            if self._hear(client):
                continue
            if client.holder is not None and client.hello is not None:
                events.append(HolderGone(client.holder, client.hello.name))
            self._drop(client)
        now_ns = time.monotonic_ns()
        for client in list(self._clients.values()):
            if client.hello is None and now_ns - client.since_ns > HELLO_NS:
                self._refuse(client, "no hello came")
        return events

    def _accept(self) -> None:
        with contextlib.suppress(BlockingIOError, ConnectionError):
            channel, _ = self._listener.accept()
            channel.setblocking(False)
            client = _Client(channel, time.monotonic_ns())
            self._clients[channel.fileno()] = client
            self._selector.register(channel, selectors.EVENT_READ)
            if len(self._clients) > CLIENTS_MAX:
                self._refuse(client, f"{CLIENTS_MAX} clients are connected already")

    def _hear(self, client: _Client) -> bool:
        """Whether the client is still there."""
        try:
            packet, fds = receive(client.channel)
        except ValueError:
            self.refused_total += 1
            return False
        except BlockingIOError:
            return True
        except OSError:
            return False
        try:
            # A client speaks once.
            hello = decode(packet) if packet and client.hello is None else None
        except ValueError:
            hello = None
        if not isinstance(hello, Hello) or len(fds) != len(hello.regions):
            close_all(fds)
            self.refused_total += bool(packet)
            return False
        client.hello, client.fds = hello, fds
        return True

    def _admit(self, client: _Client) -> HolderJoined | None:
        """Give a waiting client a number and the regions."""
        assert client.hello is not None and self._regions is not None
        hello = client.hello
        if any(each.boot_token == hello.boot_token and each.name == hello.name for each in self._known()):
            self._refuse(client, "a client of this name and boot token is connected already")
            return None
        has_returned = bool(hello.regions)
        if has_returned and not self._is_return(client):
            self._answer(client, UnmapFirst())
            return None
        if has_returned:
            assert hello.holder is not None
            del self._awaited[hello.holder]
            holder = hello.holder
        else:
            holder = self._next_holder()
        identities = tuple(region.identity for region in self._regions if region.identity is not None)
        fds = [] if has_returned else [region.fd for region in self._regions if region.fd is not None]
        client.holder = holder
        # A holder that nobody wrote down could not return to a successor.
        self._mark()
        if not self._send(client, Welcome(self._boot_token, holder, identities), fds):
            self._drop(client)
            if has_returned:
                # It waits no longer for this answer, and asks again: its leases are kept for that.
                self._awaited[holder] = MarkedHolder(holder, hello.name, hello.boot_token)
                self._awaited_until_ns = max(self._awaited_until_ns, time.monotonic_ns() + HELLO_NS)
            self._mark()
            return None
        close_all(client.fds)
        client.fds = []
        return HolderJoined(holder, hello.name, hello.boot_token, has_returned=has_returned)

    def _known(self) -> list[Hello]:
        return [client.hello for client in self._clients.values() if client.hello and client.holder is not None]

    def _is_return(self, client: _Client) -> bool:
        """Whether this is a holder of the forerunner with the very regions that are served."""
        assert client.hello is not None and self._regions is not None
        hello = client.hello
        awaited = None if hello.holder is None else self._awaited.get(hello.holder)
        if awaited != MarkedHolder(hello.holder or 0, hello.name, hello.boot_token):
            return False
        served = {region.identity: region.fd for region in self._regions if region.fd is not None}
        offered = dict(zip(hello.regions, client.fds, strict=True))
        if set(offered) != set(served):
            return False
        return all(os.path.sameopenfile(fd, served[each]) for each, fd in offered.items())

    def _attached(self, client: _Client, marker: Marker) -> tuple[Region, ...] | None:
        """The marked regions from what a client offers, or None where anything is missing or wrong."""
        assert client.hello is not None
        hello = client.hello
        who = MarkedHolder(hello.holder or 0, hello.name, hello.boot_token)
        if who not in marker.holders or not marker.regions or set(hello.regions) != set(marker.regions):
            return None
        regions: list[Region] = []
        try:
            for fd, identity in zip(client.fds, hello.regions, strict=True):
                region = Region.attach(fd)
                regions.append(region)
                if region.identity != identity:
                    break
            else:
                return tuple(regions)
        except H3Error:
            self.refused_total += 1
        for region in regions:
            region.close()
        return None

    def _await(self, marker: Marker, until_ns: int) -> None:
        self._awaited = {each.holder: each for each in marker.holders}
        self._awaited_until_ns = until_ns
        self._last_holder = max((OWNER, *self._awaited))

    def _next_holder(self) -> int:
        """A number that was not in use for as long as possible."""
        taken = {OWNER, *self._awaited, *self.holders}
        number = self._last_holder
        while True:
            number = number + 1 if number < HOLDER_MAX else OWNER + 1
            if number not in taken:
                self._last_holder = number
                return number

    def _mark(self) -> None:
        assert self._regions is not None
        present = [
            MarkedHolder(client.holder, client.hello.name, client.hello.boot_token)
            for client in self._clients.values()
            if client.holder is not None and client.hello is not None
        ]
        identities = tuple(region.identity for region in self._regions if region.identity is not None)
        self._place.write_marker(Marker(identities, (*present, *self._awaited.values())))

    def _refuse(self, client: _Client, reason: str) -> None:
        self.refused_total += 1
        self._answer(client, Refused(reason))

    def _answer(self, client: _Client, message: Message) -> None:
        """Say something and leave the client."""
        self._send(client, message, [])
        self._drop(client)

    @staticmethod
    def _send(client: _Client, message: Message, fds: list[int]) -> bool:
        try:
            socket.send_fds(client.channel, [encode(message)], fds)
        except OSError:
            return False
        return True

    def _drop(self, client: _Client) -> None:
        close_all(client.fds)
        client.fds = []
        self._selector.unregister(client.channel)
        del self._clients[client.channel.fileno()]
        client.channel.close()
