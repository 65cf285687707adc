"""A small mailbox and its members, for the tests of the mailbox."""

import time

from h3kv.core.units import NS_PER_S
from h3kv.memory.mailbox import Mailbox, MailboxCaller, MailboxGeometry, MailboxRequest, MailboxWorker

GEOMETRY = MailboxGeometry(entries=4, request_bytes=40, reply_bytes=24, callers=2, workers=2)
CALLERS_OFFSET = 192
ENTRIES_OFFSET = CALLERS_OFFSET + 4 * 64
ENTRY_BYTES = 64 + 64 + 64
NOW = 0
"""A deadline that has passed."""

States = dict[str, int]


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
