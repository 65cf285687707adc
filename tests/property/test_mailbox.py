"""The mailbox against a dict of requests: members come, die and are buried in any order, alive or not."""

from __future__ import annotations

import mmap
from collections import Counter
from dataclasses import dataclass

from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, initialize, invariant, rule

from h3kv import _native
from h3kv.core.errors import NotRegisteredError, PeerBusyError, PeerUnavailableError, StaleHandleError
from h3kv.memory.mailbox import Mailbox, MailboxCaller, MailboxGeometry, MailboxRequest, MailboxWorker, Member, Ticket

GEOMETRY = MailboxGeometry(entries=4, request_bytes=16, reply_bytes=16, callers=2, workers=2)
NOW = 0


@dataclass
class _Request:
    caller: Member
    payload: bytes
    state: str = "posted"
    worker: Member | None = None
    attempt: int = 0
    reply: bytes | None = None


@dataclass(frozen=True)
class _Taking:
    """A request as a worker took it, the last time or an earlier one."""

    worker: MailboxWorker
    request: MailboxRequest
    attempt: int


class MailboxMachine(RuleBasedStateMachine):
    callers = Bundle("callers")
    workers = Bundle("workers")
    tickets = Bundle("tickets")
    takings = Bundle("takings")

    def __init__(self) -> None:
        super().__init__()
        self.mailbox = Mailbox.create(memoryview(mmap.mmap(-1, GEOMETRY.size_bytes)), GEOMETRY)
        self.live_callers: set[Member] = set()
        self.live_workers: set[Member] = set()
        self.requests: dict[Ticket, _Request] = {}
        """Those that hold an entry."""

    @initialize(target=callers)
    def first_caller(self) -> MailboxCaller:
        return self.new_caller()

    @initialize(target=workers)
    def first_worker(self) -> MailboxWorker:
        return self.new_worker()

    def new_caller(self) -> MailboxCaller:
        member = self.mailbox.register_caller()
        assert member not in self.live_callers
        self.live_callers.add(member)
        return self.mailbox.caller(member, spin_ns=0)

    def new_worker(self) -> MailboxWorker:
        member = self.mailbox.register_worker()
        assert member not in self.live_workers
        self.live_workers.add(member)
        return self.mailbox.worker(member, spin_ns=0)

    @rule(target=callers, dead=consumes(callers), keep=st.booleans())
    def bury_caller(self, dead: MailboxCaller, keep: bool) -> MailboxCaller:
        mine = {ticket: request for ticket, request in self.requests.items() if request.caller == dead.member}
        for ticket, request in mine.items():
            if request.state == "taken":
                request.state = "abandoned"
            elif request.state != "abandoned":
                del self.requests[ticket]
        self.mailbox.bury_caller(dead.member)
        self.live_callers.discard(dead.member)
        return dead if keep or len(self.live_callers) == GEOMETRY.callers else self.new_caller()

    @rule(target=workers, dead=consumes(workers), keep=st.booleans())
    def bury_worker(self, dead: MailboxWorker, keep: bool) -> MailboxWorker:
        mine = {ticket: request for ticket, request in self.requests.items() if request.worker == dead.member}
        for ticket, request in mine.items():
            if request.state == "abandoned":
                del self.requests[ticket]
            elif request.state == "taken":
                request.attempt += 1
                is_over = request.attempt == _native.MAILBOX_ATTEMPTS_MAX
                request.state, request.worker = ("failed" if is_over else "posted"), None
                request.attempt -= is_over
        self.mailbox.bury_worker(dead.member)
        self.live_workers.discard(dead.member)
        return dead if keep or len(self.live_workers) == GEOMETRY.workers else self.new_worker()

    @rule(target=callers)
    def caller_comes(self) -> MailboxCaller:
        if len(self.live_callers) < GEOMETRY.callers:
            return self.new_caller()
        return self.mailbox.caller(min(self.live_callers, key=lambda member: member.id))

    @rule(target=workers)
    def worker_comes(self) -> MailboxWorker:
        if len(self.live_workers) < GEOMETRY.workers:
            return self.new_worker()
        return self.mailbox.worker(min(self.live_workers, key=lambda member: member.id), spin_ns=0)

    @rule(target=tickets, caller=callers, payload=st.binary(max_size=16))
    def post(self, caller: MailboxCaller, payload: bytes) -> tuple[MailboxCaller, Ticket]:
        try:
            ticket = caller.post(payload)
        except NotRegisteredError:
            assert caller.member not in self.live_callers
            return caller, Ticket(0)
        except PeerBusyError:
            assert len(self.requests) == GEOMETRY.entries
            return caller, Ticket(0)
        assert caller.member in self.live_callers
        assert ticket > max(self.requests, default=0)
        self.requests[ticket] = _Request(caller.member, payload)
        return caller, ticket

    @rule(target=takings, worker=workers)
    def take(self, worker: MailboxWorker) -> _Taking | None:
        try:
            taken = worker.take(deadline_ns=NOW)
        except NotRegisteredError:
            assert worker.member not in self.live_workers
            return None
        assert worker.member in self.live_workers
        posted = [ticket for ticket, request in self.requests.items() if request.state == "posted"]
        if taken is None:
            assert not posted
            return None
        request = self.requests[taken.ticket]
        assert taken.ticket == min(posted)
        assert taken.payload == request.payload
        request.state, request.worker = "taken", worker.member
        return _Taking(worker, taken, request.attempt)

    @rule(taking=takings, payload=st.binary(max_size=16))
    def reply(self, taking: _Taking | None, payload: bytes) -> None:
        if taking is None:
            return
        request = self.requests.get(taking.request.ticket)
        is_his = request is not None and (request.worker, request.attempt) == (taking.worker.member, taking.attempt)
        is_wanted = is_his and request is not None and request.state == "taken"
        assert taking.worker.reply(taking.request, payload) == is_wanted
        if request is None or not is_his:
            return
        if is_wanted:
            request.state, request.reply = "done", payload
        elif request.state == "abandoned":
            del self.requests[taking.request.ticket]

    @rule(posted=tickets)
    def poll(self, posted: tuple[MailboxCaller, Ticket]) -> None:
        caller, ticket = posted
        request = self._owned(caller, ticket)
        try:
            reply = caller.poll(ticket)
        except NotRegisteredError:
            assert caller.member not in self.live_callers
        except StaleHandleError:
            assert request is None
        except PeerUnavailableError:
            assert self.requests.pop(ticket).state == "failed"
        else:
            assert request is not None
            assert (reply is not None) == (request.state == "done")
            assert reply == request.reply
            if reply is not None:
                del self.requests[ticket]

    @rule(posted=tickets)
    def cancel(self, posted: tuple[MailboxCaller, Ticket]) -> None:
        caller, ticket = posted
        request = self._owned(caller, ticket)
        assert caller.cancel(ticket) == (request is not None)
        if request is None:
            return
        if request.state == "taken":
            request.state = "abandoned"
        else:
            del self.requests[ticket]

    def _owned(self, caller: MailboxCaller, ticket: Ticket) -> _Request | None:
        """The request while its caller may still do something with it."""
        request = self.requests.get(ticket)
        is_there = request is not None and request.state != "abandoned" and request.caller == caller.member
        return request if is_there else None

    @invariant()
    def states_are_as_they_should_be(self) -> None:
        counts = Counter(request.state for request in self.requests.values())
        census = self.mailbox.census()
        assert (census.posted, census.taken, census.done, census.failed, census.abandoned) == tuple(
            counts[state] for state in ("posted", "taken", "done", "failed", "abandoned")
        )
        assert census.free == GEOMETRY.entries - len(self.requests)
        assert self.mailbox.depth == counts["posted"]
        self.mailbox.check_integrity()


TestMailbox = MailboxMachine.TestCase
