import threading
import time
from collections.abc import Callable

import pytest
from tests.unit.memory.mailbox_kit import NOW, new_caller, new_worker, soon, take

from h3kv import _native
from h3kv.core.errors import (
    H3Error,
    NotRegisteredError,
)
from h3kv.memory.mailbox import (
    Mailbox,
    MailboxRequest,
)


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
