"""A mailbox in shared memory: requests and replies of a fixed size between many callers and many workers.

    caller                          mailbox                          worker
    post(request) -> ticket    -->  [ entry | entry | ... ]   -->    take(deadline) -> request
    wait(ticket)  -> reply     <--  [       |       | ... ]   <--    reply(request, bytes)

Each process maps the same bytes wherever it likes and attaches to them. A reply is given out once; work that a dead
worker left is given to another, so it must be idempotent. Who learns that a process died buries its members; nothing
here learns it by itself. The native core (`native/include/h3/mailbox.hpp`) draws the states of an entry.

Deadlines are nanoseconds of `time.monotonic_ns`, which is one clock for all processes of a machine. Calls release the
GIL; those that wait look for an interrupt ten times a second.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import astuple, dataclass
from typing import Final, NewType, Self

from h3kv import _native
from h3kv.core.errors import (
    ConfigError,
    NotRegisteredError,
    PeerBusyError,
    PeerTimeoutError,
    PeerUnavailableError,
    StaleHandleError,
    StoreFormatError,
)

Ticket = NewType("Ticket", int)
"""Names one request of one caller, and never another."""

FOREVER: Final = (1 << 63) - 1
"""A deadline that never comes."""

SPIN_NS: Final = _native.MAILBOX_SPIN_NS
"""How long a member looks for news before it sleeps."""

_OK, _TIMEOUT, _FULL, _GONE, _FAILED, _BURIED = range(6)
"""`h3::MailboxResult`."""


@dataclass(frozen=True, slots=True)
class MailboxGeometry:
    """How a mailbox is divided.

    Raises:
        ConfigError: a number is out of its bounds.
    """

    entries: int
    """Requests under way at once: a power of two, at most 1,024."""
    request_bytes: int
    """Of the longest request, up to 1 MiB."""
    reply_bytes: int
    """Of the longest reply, up to 1 MiB."""
    callers: int
    """Registered at once, up to 64."""
    workers: int
    """Registered at once, up to 64."""

    def __post_init__(self) -> None:
        numbers = astuple(self)
        if not all(0 < number < 1 << 32 for number in numbers) or not _native.mailbox_size_bytes(numbers):
            raise ConfigError(
                f"a mailbox cannot have {self}: entries must be a power of two up to {_native.MAILBOX_ENTRIES_MAX}, "
                f"messages have 1 to {_native.MAILBOX_BYTES_MAX} bytes, and there are 1 to "
                f"{_native.MAILBOX_MEMBERS_MAX} callers and workers",
                field="mailbox",
            )

    @property
    def size_bytes(self) -> int:
        """Bytes of memory that it takes: a multiple of 64."""
        return _native.mailbox_size_bytes(astuple(self))


@dataclass(frozen=True, slots=True)
class Member:
    """A place in the register of callers or of workers. The epoch tells its holder from the next one's."""

    id: int
    epoch: int


@dataclass(frozen=True, slots=True)
class Burial:
    """What became of the entries of a dead member."""

    reposted: int
    """Taken by a dead worker, and given to the next."""
    failed: int
    """The same, but too many workers had died over them."""
    freed: int
    abandoned: int
    """Of a dead caller, still in the hands of a worker."""


@dataclass(frozen=True, slots=True)
class MailboxCensus:
    """How many entries are in which state. Each is looked at once, so the sum may count one twice or not at all."""

    free: int
    claimed: int
    posted: int
    taken: int
    done: int
    failed: int
    abandoned: int


@dataclass(frozen=True, slots=True)
class MailboxRequest:
    """A request in a worker's hands."""

    ticket: Ticket
    deadline_ns: int
    """The caller's: work is in vain after it."""
    payload: bytes
    word: int
    """What tells this taking from any other."""


