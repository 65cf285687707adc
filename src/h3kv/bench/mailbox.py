"""Round trip of the mailbox between two processes: post, take, reply, wait, each called from Python.

Two paces take turns. `following`: the next request comes at once, so that the worker is still looking for it. `woken`:
it comes after a pause longer than the worker looks, so that the kernel must wake it, which on an idle core, and in a
virtual machine above all, takes longer than all the rest. Each figure is the median of the rounds' percentiles.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import time
from dataclasses import dataclass
from typing import Final

from h3kv.bench.measure import turns
from h3kv.bench.results import Results
from h3kv.core.units import NS_PER_S
from h3kv.memory.mailbox import SPIN_NS, Mailbox, MailboxCaller, MailboxGeometry
from h3kv.memory.mapping import Mapping
from h3kv.supervisor.launch import tied

GEOMETRY: Final = MailboxGeometry(entries=64, request_bytes=256, reply_bytes=256, callers=2, workers=2)
REQUEST: Final = bytes(range(128))
WARM_UP_TRIPS: Final = 200
DEADLINE_NS: Final = 10 * NS_PER_S
"""After which the worker counts as dead."""


@dataclass(frozen=True, slots=True)
class Sizes:
    """How much is measured."""

    rounds: int
    trips: int
    """Of each pace, in each round."""


FULL: Final = Sizes(rounds=15, trips=2000)
QUICK: Final = Sizes(rounds=5, trips=500)

PAUSES_NS: Final = {"following": 0, "woken": 4 * SPIN_NS}
"""Between two round trips."""

WORKER: Final = """
import sys, time
from h3kv.core.errors import NotRegisteredError
from h3kv.memory.mailbox import Mailbox, Member
from h3kv.memory.mapping import Mapping

mapping = Mapping(int(sys.argv[2]), fd=int(sys.argv[1]))
worker = Mailbox.attach(mapping.view()).worker(Member(int(sys.argv[3]), int(sys.argv[4])))
try:
    while True:
        request = worker.take(deadline_ns=time.monotonic_ns() + 1_000_000_000)
        if request is not None:
            worker.reply(request, request.payload)
except NotRegisteredError:
    pass
"""
"""A process of its own, with nothing but the mailbox in it. It ends when it is buried."""


def measure(results: Results, *, sizes: Sizes = FULL) -> None:
    """Put `mailbox.us_p50` and `mailbox.us_p99` of requests that follow, `mailbox.woken_us_*` of those that wake.

    Args:
        results: where they go.
        sizes: how much is measured.

    Raises:
        PeerTimeoutError: the worker's process ended, or does not answer.
    """
    for pace, rounds in _measured(sizes).items():
        prefix = "mailbox.woken_us" if pace == "woken" else "mailbox.us"
        for percentile in (50, 99):
            results.put(f"{prefix}_p{percentile}", _median_percentile_us(rounds, percentile))


def _measured(sizes: Sizes) -> dict[str, list[list[int]]]:
    """Nanoseconds of every trip, by pace and round."""
    fd = os.memfd_create("h3-mailbox", os.MFD_CLOEXEC)
    try:
        os.ftruncate(fd, GEOMETRY.size_bytes)
        mapping = Mapping(GEOMETRY.size_bytes, fd=fd)
        mailbox = Mailbox.create(mapping.view(), GEOMETRY)
        worker, member = mailbox.register_worker(), mailbox.register_caller()
        numbers = (fd, GEOMETRY.size_bytes, worker.id, worker.epoch)
        command = [sys.executable, "-c", WORKER, *map(str, numbers)]
        with subprocess.Popen(tied(command), pass_fds=(fd,)):
            try:
                caller = mailbox.caller(member)
                _trips(caller, count=WARM_UP_TRIPS, pause_ns=0)
                rounds: dict[str, list[list[int]]] = {pace: [] for pace in PAUSES_NS}
                for repetition in range(sizes.rounds):
                    for pace in turns(PAUSES_NS, repetition):
                        rounds[pace].append(_trips(caller, count=sizes.trips, pause_ns=PAUSES_NS[pace]))
            finally:
                mailbox.bury_worker(worker)  # it wakes up, finds out and ends
        mailbox.bury_caller(member)
        mailbox.check_integrity()
    finally:
        os.close(fd)
    return rounds


def _trips(caller: MailboxCaller, *, count: int, pause_ns: int) -> list[int]:
    clock_ns = time.perf_counter_ns
    trips_ns = []
    for _ in range(count):
        resume_ns = clock_ns() + pause_ns
        while clock_ns() < resume_ns:
            pass
        start_ns = clock_ns()
        reply = caller.wait(caller.post(REQUEST), deadline_ns=time.monotonic_ns() + DEADLINE_NS)
        trips_ns.append(clock_ns() - start_ns)
        assert reply == REQUEST, "the worker sends back what it was sent"
    return trips_ns


def _median_percentile_us(rounds: list[list[int]], percentile: int) -> float:
    return statistics.median(statistics.quantiles(trips_ns, n=100)[percentile - 1] for trips_ns in rounds) / 1e3
