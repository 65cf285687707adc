import dataclasses
import time

import pytest
from tests.unit.memory.mailbox_kit import (
    NOW,
    new_caller,
    new_worker,
    states,
    take,
)

from h3kv.core.errors import (
    PeerBusyError,
    PeerTimeoutError,
    StaleHandleError,
)
from h3kv.memory.mailbox import (
    Mailbox,
    Ticket,
)


def test_request_comes_back_as_a_reply_and_its_entry_is_free_again(mailbox: Mailbox) -> None:
    caller, worker = new_caller(mailbox), new_worker(mailbox)
    for payload in (b"", b"x", b"12345678", bytes(range(40))):
        ticket = caller.post(payload, deadline_ns=77)
        assert states(mailbox) == {"posted": 1}
        assert mailbox.depth == 1
        request = take(worker)
        assert (request.ticket, request.deadline_ns, request.payload) == (ticket, 77, payload)
        assert states(mailbox) == {"taken": 1}
        assert caller.poll(ticket) is None
        assert worker.reply(request, payload[:24])
        assert states(mailbox) == {"done": 1}
        assert caller.wait(ticket, deadline_ns=NOW) == payload[:24]
        assert states(mailbox) == {}


def test_requests_are_taken_in_the_order_in_which_they_were_posted(mailbox: Mailbox) -> None:
    one, two, worker = new_caller(mailbox), new_caller(mailbox), new_worker(mailbox)
    for _ in range(5):
        one.post(b"1")
        two.post_many((b"2", b"3"))
        one.post(b"4")
        taken = [take(worker) for _ in range(4)]
        assert [request.payload for request in taken] == [b"1", b"2", b"3", b"4"]
        for request in reversed(taken):
            worker.reply(request, request.payload)
            owner = one if request.payload in {b"1", b"4"} else two
            assert owner.poll(request.ticket) == request.payload


def test_full_mailbox_takes_no_more_and_says_so(mailbox: Mailbox) -> None:
    caller = new_caller(mailbox)
    tickets = caller.post_many([b"%d" % number for number in range(6)])
    assert len(tickets) == len(set(tickets)) == 4
    with pytest.raises(PeerBusyError, match="all 4 entries"):
        caller.post(b"more")
    assert caller.cancel(tickets[1])
    (again,) = caller.post_many((b"more", b"too many"))
    assert again not in tickets
    assert mailbox.depth == 4


def test_messages_longer_than_their_room_are_refused_and_nothing_is_posted(mailbox: Mailbox) -> None:
    caller, worker = new_caller(mailbox), new_worker(mailbox)
    with pytest.raises(ValueError, match="41 bytes, where 40 fit"):
        caller.post_many((b"short", bytes(41)))
    assert states(mailbox) == {}
    ticket = caller.post(b"x")
    request = take(worker)
    with pytest.raises(ValueError, match="25 bytes, where 24 fit"):
        worker.reply(request, bytes(25))
    assert worker.reply(request, bytes(24))
    assert caller.poll(ticket) == bytes(24)


def test_deadline_that_passes_changes_nothing(mailbox: Mailbox) -> None:
    caller, worker = new_caller(mailbox), new_worker(mailbox)
    assert worker.take(deadline_ns=time.monotonic_ns() + 1_000_000) is None
    ticket = caller.post(b"x")
    for _ in range(2):
        with pytest.raises(PeerTimeoutError):
            caller.wait(ticket, deadline_ns=time.monotonic_ns() + 1_000_000)
    request = take(worker)
    with pytest.raises(PeerTimeoutError):
        caller.wait(ticket, deadline_ns=NOW)
    worker.reply(request, b"y")
    assert caller.wait(ticket, deadline_ns=NOW) == b"y"


def test_reply_is_given_out_once_and_to_its_caller_alone(mailbox: Mailbox) -> None:
    caller, other, worker = new_caller(mailbox), new_caller(mailbox), new_worker(mailbox)
    ticket = caller.post(b"x")
    worker.reply(take(worker), b"y")
    for stranger in (ticket + 4, ticket - 4, 0, 1 << 63):
        with pytest.raises(StaleHandleError):
            caller.poll(Ticket(stranger))
        assert not caller.cancel(Ticket(stranger))
    with pytest.raises(StaleHandleError):
        other.poll(ticket)
    assert not other.cancel(ticket)
    assert caller.poll(ticket) == b"y"
    with pytest.raises(StaleHandleError, match="given out once"):
        caller.poll(ticket)


def test_worker_answers_a_taking_once(mailbox: Mailbox) -> None:
    caller, worker = new_caller(mailbox), new_worker(mailbox)
    ticket = caller.post(b"x")
    request = take(worker)
    forged = dataclasses.replace(request, word=request.word ^ 1 << 4)
    assert not worker.reply(forged, b"as another worker")
    assert states(mailbox) == {"taken": 1}
    assert worker.reply(request, b"y")
    assert not worker.reply(request, b"z")
    assert caller.poll(ticket) == b"y"
    assert not worker.reply(request, b"z")
    assert states(mailbox) == {}


@pytest.mark.parametrize("stage", ["posted", "taken", "done", "fetched", "cancelled"])
def test_cancel_in_each_state(mailbox: Mailbox, stage: str) -> None:
    caller, worker = new_caller(mailbox), new_worker(mailbox)
    ticket = caller.post(b"x")
    request = take(worker) if stage in {"taken", "done", "fetched"} else None
    if request is not None and stage != "taken":
        worker.reply(request, b"y")
    if stage == "fetched":
        caller.poll(ticket)
    if stage == "cancelled":
        caller.cancel(ticket)
    assert caller.cancel(ticket) == (stage in {"posted", "taken", "done"})
    assert states(mailbox) == ({"abandoned": 1} if stage == "taken" else {})
    with pytest.raises(StaleHandleError):
        caller.poll(ticket)
    assert not caller.cancel(ticket)
    if request is not None:
        assert not worker.reply(request, b"late")
    assert states(mailbox) == {}


def test_register_is_bounded_and_places_come_back(mailbox: Mailbox) -> None:
    members = [mailbox.register_worker(), mailbox.register_worker()]
    with pytest.raises(PeerBusyError, match="places for workers"):
        mailbox.register_worker()
    mailbox.bury_worker(members[1])
    assert mailbox.register_worker().id == members[1].id
    callers = [mailbox.register_caller(), mailbox.register_caller()]
    with pytest.raises(PeerBusyError, match="places for callers"):
        mailbox.register_caller()
    for member in callers:
        mailbox.bury_caller(member)
