"""Callers and workers of one mailbox in processes of their own, which are killed and replaced while they work.

`python mailbox_processes.py EXCHANGES KILLS` runs as many as one likes. A process lives as long as its socket is open:
when it closes, its member is buried and the place is filled again.
"""

from __future__ import annotations

import os
import random
import selectors
import signal
import socket
import struct
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from h3kv.core.errors import StaleHandleError
from h3kv.core.units import NS_PER_S
from h3kv.memory.mailbox import Burial, Mailbox, MailboxGeometry, MailboxRequest, MailboxWorker, Member
from h3kv.memory.mapping import Mapping

GEOMETRY = MailboxGeometry(entries=32, request_bytes=32, reply_bytes=64, callers=4, workers=4)
PLACES = {"caller": 2, "worker": 2}
BATCH_MAX = 12
HELD_MAX = 3
LONG_ONE_IN = 300
LONG_NS = 2_000_000
"""Now and then work takes long, so that a kill finds requests in a worker's hands."""
LOST_NS = 60 * NS_PER_S
"""A reply that takes longer counts as lost."""
PHASE = 8
"""Place in the tally; the first ones count what each caller's place has had delivered."""
WORKING, CALLERS_END, ALL_END = range(3)
TALLY_BYTES = 4096

MESSAGE = struct.Struct("<QQQ")


def answer(payload: bytes) -> bytes:
    """What a worker makes of a request: easy to check, and never another request's."""
    return payload[::-1] + payload


def call(mailbox: Mailbox, member: Member, tally: memoryview, *, place: int, seed: int) -> None:
    """Exchange until told to end. An exchange counts when its reply was checked."""
    rng = random.Random(seed)
    caller = mailbox.caller(member)
    number = 0
    while tally[PHASE] == WORKING:
        count = rng.randint(1, BATCH_MAX)
        payloads = [MESSAGE.pack(seed, member.id, number + at) for at in range(count)]
        number += count
        for payload, ticket in zip(payloads, caller.post_many(payloads), strict=False):
            assert caller.wait(ticket, deadline_ns=time.monotonic_ns() + LOST_NS) == answer(payload)
            tally[place] += 1
            try:
                caller.poll(ticket)
            except StaleHandleError:
                continue
            raise AssertionError(f"request {ticket} had two replies")


def work(mailbox: Mailbox, member: Member, tally: memoryview, *, seed: int) -> None:
    """Answer until told to end, now and then with several requests in hand."""
    rng = random.Random(seed)
    worker = mailbox.worker(member)
    while tally[PHASE] != ALL_END:
        held = _take_some(worker, rng.randint(1, HELD_MAX))
        if rng.randrange(LONG_ONE_IN) == 0:
            _compute(LONG_NS)
        for request in rng.sample(held, len(held)):
            worker.reply(request, answer(request.payload))


def _compute(duration_ns: int) -> None:
    end_ns = time.monotonic_ns() + duration_ns
    while time.monotonic_ns() < end_ns:
        pass


def _take_some(worker: MailboxWorker, count: int) -> list[MailboxRequest]:
    held: list[MailboxRequest] = []
    while len(held) < count:
        deadline_ns = 0 if held else time.monotonic_ns() + NS_PER_S // 20
        request = worker.take(deadline_ns=deadline_ns)
        if request is None:
            break
        held.append(request)
    return held


@dataclass(frozen=True)
class Life:
    """One process in one place."""

    role: str
    place: int
    member: Member
    process: subprocess.Popen[bytes]
    line: socket.socket


@dataclass
class Outcome:
    """What a run has seen."""

    delivered: int = 0
    kills: int = 0
    reposted: int = 0
    freed: int = 0
    abandoned: int = 0
    failed: int = 0
    seconds: float = 0.0


