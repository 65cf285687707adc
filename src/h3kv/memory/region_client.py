"""The side of a process that uses another's regions."""

from __future__ import annotations

import contextlib
import enum
import gc
import os
import select
import socket
import time
from pathlib import Path
from typing import Final

from h3kv.core.errors import PeerBusyError, PeerUnavailableError, RegionError, StoreFormatError
from h3kv.core.units import NS_PER_MS, NS_PER_S
from h3kv.memory.meeting_place import MeetingPlace
from h3kv.memory.messages import Hello, Message, Refused, UnmapFirst, Welcome, close_all, decode, encode, receive
from h3kv.memory.region import Region

_RETRY_NS: Final = 20 * NS_PER_MS
"""Between two attempts to find an owner that is starting."""
_ANSWER_NS: Final = NS_PER_S
"""For an owner that is there to answer. Whoever gives up sooner is admitted when it has gone."""


class Outcome(enum.StrEnum):
    """How a connection began."""

    MAPPED = "mapped"
    """The regions were mapped just now. Whatever was known of slots and leases before is void."""
    KEPT = "kept"
    """The owner is another process, but the regions, and the leases of this holder, are those of before."""
    UNMAP_FIRST = "unmap_first"
    """The regions of before are no longer served: drop all views, call `unmap`, then connect again."""