class Mailbox:
    """The shared part, as this process sees it. All methods may be called from any thread.

    Args:
        native: the mailbox.
        memory: kept for as long as this lives.
        name: what it is called in messages.
    """

    def __init__(self, native: _native.Mailbox, memory: object, name: str) -> None:
        self._native = native
        self._memory = memory
        self.name = name
        self.geometry = MailboxGeometry(*native.geometry)

    @classmethod
    def create(cls, memory: memoryview | tuple[int, int], geometry: MailboxGeometry, *, name: str = "mailbox") -> Self:
        """A new mailbox in memory that nobody uses yet, or in place of one of this geometry whose owners are gone.

        Members of that one are buried, and no number is given out again.

        Args:
            memory: writable view, or address and size in bytes of memory that stays mapped. At a multiple of 64 bytes.
            geometry: how it is divided.
            name: what it is called in messages.

        Raises:
            ConfigError: the memory is too small or begins at an odd place.
        """
        address, size_bytes, held = _place(memory)
        try:
            return cls(_native.Mailbox.create(address, size_bytes, astuple(geometry)), held, name)
        except ValueError as error:
            message = f"{name}: {error}: {geometry.size_bytes} bytes are needed and {size_bytes} given"
            raise ConfigError(message, field="mailbox") from error

    @classmethod
    def attach(cls, memory: memoryview | tuple[int, int], *, name: str = "mailbox") -> Self:
        """The mailbox that another process made there.

        Raises:
            StoreFormatError: none lies there, or it is damaged, cut off or of another version.
        """
        address, size_bytes, held = _place(memory)
        try:
            return cls(_native.Mailbox.attach(address, size_bytes), held, name)
        except ValueError as error:
            raise StoreFormatError(f"{name}: {error}; make it anew", path=name) from error

    @property
    def native(self) -> _native.Mailbox:
        """For native code that posts or takes by itself. It must not outlive this."""
        return self._native

    def register_caller(self) -> Member:
        """A place for a caller, of this process or of one that is told. PeerBusyError when there is none left."""
        return self._registered(self._native.register_caller(), "callers")

    def register_worker(self) -> Member:
        """A place for a worker, of this process or of one that is told. PeerBusyError when there is none left."""
        return self._registered(self._native.register_worker(), "workers")

    def bury_caller(self, member: Member) -> Burial:
        """Take back all that a caller left which died or leaves. A second time it does nothing."""
        return Burial(*self._native.bury_caller((member.id, member.epoch)))

    def bury_worker(self, member: Member) -> Burial:
        """Give what a worker had taken, which died or leaves, to others. A second time it does nothing."""
        return Burial(*self._native.bury_worker((member.id, member.epoch)))

    def caller(self, member: Member, *, spin_ns: int = SPIN_NS) -> MailboxCaller:
        """One caller's side, for any number of threads."""
        return MailboxCaller(self, self._native, member, spin_ns=spin_ns)

    def worker(self, member: Member, *, spin_ns: int = SPIN_NS) -> MailboxWorker:
        """One worker's side, for one thread."""
        return MailboxWorker(self, self._native, member, spin_ns=spin_ns)

    @property
    def depth(self) -> int:
        """Requests that no worker has taken yet."""
        return self._native.depth()

    def census(self) -> MailboxCensus:
        """Entries by state."""
        return MailboxCensus(*self._native.census())

    def check_integrity(self) -> None:
        """AssertionError unless every entry is whole and in the hands of registered members. Nobody may be at work."""
        fault = self._native.fault()
        assert not fault, f"{self.name}: {fault}"

    def _registered(self, found: tuple[int, int] | None, kind: str) -> Member:
        if found is None:
            message = f"all places for {kind} of {self.name} are taken: end one, or make it with more"
            raise PeerBusyError(message, peer=self.name)
        return Member(*found)