class Referee:
    """Starts, kills, buries and replaces the processes, and counts."""

    def __init__(self, *, seed: int) -> None:
        self._rng = random.Random(seed)
        self._files = [os.memfd_create("mailbox"), os.memfd_create("tally")]
        for file, size in zip(self._files, (GEOMETRY.size_bytes, TALLY_BYTES), strict=True):
            os.ftruncate(file, size)
        self._mailbox = Mailbox.create(Mapping(GEOMETRY.size_bytes, fd=self._files[0]).view(), GEOMETRY)
        self._tally = Mapping(TALLY_BYTES, fd=self._files[1]).view().cast("Q")
        self._lines = selectors.DefaultSelector()
        self._lives: list[Life] = []
        self.outcome = Outcome()

    def run(self, *, exchanges: int, kills: int) -> Outcome:
        """Let them exchange, with so many kills spread evenly over it."""
        start = time.monotonic()
        try:
            for role, count in PLACES.items():
                for place in range(count):
                    self._start(role, place)
            while (delivered := self._delivered()) < exchanges:
                if delivered * (kills + 1) >= exchanges * (self.outcome.kills + 1):
                    self._kill()
                self._see(replace=True)
            self._end()
        finally:
            for life in self._lives:
                life.process.kill()
                life.process.wait()
                life.line.close()
            for file in self._files:
                os.close(file)
            self._lines.close()
        self.outcome.delivered = self._delivered()
        self.outcome.seconds = time.monotonic() - start
        return self.outcome

    def _delivered(self) -> int:
        return sum(self._tally[: PLACES["caller"]])

    def _start(self, role: str, place: int) -> None:
        ours, theirs = socket.socketpair()
        mailbox = self._mailbox
        member = mailbox.register_caller() if role == "caller" else mailbox.register_worker()
        descriptors = [*self._files, theirs.fileno()]
        numbers = [*descriptors, place, member.id, member.epoch, self._rng.getrandbits(32)]
        command = [sys.executable, str(Path(__file__)), "--as", role, *map(str, numbers)]
        process = subprocess.Popen(command, pass_fds=descriptors)
        theirs.close()
        life = Life(role, place, member, process, ours)
        self._lives.append(life)
        self._lines.register(ours, selectors.EVENT_READ, life)

    def _kill(self) -> None:
        """Kill anyone, at any moment or while a worker seems to be at a long work."""
        life = self._rng.choice(self._lives)
        is_timed = self._rng.random() < 0.7
        end_ns = time.monotonic_ns() + NS_PER_S // 20
        taken_since_ns: int | None = None
        while is_timed and (now_ns := time.monotonic_ns()) < end_ns:
            if not self._mailbox.census().taken:
                taken_since_ns = None
            elif taken_since_ns is None:
                taken_since_ns = now_ns
            elif now_ns - taken_since_ns > LONG_NS // 8:
                break
        life.process.send_signal(signal.SIGKILL)
        self.outcome.kills += 1

    def _see(self, *, replace: bool) -> None:
        """Bury those whose socket closed, and look again soon: progress itself wakes nobody."""
        for key, _ in self._lines.select(timeout=0.002):
            life: Life = key.data
            assert life.line.recv(1) == b""
            self._lines.unregister(life.line)
            life.line.close()
            self._lives.remove(life)
            status = life.process.wait()
            assert status in {0, -signal.SIGKILL}, f"a {life.role} ended with {status}"
            assert status or not replace, f"a {life.role} ended by itself"
            self._count(self._bury(life))
            if replace:
                self._start(life.role, life.place)

    def _bury(self, life: Life) -> Burial:
        mailbox = self._mailbox
        return mailbox.bury_caller(life.member) if life.role == "caller" else mailbox.bury_worker(life.member)

    def _count(self, burial: Burial) -> None:
        self.outcome.reposted += burial.reposted
        self.outcome.failed += burial.failed
        self.outcome.freed += burial.freed
        self.outcome.abandoned += burial.abandoned

    def _end(self) -> None:
        """Callers first: they wait for replies to the last."""
        self._tally[PHASE] = CALLERS_END
        while any(life.role == "caller" for life in self._lives):
            self._see(replace=False)
        self._tally[PHASE] = ALL_END
        while self._lives:
            self._see(replace=False)
        assert self._mailbox.census().free == GEOMETRY.entries
        self._mailbox.check_integrity()


def child(role: str, numbers: list[int]) -> None:
    """What a process does. Its end of the socket closes when it ends, however it does."""
    mailbox_fd, tally_fd, _, place, identity, epoch, seed = numbers
    mailbox = Mailbox.attach(Mapping(GEOMETRY.size_bytes, fd=mailbox_fd).view())
    tally = Mapping(TALLY_BYTES, fd=tally_fd).view().cast("Q")
    member = Member(identity, epoch)
    if role == "caller":
        call(mailbox, member, tally, place=place, seed=seed)
    else:
        work(mailbox, member, tally, seed=seed)


if __name__ == "__main__":
    if sys.argv[1] == "--as":
        child(sys.argv[2], [int(number) for number in sys.argv[3:]])
    else:
        outcome = Referee(seed=1).run(exchanges=int(sys.argv[1]), kills=int(sys.argv[2]))
        sys.stdout.write(f"{outcome}\n")
