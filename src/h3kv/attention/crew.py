"""Who helps: helpers come and go over a unix socket, and the kernel tells when one has died.

    helper -> owner     hello     magic 8s | threads u32
    owner -> helper     welcome   magic 8s | threads u32 | for each thread: member id u32, epoch u32, helper number u32
                        nothing, and the end: all places are taken, or the hello was none

Nothing else is said. The end of the connection is the end of a helper: its threads no longer run, so that none of its
writes is still to come. A helper that leaves ends its threads first. When the owner ends, helpers may write for a
moment, or once they go on; `helper_locks` says how its successor knows when none of them does any more.
"""

from __future__ import annotations

import contextlib
import os
import select
import selectors
import socket
import struct
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from h3kv.attention.helper_locks import HelperLocks
from h3kv.attention.offload import Helper, SpreadAttention
from h3kv.core.errors import PeerBusyError, PeerUnavailableError
from h3kv.core.units import NS_PER_MS, NS_PER_S
from h3kv.memory.mailbox import Member
from h3kv.memory.meeting_place import MeetingPlace
from h3kv.memory.work_area import HELPERS_MAX

_MAGIC: Final = b"H3CREW1\0"
_HELLO: Final = struct.Struct("<8sI")
_PLACE: Final = struct.Struct("<III")
_PACKET_BYTES: Final = _HELLO.size + HELPERS_MAX * _PLACE.size
_RETRY_NS: Final = 20 * NS_PER_MS
CLIENTS_MAX: Final = 256


@dataclass(frozen=True, slots=True)
class CrewJoined:
    """A process helps from now on."""

    crew: int
    helpers: tuple[Helper, ...]
    """Its threads."""


@dataclass(frozen=True, slots=True)
class CrewGone:
    """A process that helped has ended. What it held was taken back."""

    crew: int
    helpers: tuple[Helper, ...]


CrewEvent = CrewJoined | CrewGone


class CrewHub:
    """Lets helpers in and notices when they end. For one thread; it blocks in `poll` alone.

    Args:
        socket_path: where it listens.
        attention: what they help with.
        mode: of the socket: 0600, or 0660.
        claim: what `claim` gave, which is this hub's from now on; None: nobody else can have opened the work area.

    Raises:
        AddressInUseError: another process listens there.
        StoreError: the folder is missing or closed to us.
        ConfigError: the path is too long for a socket.
    """

    def __init__(
        self, socket_path: Path, attention: SpreadAttention, *, mode: int = 0o600, claim: int | None = None
    ) -> None:
        self._place = MeetingPlace(socket_path, mode=mode)
        self._attention = attention
        self._lock: int | None = self._place.lock_owner() if claim is None else claim
        self._helpers: dict[int, tuple[Helper, ...]] = {}
        """By descriptor of the connection. Empty: it has not said hello."""
        self._channels: dict[int, socket.socket] = {}
        self._numbers: dict[int, int] = {}
        self._last = 0
        self.refused_total = 0
        """Clients that were shown out: malformed messages, or no place left."""
        self._may_earlier_live = True
        """Helpers of earlier owners. They have no connection to this one."""
        with contextlib.ExitStack() as stack:
            stack.callback(os.close, self._lock)
            self._locks = HelperLocks(socket_path, mode=mode)
            stack.callback(self._locks.close)
            self._listener = self._place.listen()
            stack.pop_all()
        self._selector = selectors.EpollSelector()
        self._selector.register(self._listener, selectors.EVENT_READ)

    @staticmethod
    def claim(socket_path: Path, *, mode: int = 0o600) -> int:
        """The right to be the owner: a descriptor, held until it is closed. Get it before the work area is opened: that
        takes all work away from whoever opened it before.

        Raises:
            AddressInUseError: another process has it.
            StoreError: the folder is missing or closed to us.
            ConfigError: the path is too long for a socket.
        """
        return MeetingPlace(socket_path, mode=mode).lock_owner()

    @property
    def locks_path(self) -> Path:
        """The file of `HelperLocks`, for whoever shares the socket with a group."""
        return self._locks.path

    @property
    def may_be_written(self) -> bool:
        """Whether some helper, of this owner or of an earlier one, may still write, as far as `poll` has seen."""
        return self._may_earlier_live or any(self._helpers.values())

    def fileno(self) -> int:
        """A descriptor that is readable when `poll` has something to do."""
        return self._selector.fileno()

    def poll(self, timeout_ns: int) -> list[CrewEvent]:
        """Who came and went, after waiting for at most so long."""
        events: list[CrewEvent] = []
        if self._may_earlier_live and not self._locks.are_held(below=self._attention.first_number):
            self._attention.bury_earlier()
            self._may_earlier_live = False
        for key, _ in self._selector.select(timeout_ns / NS_PER_S):
            if key.fileobj is self._listener:
                self._accept()
            else:
                events += self._receive(key.fd)
        return events

    def close(self) -> None:
        """Leave all helpers, which notice it and end their threads. Calling it again does nothing.

        Their writes may still come: what they hold stays held until the next owner finds that none of them lives.
        """
        if self._lock is None:
            return
        for channel in self._channels.values():
            channel.close()
        self._channels.clear()
        self._helpers.clear()
        self._selector.close()
        self._listener.close()
        self._place.remove_socket()
        self._locks.close()
        os.close(self._lock)
        self._lock = None

    def check_integrity(self) -> None:
        """Assert that nothing is kept of helpers that have gone."""
        assert set(self._helpers) == set(self._channels)
        assert len(self._selector.get_map()) == len(self._channels) + 1
        threads = sum(len(helpers) for helpers in self._helpers.values())
        assert self._attention.statistics().helpers == threads, "helpers without a connection"

    def _accept(self) -> None:
        try:
            channel, _ = self._listener.accept()
        except OSError:
            return  # it has gone already
        if len(self._channels) == CLIENTS_MAX:
            self.refused_total += 1
            channel.close()
            return
        channel.setblocking(False)
        self._selector.register(channel, selectors.EVENT_READ)
        self._channels[channel.fileno()] = channel
        self._helpers[channel.fileno()] = ()

    def _receive(self, fd: int) -> list[CrewEvent]:
        try:
            packet = self._channels[fd].recv(_PACKET_BYTES)
        except BlockingIOError:
            return []
        except OSError:
            packet = b""
        if packet and not self._helpers[fd]:
            joined = self._welcome(fd, packet)
            if joined is not None:
                return [joined]
            self.refused_total += 1
        elif packet:
            self.refused_total += 1
        return self._drop(fd)

    def _welcome(self, fd: int, packet: bytes) -> CrewJoined | None:
        if len(packet) != _HELLO.size:
            return None
        magic, threads = _HELLO.unpack(packet)
        if magic != _MAGIC or not 1 <= threads <= HELPERS_MAX:
            return None
        helpers: list[Helper] = []
        try:
            while len(helpers) < threads:
                helpers.append(self._attention.join())
            places = (_PLACE.pack(each.member.id, each.member.epoch, each.number) for each in helpers)
            self._channels[fd].send(_HELLO.pack(_MAGIC, threads) + b"".join(places))
        except (PeerBusyError, OSError):
            for helper in helpers:
                self._attention.bury(helper)
            return None
        self._last += 1
        self._helpers[fd] = tuple(helpers)
        self._numbers[fd] = self._last
        return CrewJoined(self._last, tuple(helpers))

    def _drop(self, fd: int) -> list[CrewEvent]:
        channel, helpers = self._channels.pop(fd), self._helpers.pop(fd)
        self._selector.unregister(channel)
        channel.close()
        if not helpers:
            return []
        for helper in helpers:
            self._attention.bury(helper)
        return [CrewGone(self._numbers.pop(fd), helpers)]


