import dataclasses
import mmap
import os
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import astuple

import pytest

from h3kv import _native
from h3kv.core.errors import (
    ConfigError,
    H3Error,
    NotRegisteredError,
    PeerBusyError,
    PeerTimeoutError,
    PeerUnavailableError,
    StaleHandleError,
    StoreFormatError,
)
from h3kv.core.units import NS_PER_S
from h3kv.memory.mailbox import (
    Burial,
    Mailbox,
    MailboxCaller,
    MailboxGeometry,
    MailboxRequest,
    MailboxWorker,
    Member,
    Ticket,
)

GEOMETRY = MailboxGeometry(entries=4, request_bytes=40, reply_bytes=24, callers=2, workers=2)
CALLERS_OFFSET = 192
ENTRIES_OFFSET = CALLERS_OFFSET + 4 * 64
ENTRY_BYTES = 64 + 64 + 64
NOW = 0
"""A deadline that has passed."""

States = dict[str, int]


@pytest.fixture
def memory() -> memoryview:
    return memoryview(mmap.mmap(-1, GEOMETRY.size_bytes))


@pytest.fixture
def mailbox(memory: memoryview) -> Iterator[Mailbox]:
    made = Mailbox.create(memory, GEOMETRY)
    yield made
    made.check_integrity()


def new_caller(mailbox: Mailbox) -> MailboxCaller:
    return mailbox.caller(mailbox.register_caller(), spin_ns=0)


def new_worker(mailbox: Mailbox) -> MailboxWorker:
    return mailbox.worker(mailbox.register_worker(), spin_ns=0)


def take(worker: MailboxWorker) -> MailboxRequest:
    request = worker.take(deadline_ns=NOW)
    assert request is not None
    return request


def soon() -> int:
    return time.monotonic_ns() + 20 * NS_PER_S


def states(mailbox: Mailbox) -> States:
    """Of the entries that are in use."""
    census = mailbox.census()
    names = ("claimed", "posted", "taken", "done", "failed", "abandoned")
    return {name: count for name in names if (count := getattr(census, name))}


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


def entry_offset(ticket: Ticket) -> int:
    return ENTRIES_OFFSET + ticket % GEOMETRY.entries * ENTRY_BYTES


def test_torn_request_fails_and_torn_reply_is_computed_again(mailbox: Mailbox, memory: memoryview) -> None:
    caller, worker = new_caller(mailbox), new_worker(mailbox)
    torn = caller.post(b"request")
    memory[entry_offset(torn) + 64 + 3] ^= 1
    assert worker.take(deadline_ns=NOW) is None
    with pytest.raises(PeerUnavailableError):
        caller.poll(torn)
    ticket = caller.post(b"request")
    worker.reply(take(worker), b"reply")
    memory[entry_offset(ticket) + 128 + 3] ^= 1
    assert caller.poll(ticket) is None
    worker.reply(take(worker), b"reply")
    assert caller.poll(ticket) == b"reply"


@pytest.mark.parametrize("field", [16, 24])
def test_sizes_beyond_the_room_are_never_read(mailbox: Mailbox, memory: memoryview, field: int) -> None:
    caller, worker = new_caller(mailbox), new_worker(mailbox)
    ticket = caller.post(b"request")
    if field == 24:
        worker.reply(take(worker), b"reply")
    memory[entry_offset(ticket) + field : entry_offset(ticket) + field + 4] = b"\xff" * 4
    assert worker.take(deadline_ns=NOW) is None
    if field == 24:
        assert caller.poll(ticket) is None
        worker.reply(take(worker), b"reply")
        assert caller.poll(ticket) == b"reply"
    else:
        with pytest.raises(PeerUnavailableError):
            caller.poll(ticket)


def test_damaged_words_are_named(mailbox: Mailbox, memory: memoryview) -> None:
    word = slice(ENTRIES_OFFSET, ENTRIES_OFFSET + 8)
    whole = bytes(memory[word])
    faults = {
        15: "has no state",
        2: "belongs to no caller",
        6: "is in the hands of no worker",
        1 << 20: "another entry's",
    }
    for damage, fault in faults.items():
        memory[word] = (int.from_bytes(whole, "little") | damage).to_bytes(8, "little")
        with pytest.raises(AssertionError, match=fault):
            mailbox.check_integrity()
    memory[word] = whole


def test_second_mapping_at_another_address_sees_the_same_mailbox() -> None:
    fd = os.memfd_create("mailbox")
    os.ftruncate(fd, GEOMETRY.size_bytes)
    one, two = mmap.mmap(fd, GEOMETRY.size_bytes), mmap.mmap(fd, GEOMETRY.size_bytes)
    os.close(fd)
    here, there = Mailbox.create(memoryview(one), GEOMETRY), Mailbox.attach(memoryview(two))
    assert there.geometry == GEOMETRY
    caller, worker = new_caller(here), new_worker(there)
    ticket = caller.post(b"x")
    worker.reply(take(worker), b"y")
    assert caller.poll(ticket) == b"y"
    assert not there.bury_caller(caller.member).freed
    assert mailboxes_are_whole(here, there)