class RegionClient:
    """Maps the regions of an owner and notices when it ends. Not thread-safe.

    Regions outlive the connection: after the owner's end they can still be read, and are offered to its successor.

    Args:
        socket_path: where the owner listens.
        name: of this process, for people.
        boot_token: 16 random bytes of this process.
    """

    def __init__(self, socket_path: Path, *, name: str, boot_token: bytes) -> None:
        self._place = MeetingPlace(socket_path)
        self._name = name
        self._boot_token = boot_token
        self._channel: socket.socket | None = None
        self._lock: int | None = None
        self.regions: dict[str, Region] = {}
        """By purpose. They belong to this client."""
        self.holder: int | None = None
        """The number under which units are leased to this process."""
        self.owner: bytes | None = None
        """Boot token of the owner that was last connected."""

    def connect(self, timeout_ns: int) -> Outcome:
        """Find the owner, offer it what is mapped, map what is missing. One that is there has a second to answer, too.

        Raises:
            PeerUnavailableError: nobody serves the socket in that time.
            PeerBusyError: the owner takes no more clients, or has one of this name and boot token already.
            StoreFormatError: what came is not a message or a region of ours.
            HostMemoryError: the system refuses a mapping.
            RegionAddressError: something else lies at a region's address.
        """
        self._disconnect()
        deadline_ns = time.monotonic_ns() + timeout_ns
        while True:
            outcome = self._try_connect(deadline_ns)
            if outcome is not None:
                return outcome
            left_ns = deadline_ns - time.monotonic_ns()
            if left_ns <= 0:
                raise PeerUnavailableError(
                    f"nobody serves regions at {self._place.socket_path}: start the process that owns them, or name "
                    "its socket folder",
                    peer=str(self._place.socket_path),
                )
            select.select([], [], [], min(left_ns, _RETRY_NS) / NS_PER_S)

    @property
    def is_connected(self) -> bool:
        """Whether the owner lives, as far as is known now."""
        return self.wait_for_end(0) is False

    def wait_for_end(self, timeout_ns: int) -> bool:
        """Whether the owner has ended, after at most so long."""
        if self._channel is None:
            return True
        # An owner says nothing after its welcome: all that can come is the end.
        readable, _, _ = select.select([self._channel], [], [], timeout_ns / NS_PER_S)
        if readable:
            self._disconnect()
        return bool(readable)

    def unmap(self) -> None:
        """Let go of all regions and leases.

        Raises:
            RegionError: some view is still in use here. Drop it and call this again.
        """
        for region in self.regions.values():
            region.close()
        mapped = [purpose for purpose, region in self.regions.items() if region.is_mapped]
        if mapped:
            # Views may hang in cycles of garbage.
            gc.collect()
            mapped = [purpose for purpose, region in self.regions.items() if region.is_mapped]
        if mapped:
            message = f"regions are still in use here ({', '.join(mapped)}): drop all views of them first"
            raise RegionError(message, region=mapped[0])
        self.regions.clear()
        self.holder = None
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    def close(self) -> None:
        """Leave the owner, which takes back what was leased, and let go of all regions. As of `unmap`."""
        self._disconnect()
        self.unmap()

    def _try_connect(self, deadline_ns: int) -> Outcome | None:
        channel = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            channel.settimeout(max(deadline_ns - time.monotonic_ns(), NS_PER_MS) / NS_PER_S)
            channel.connect(str(self._place.socket_path))
            channel.settimeout(max(deadline_ns - time.monotonic_ns(), _ANSWER_NS) / NS_PER_S)
            held = list(self.regions.values())
            identities = tuple(region.identity for region in held if region.identity is not None)
            hello = Hello(self._name, self._boot_token, self.holder, identities)
            fds = [region.fd for region in held if region.fd is not None]
            socket.send_fds(channel, [encode(hello)], fds)
            packet, received = receive(channel)
        except (FileNotFoundError, ConnectionError, TimeoutError, BlockingIOError):  # the last: many wait already
            channel.close()
            return None
        except ValueError as error:
            channel.close()
            raise self._malformed(str(error)) from error
        try:
            outcome = self._take(channel, packet, received) if packet else None
        except BaseException:
            channel.close()
            raise
        finally:
            close_all(received)
        if outcome in {Outcome.MAPPED, Outcome.KEPT}:
            channel.settimeout(None)
            self._channel = channel
        else:
            channel.close()
        return outcome

    def _take(self, channel: socket.socket, packet: bytes, fds: list[int]) -> Outcome | None:
        match self._decoded(packet):
            case Welcome() as welcome if self.regions:
                self._check_kept(welcome, fds)
                self.owner = welcome.owner
                return Outcome.KEPT
            case Welcome() as welcome:
                if not self._map(channel, welcome, fds):
                    return None
                self.owner, self.holder = welcome.owner, welcome.holder
                return Outcome.MAPPED
            case UnmapFirst() if self.regions:
                return Outcome.UNMAP_FIRST
            case Refused(reason):
                raise PeerBusyError(
                    f"the owner of the regions at {self._place.socket_path} refuses this process: {reason}",
                    peer=str(self._place.socket_path),
                )
        raise self._malformed("an answer to another question")

    def _check_kept(self, welcome: Welcome, fds: list[int]) -> None:
        if fds or welcome.holder != self.holder:
            raise self._malformed("more than was asked for")
        self._check_identities(welcome)

    def _check_identities(self, welcome: Welcome) -> None:
        if {each.purpose: each for each in welcome.regions} != {
            purpose: region.identity for purpose, region in self.regions.items()
        }:
            raise self._malformed("other regions than it names")

    def _map(self, channel: socket.socket, welcome: Welcome, fds: list[int]) -> bool:
        """Whether all was mapped; False where the owner ended before."""
        if len(fds) != len(welcome.regions):
            raise self._malformed("regions without descriptors")
        self._lock = self._place.lock_holder()
        # The owner lives, and nobody can become its successor without seeing the lock. Without this look, a successor
        # might have found no holder, and have made new regions already.
        if select.select([channel], [], [], 0)[0]:
            self.unmap()
            return False
        try:
            for fd, identity in zip(fds, welcome.regions, strict=True):
                self.regions[identity.purpose] = Region.attach(fd)
            self._check_identities(welcome)
        except BaseException:
            self.unmap()
            raise
        return True

    def _decoded(self, packet: bytes) -> Message:
        try:
            return decode(packet)
        except ValueError as error:
            raise self._malformed(str(error)) from error

    def _malformed(self, what: str) -> StoreFormatError:
        path = str(self._place.socket_path)
        return StoreFormatError(f"{path} is served by something else ({what}): name another socket", path=path)

    def _disconnect(self) -> None:
        if self._channel is not None:
            with contextlib.suppress(OSError):
                self._channel.close()
            self._channel = None