class CrewClient:
    """A helper's connection. Not thread-safe.

    Args:
        socket_path: where the owner of the sequences listens.
    """

    def __init__(self, socket_path: Path) -> None:
        self._path = socket_path
        self._channel: socket.socket | None = None
        self._locks: HelperLocks | None = None

    def join(self, threads: int, *, timeout_ns: int) -> tuple[Helper, ...]:
        """Places for so many helping threads.

        Raises:
            PeerUnavailableError: nobody listens there in that time.
            PeerBusyError: all places are taken.
            StoreError: the owner's folder is closed to us.
        """
        assert self._channel is None, "it has joined"
        deadline_ns = time.monotonic_ns() + timeout_ns
        while True:
            answer = self._ask(threads, deadline_ns)
            if answer is not None:
                return answer
            left_ns = deadline_ns - time.monotonic_ns()
            if left_ns <= 0:
                raise PeerUnavailableError(
                    f"nobody asks for help at {self._path}: start the process that owns the sequences, or name its "
                    "socket folder",
                    peer=str(self._path),
                )
            select.select([], [], [], min(left_ns, _RETRY_NS) / NS_PER_S)

    def wait_for_end(self, timeout_ns: int) -> bool:
        """Whether the owner has ended, after at most so long."""
        if self._channel is None:
            return True
        # An owner says nothing after its welcome: all that can come is the end.
        return bool(select.select([self._channel], [], [], timeout_ns / NS_PER_S)[0])

    def leave(self) -> None:
        """Help no more. No thread of this process helps when this is called. Calling it again does nothing."""
        if self._channel is not None:
            self._channel.close()
            self._channel = None
        if self._locks is not None:
            self._locks.close()
            self._locks = None

    def _ask(self, threads: int, deadline_ns: int) -> tuple[Helper, ...] | None:
        channel = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with contextlib.ExitStack() as stack:
            stack.callback(channel.close)
            try:
                channel.settimeout(max(deadline_ns - time.monotonic_ns(), NS_PER_MS) / NS_PER_S)
                channel.connect(str(self._path))
                channel.send(_HELLO.pack(_MAGIC, threads))
                packet = channel.recv(_PACKET_BYTES)
            except (FileNotFoundError, ConnectionError, TimeoutError, BlockingIOError):  # the last: many wait already
                return None
            if len(packet) != _HELLO.size + threads * _PLACE.size or packet[: len(_MAGIC)] != _MAGIC:
                message = f"{self._path} has no place for {threads} helpers: run fewer, or allow more"
                raise PeerBusyError(message, peer=str(self._path))
            places = _PLACE.iter_unpack(packet[_HELLO.size :])
            helpers = tuple(Helper(Member(member, epoch), number) for member, epoch, number in places)
            # Before any of them looks for work. A successor of the owner closes all jobs before it looks at locks.
            self._locks = HelperLocks(self._path)
            self._locks.hold(helper.number for helper in helpers)
            stack.pop_all()
        channel.settimeout(None)
        self._channel = channel
        return helpers