def mailboxes_are_whole(*mailboxes: Mailbox) -> bool:
    for mailbox in mailboxes:
        mailbox.check_integrity()
    return True


def damaged(memory: memoryview, offset: int, value: bytes) -> None:
    memory[offset : offset + len(value)] = value


@pytest.mark.parametrize(
    ("offset", "value", "message"),
    [
        (0, bytes(8), "no mailbox lies there"),
        (8, b"\x02", "of another version"),
        (12, b"\x08", "damaged"),
        (12, b"\x03", "damaged"),
        (24, b"\xff\xff", "damaged"),
        (32, bytes(8), "damaged"),
        (40, bytes(4), "damaged"),
    ],
)
def test_malformed_headers_are_refused(memory: memoryview, offset: int, value: bytes, message: str) -> None:
    Mailbox.create(memory, GEOMETRY)
    damaged(memory, offset, value)
    with pytest.raises(StoreFormatError, match=f"replies: .*{message}"):
        Mailbox.attach(memory, name="replies")


def test_mailboxes_that_are_cut_off_or_lie_askew_are_refused(memory: memoryview) -> None:
    Mailbox.create(memory, GEOMETRY)
    with pytest.raises(StoreFormatError, match="cut off"):
        Mailbox.attach(memory[:-64])
    with pytest.raises(StoreFormatError, match="too small"):
        Mailbox.attach(memory[:64])
    with pytest.raises(StoreFormatError, match="multiple of 64"):
        Mailbox.attach(memory[8:])
    with pytest.raises(ConfigError, match=r"too small for this geometry: \d+ bytes are needed"):
        Mailbox.create(memory[:-64], GEOMETRY)


@pytest.mark.parametrize(
    "numbers",
    [(3, 8, 8, 1, 1), (0, 8, 8, 1, 1), (2048, 8, 8, 1, 1), (4, 0, 8, 1, 1), (4, 8, 1 << 21, 1, 1), (4, 8, 8, 65, 1),
     (4, 8, 8, 1, 0), (4, 8, 8, 1, -1), (1 << 33, 8, 8, 1, 1)],
)  # fmt: skip
def test_geometries_out_of_bounds_are_refused(numbers: tuple[int, ...]) -> None:
    with pytest.raises(ConfigError, match="a power of two up to 1024"):
        MailboxGeometry(*numbers)


def in_thread(work: Callable[[], object]) -> tuple[threading.Thread, list[object]]:
    found: list[object] = []

    def run() -> None:
        try:
            found.append(work())
        except H3Error as error:
            found.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    return thread, found


def asleep_after(calls: tuple[int, int]) -> None:
    """Return once a member has gone to sleep since."""
    deadline = soon()
    while _native.mailbox_calls()[1] == calls[1]:
        assert time.monotonic_ns() < deadline


def test_sleeping_worker_and_caller_are_woken(mailbox: Mailbox) -> None:
    caller, worker = new_caller(mailbox), new_worker(mailbox)
    before = _native.mailbox_calls()
    thread, found = in_thread(lambda: worker.take(deadline_ns=soon()))
    asleep_after(before)
    ticket = caller.post(b"x")
    thread.join()
    (request,) = found
    assert isinstance(request, MailboxRequest)
    before = _native.mailbox_calls()
    thread, found = in_thread(lambda: caller.wait(ticket, deadline_ns=soon()))
    asleep_after(before)
    worker.reply(request, b"y")
    thread.join()
    assert found == [b"y"]


def test_nobody_is_woken_while_nobody_sleeps(mailbox: Mailbox) -> None:
    caller, worker = new_caller(mailbox), new_worker(mailbox)
    before = _native.mailbox_calls()
    for _ in range(10):
        ticket = caller.post(b"x")
        worker.reply(take(worker), b"y")
        caller.wait(ticket, deadline_ns=soon())
    assert _native.mailbox_calls() == before


def test_burial_wakes_those_that_sleep(mailbox: Mailbox) -> None:
    caller, worker = new_caller(mailbox), new_worker(mailbox)
    before = _native.mailbox_calls()
    thread, found = in_thread(lambda: worker.take(deadline_ns=soon()))
    asleep_after(before)
    mailbox.bury_worker(worker.member)
    thread.join()
    assert isinstance(found[0], NotRegisteredError)
    ticket = caller.post(b"x")
    before = _native.mailbox_calls()
    thread, found = in_thread(lambda: caller.wait(ticket, deadline_ns=soon()))
    asleep_after(before)
    mailbox.bury_caller(caller.member)
    thread.join()
    assert isinstance(found[0], NotRegisteredError)


def test_worker_is_one_threads(mailbox: Mailbox) -> None:
    worker = new_worker(mailbox)
    before = _native.mailbox_calls()
    thread, found = in_thread(lambda: worker.take(deadline_ns=soon()))
    asleep_after(before)
    with pytest.raises(RuntimeError, match="two threads"):
        worker.take(deadline_ns=NOW)
    mailbox.bury_worker(worker.member)
    thread.join()
    assert isinstance(found[0], NotRegisteredError)
