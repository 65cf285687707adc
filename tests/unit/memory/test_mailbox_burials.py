from dataclasses import astuple

import pytest
from tests.unit.memory.mailbox_kit import CALLERS_OFFSET, GEOMETRY, NOW, new_caller, new_worker, states, take

from h3kv import _native
from h3kv.core.errors import (
    NotRegisteredError,
    PeerBusyError,
    PeerUnavailableError,
    StaleHandleError,
)
from h3kv.memory.mailbox import (
    Burial,
    Mailbox,
    Member,
)


def test_work_of_a_dead_worker_goes_to_the_next_in_its_old_place(mailbox: Mailbox) -> None:
    caller, dead, heir = new_caller(mailbox), new_worker(mailbox), new_worker(mailbox)
    tickets = caller.post_many((b"1", b"2", b"3"))
    lost = take(dead)
    answered = take(dead)
    dead.reply(answered, b"well")
    assert mailbox.bury_worker(dead.member) == Burial(reposted=1, failed=0, freed=0, abandoned=0)
    assert caller.poll(tickets[1]) == b"well"
    again = take(heir)
    assert (again.ticket, again.payload) == (tickets[0], b"1") == (lost.ticket, lost.payload)
    assert again != lost
    assert not dead.reply(lost, b"late")
    assert heir.reply(again, b"in time")
    assert not dead.reply(lost, b"late")
    assert caller.poll(tickets[0]) == b"in time"
    caller.cancel(tickets[2])


def test_what_a_caller_gave_up_is_free_when_its_worker_is_buried(mailbox: Mailbox) -> None:
    caller, worker = new_caller(mailbox), new_worker(mailbox)
    ticket = caller.post(b"x")
    request = take(worker)
    caller.cancel(ticket)
    assert mailbox.bury_worker(worker.member) == Burial(reposted=0, failed=0, freed=1, abandoned=0)
    assert states(mailbox) == {}
    assert not worker.reply(request, b"late")


def test_entries_of_a_dead_caller_are_freed_or_abandoned(mailbox: Mailbox) -> None:
    dead, other, worker = new_caller(mailbox), new_caller(mailbox), new_worker(mailbox)
    tickets = dead.post_many((b"1", b"2", b"3"))
    done, taken = take(worker), take(worker)
    worker.reply(done, b"y")
    kept = other.post(b"4")
    assert mailbox.bury_caller(dead.member) == Burial(reposted=0, failed=0, freed=2, abandoned=1)
    assert states(mailbox) == {"posted": 1, "abandoned": 1}
    assert not worker.reply(taken, b"y")
    assert states(mailbox) == {"posted": 1}
    for ticket in tickets:
        with pytest.raises(NotRegisteredError):
            dead.poll(ticket)
        assert not dead.cancel(ticket)
    assert other.cancel(kept)


def test_buried_members_are_told_to_register_again(mailbox: Mailbox) -> None:
    caller, worker, other = new_caller(mailbox), new_worker(mailbox), new_caller(mailbox)
    mailbox.bury_caller(caller.member)
    mailbox.bury_worker(worker.member)
    with pytest.raises(NotRegisteredError, match="register again"):
        caller.post(b"x")
    assert states(mailbox) == {}
    with pytest.raises(NotRegisteredError):
        worker.take(deadline_ns=NOW)
    ticket = other.post(b"x")
    with pytest.raises(NotRegisteredError):
        worker.take(deadline_ns=NOW)
    assert states(mailbox) == {"posted": 1}
    other.cancel(ticket)


def test_burial_of_the_last_one_leaves_a_successor_alone(mailbox: Mailbox) -> None:
    caller, worker = new_caller(mailbox), new_worker(mailbox)
    mailbox.bury_caller(caller.member)
    mailbox.bury_worker(worker.member)
    next_caller, next_worker = new_caller(mailbox), new_worker(mailbox)
    assert next_caller.member.id == caller.member.id
    assert next_caller.member.epoch == caller.member.epoch + 1
    ticket = next_caller.post(b"x")
    request = take(next_worker)
    nothing = Burial(reposted=0, failed=0, freed=0, abandoned=0)
    assert mailbox.bury_caller(caller.member) == mailbox.bury_worker(worker.member) == nothing
    with pytest.raises(NotRegisteredError):
        caller.post(b"y")
    assert next_worker.reply(request, b"y")
    assert next_caller.poll(ticket) == b"y"


def test_burial_that_was_cut_short_is_ended_by_the_next(mailbox: Mailbox, memory: memoryview) -> None:
    dead = new_caller(mailbox)
    dead.post(b"x")
    presence = CALLERS_OFFSET + 64 * dead.member.id
    assert memory[presence] == 1
    memory[presence] = 2
    new_caller(mailbox)
    with pytest.raises(PeerBusyError):
        mailbox.register_caller()
    with pytest.raises(NotRegisteredError):
        dead.post(b"y")
    assert mailbox.bury_caller(dead.member).freed == 1
    assert mailbox.register_caller() == Member(dead.member.id, dead.member.epoch + 1)


def test_request_that_ends_every_worker_ends_as_failed(mailbox: Mailbox) -> None:
    caller = new_caller(mailbox)
    ticket = caller.post(b"poison")
    for attempt in range(_native.MAILBOX_ATTEMPTS_MAX):
        worker = new_worker(mailbox)
        take(worker)
        is_last = attempt == _native.MAILBOX_ATTEMPTS_MAX - 1
        assert astuple(mailbox.bury_worker(worker.member)) == ((0, 1, 0, 0) if is_last else (1, 0, 0, 0))
    assert states(mailbox) == {"failed": 1}
    with pytest.raises(PeerUnavailableError, match="no worker of mailbox could answer"):
        caller.poll(ticket)
    with pytest.raises(StaleHandleError):
        caller.poll(ticket)
    assert states(mailbox) == {}


def test_members_of_an_earlier_mailbox_are_not_taken_for_those_in_their_places(memory: memoryview) -> None:
    earlier = Mailbox.create(memory, GEOMETRY)
    caller, worker = new_caller(earlier), new_worker(earlier)
    given = [*caller.post_many((b"1", b"2")), caller.post(b"3")]
    held = take(worker)
    mailbox = Mailbox.create(memory, GEOMETRY)
    assert states(mailbox) == {}
    heir_caller, heir = new_caller(mailbox), new_worker(mailbox)
    assert (heir_caller.member.id, heir.member.id) == (caller.member.id, worker.member.id)
    tickets = heir_caller.post_many([b"4"] * GEOMETRY.entries)
    assert min(tickets) > max(given)
    with pytest.raises(NotRegisteredError):
        worker.take(deadline_ns=NOW)
    with pytest.raises(NotRegisteredError):
        caller.poll(given[1])
    assert states(mailbox) == {"posted": GEOMETRY.entries}
    taken = take(heir)
    assert not worker.reply(held, b"late")
    assert heir.reply(taken, b"in time")
    assert heir_caller.poll(tickets[0]) == b"in time"
    for ticket in tickets[1:]:
        heir_caller.cancel(ticket)
    mailbox.check_integrity()
    assert states(mailbox) == {}
