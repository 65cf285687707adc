"""The mailbox between real processes, some of them killed."""

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from tests.integration.mailbox_processes import GEOMETRY, Referee

from h3kv.bench import mailbox as bench
from h3kv.bench.results import Results
from h3kv.core.units import NS_PER_S
from h3kv.memory.mailbox import Burial, Mailbox, Member
from h3kv.memory.mapping import Mapping

NOW = 0

CHILD = """
import signal, sys
from h3kv.memory.mailbox import FOREVER, Mailbox, Member
from h3kv.memory.mapping import Mapping

fd, size_bytes, identity, epoch = map(int, sys.argv[2:])
mailbox = Mailbox.attach(Mapping(size_bytes, fd=fd).view())
member = Member(identity, epoch)
if sys.argv[1] == "caller":
    caller = mailbox.caller(member)
    caller.wait(caller.post(b"question"), deadline_ns=FOREVER)
else:
    mailbox.worker(member).take(deadline_ns=FOREVER)
signal.pause()
"""


@contextmanager
def shared() -> Iterator[tuple[Mailbox, int]]:
    """A mailbox with its descriptor, in which nothing is left at the end."""
    fd = os.memfd_create("mailbox")
    try:
        os.ftruncate(fd, GEOMETRY.size_bytes)
        mailbox = Mailbox.create(Mapping(GEOMETRY.size_bytes, fd=fd).view(), GEOMETRY)
        yield mailbox, fd
    finally:
        os.close(fd)
    assert mailbox.census().free == GEOMETRY.entries
    mailbox.check_integrity()


@contextmanager
def in_child(role: str, member: Member, fd: int) -> Iterator[subprocess.Popen[bytes]]:
    numbers = (fd, GEOMETRY.size_bytes, member.id, member.epoch)
    process = subprocess.Popen([sys.executable, "-c", CHILD, role, *map(str, numbers)], pass_fds=(fd,))
    try:
        yield process
    finally:
        process.kill()
        process.wait()


@pytest.mark.slow
def test_request_of_a_killed_worker_is_answered_by_another() -> None:
    with shared() as (mailbox, fd):
        caller, heir = mailbox.caller(mailbox.register_caller()), mailbox.worker(mailbox.register_worker())
        victim = mailbox.register_worker()
        ticket = caller.post(b"question")
        with in_child("worker", victim, fd):
            deadline_ns = time.monotonic_ns() + 30 * NS_PER_S
            while not mailbox.census().taken:
                assert time.monotonic_ns() < deadline_ns
            assert heir.take(deadline_ns=NOW) is None
        assert mailbox.bury_worker(victim) == Burial(reposted=1, failed=0, freed=0, abandoned=0)
        request = heir.take(deadline_ns=NOW)
        assert request is not None
        assert (request.ticket, request.payload) == (ticket, b"question")
        assert heir.reply(request, b"answer")
        assert caller.poll(ticket) == b"answer"


@pytest.mark.slow
def test_reply_to_a_killed_caller_goes_nowhere() -> None:
    with shared() as (mailbox, fd):
        worker, victim = mailbox.worker(mailbox.register_worker()), mailbox.register_caller()
        with in_child("caller", victim, fd):
            request = worker.take(deadline_ns=time.monotonic_ns() + 30 * NS_PER_S)
            assert request is not None
        assert mailbox.bury_caller(victim) == Burial(reposted=0, failed=0, freed=0, abandoned=1)
        assert not worker.reply(request, b"answer")


@pytest.mark.slow
def test_no_reply_is_lost_or_doubled_while_processes_are_killed() -> None:
    outcome = Referee(seed=7).run(exchanges=100_000, kills=16)
    assert outcome.delivered >= 100_000
    assert outcome.kills == 16
    assert outcome.failed == 0


@pytest.mark.slow
def test_bench_measures_round_trips_of_both_paces() -> None:
    results = Results()
    bench.measure(results, sizes=bench.Sizes(rounds=2, trips=50))
    assert set(results.metrics) == {
        f"mailbox.{pace}_{percentile}" for pace in ("us", "woken_us") for percentile in ("p50", "p99")
    }
    assert all(value > 0 for value in results.metrics.values())