class MailboxCaller:
    """One caller's side of a mailbox. All methods may be called from any thread."""

    def __init__(self, mailbox: Mailbox, native: _native.Mailbox, member: Member, *, spin_ns: int) -> None:
        self._mailbox = mailbox
        self._native = _native.MailboxCaller(native, (member.id, member.epoch), spin_ns)
        self.member = member

    def post(self, request: bytes, *, deadline_ns: int = FOREVER) -> Ticket:
        """Hand a request in.

        Raises:
            PeerBusyError: every entry is in use.
            NotRegisteredError: this caller was buried.
            ValueError: the request is longer than the geometry allows.
        """
        tickets = self.post_many((request,), deadline_ns=deadline_ns)
        if not tickets:
            raise PeerBusyError(
                f"all {self._mailbox.geometry.entries} entries of {self._mailbox.name} are in use: fetch replies first",
                peer=self._mailbox.name,
            )
        return tickets[0]

    def post_many(self, requests: Sequence[bytes], *, deadline_ns: int = FOREVER) -> tuple[Ticket, ...]:
        """Hand requests in, in order, with one wake for all. Fewer tickets: no entry was left for the rest.

        Raises:
            NotRegisteredError: this caller was buried.
            ValueError: a request is longer than the geometry allows; none was posted.
        """
        result, tickets = self._native.post(requests, deadline_ns)
        if result == _BURIED:
            raise _buried(self._mailbox.name, self.member)
        return tuple(map(Ticket, tickets))

    def wait(self, ticket: Ticket, *, deadline_ns: int) -> bytes:
        """The reply. After a timeout the work goes on: wait again, or cancel.

        Raises:
            PeerTimeoutError: the deadline passed.
            PeerUnavailableError: too many workers died over the request, or its bytes were damaged. It is gone.
            StaleHandleError: the reply was fetched already, or the request cancelled.
            NotRegisteredError: this caller was buried.
        """
        reply = self._look(ticket, deadline_ns)
        if reply is None:
            name = self._mailbox.name
            raise PeerTimeoutError(f"no reply from {name} in time: do the work here, or wait again", peer=name)
        return reply

    def poll(self, ticket: Ticket) -> bytes | None:
        """The reply, None while there is none. Raises as `wait` does."""
        return self._look(ticket, 0)

    def cancel(self, ticket: Ticket) -> bool:
        """Give a request up. False when there was nothing left to give up: its reply was fetched."""
        return self._native.cancel(ticket)

    def _look(self, ticket: Ticket, deadline_ns: int) -> bytes | None:
        result, reply = self._native.wait(ticket, deadline_ns)
        if result in {_OK, _TIMEOUT}:
            return reply
        name = self._mailbox.name
        if result == _FAILED:
            message = f"no worker of {name} could answer request {ticket}: post it again, or do the work here"
            raise PeerUnavailableError(message, peer=name)
        if result == _BURIED:
            raise _buried(name, self.member)
        assert result == _GONE, f"result {result}"
        raise StaleHandleError(f"request {ticket} of {name} has ended: its reply is given out once")


class MailboxWorker:
    """One worker's side of a mailbox, for one thread. It may hold several requests."""

    def __init__(self, mailbox: Mailbox, native: _native.Mailbox, member: Member, *, spin_ns: int) -> None:
        self._mailbox = mailbox
        self._native = _native.MailboxWorker(native, (member.id, member.epoch), spin_ns)
        self.member = member

    def take(self, *, deadline_ns: int) -> MailboxRequest | None:
        """The oldest request; None when none came before the deadline.

        Raises:
            NotRegisteredError: this worker was buried.
        """
        result, ticket, due_ns, word, payload = self._native.take(deadline_ns)
        if payload is not None:
            return MailboxRequest(Ticket(ticket), due_ns, payload, word)
        if result == _BURIED:
            raise _buried(self._mailbox.name, self.member)
        return None

    def reply(self, request: MailboxRequest, payload: bytes) -> bool:
        """Answer a request. False, and nothing happened: its caller gave up or died, or another worker has it now.

        Raises:
            ValueError: the reply is longer than the geometry allows.
        """
        return self._native.reply(request.word, payload) == _OK


def _buried(name: str, member: Member) -> NotRegisteredError:
    message = f"member {member.id} of {name} was taken for dead: register again"
    return NotRegisteredError(message, client_id=member.id)


def _place(memory: memoryview | tuple[int, int]) -> tuple[int, int, object]:
    """Address, size and what keeps them valid."""
    if isinstance(memory, tuple):
        return (*memory, None)
    held = (ctypes.c_char * memory.nbytes).from_buffer(memory)
    return ctypes.addressof(held), memory.nbytes, held
