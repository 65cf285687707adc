import mmap
import os

import pytest
from tests.unit.memory.mailbox_kit import ENTRIES_OFFSET, ENTRY_BYTES, GEOMETRY, NOW, new_caller, new_worker, take

from h3kv.core.errors import (
    ConfigError,
    PeerUnavailableError,
    StoreFormatError,
)
from h3kv.memory.mailbox import (
    Mailbox,
    MailboxGeometry,
    Ticket,
)


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
