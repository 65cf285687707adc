"""How long the controller takes from an event of telemetry to the command that follows from it.

    this process: worker that reports --gRPC--> migration_controller --gRPC--> this process: takes commands
                  ^ the clock starts            a process of its own           ^ the clock ends

The controller knows so many segments, a tenth of which lie in HOST, and hears once a tick which segments drew
attention. Each trial ends with an event from which a command follows, by one rule after the other:

    room        a segment of the cold store was touched, and HOST has room      -> it is promoted
    earned      one was touched in three ticks in a row, and HOST is rather full -> the coldest goes for it
    watermark   HOST is too full                                                 -> the coldest idle ones go

What a call there and back takes on this machine meanwhile, without any rule, is measured beside it.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import queue
import statistics
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from h3kv.bench.measure import Progress, turns
from h3kv.bench.results import Results
from h3kv.bench.service_process import service_process
from h3kv.core.errors import PeerTimeoutError
from h3kv.core.types import BlockKey, SegmentId, Tier
from h3kv.core.units import NS_PER_MS, NS_PER_S
from h3kv.policy.migration_state import MoveReason
from h3kv.rpc.addresses import UnixAddress
from h3kv.rpc.client import PeerChannel
from h3kv.rpc.command_receiver import BOTH, COLD, CommandReceiver, ReceivedCommand
from h3kv.rpc.reports import ProcessName, Report, ReportedSegment, SegmentTouch, TierRoom
from h3kv.rpc.telemetry_reporter import TelemetryReporter
from h3kv.telemetry.recorder import Recorder

TICK_NS: Final = 20 * NS_PER_MS
"""A fifth of the usual length: as much happens in a second as in five."""
SETTINGS: Final = {
    "RULES__TICK": "20ms",
    "RULES__EVICTION_THRESHOLD": "200ms",
    "RULES__HYSTERESIS": "1ms",
    "RULES__DISPLACE_MARGIN": "1.0",
}
"""Rules that wait for little: they decide as usual, and more often. Ticks in a row stay one use of a segment."""
SEGMENT_BYTES: Final = 1 << 20
HOST_PART: Final = 10
"""One of so many segments lies in HOST."""
TOUCHED: Final = 64
"""Segments that a tick's report names: sixteen sequences that read four each."""
DEADLINE_S: Final = 60.0
"""For a command to come: on a busy machine the first takes seconds, after all segments were told."""
REASONS: Final = {
    "room": {MoveReason.ROOM},
    "earned": {MoveReason.DISPLACED, MoveReason.EARNED},
    "watermark": {MoveReason.WATERMARK},
}
"""Of the commands that follow from each rule."""
USED: Final = {"room": 0.75, "earned": 0.92, "watermark": 0.97}
"""Share of HOST that is in use when a rule is tried."""
PLAIN_MASS: Final = 0.05
"""Of attention, in the segments of a tick's report."""


@dataclass(frozen=True, slots=True)
class Sizes:
    """How much is measured."""

    segments: tuple[int, ...]
    """Of each controller; the first number is the one that the bar is for."""
    rounds: int
    trials: int
    """Of each rule, in each round."""


FULL: Final = Sizes((2_000, 20_000), rounds=9, trials=40)
QUICK: Final = Sizes((2_000, 20_000), rounds=2, trials=10)


def measure(results: Results, folder: Path, *, sizes: Sizes, progress: Progress) -> None:
    """Put `controller.decision_ms_p50` and `_p99`, the same of larger nodes, and of a call without rules.

    Args:
        results: where they go.
        folder: for sockets; its path must be short.
        sizes: how much is measured.
        progress: hears of rounds.

    Raises:
        ConfigError: `services` is not there: the wheel leaves it out.
        PeerError: the controller does not come up, or decides nothing.
    """
    waits_ns: dict[str, list[list[int]]] = {}
    with contextlib.ExitStack() as stack:
        contestants: dict[str, Trials] = {}
        for segments in sizes.segments:
            place = folder / str(segments)
            place.mkdir()
            contestants[_name(segments, sizes)] = stack.enter_context(_opened(place, segments))
        for repetition in range(sizes.rounds):
            for name, trials in turns(contestants.items(), repetition):
                waits_ns.setdefault(name, []).append(trials.decide(sizes.trials))
                waits_ns.setdefault("controller.call_ms", []).append(trials.call(sizes.trials))
            progress(f"decisions: round {repetition + 1} of {sizes.rounds}")
    for name, rounds in waits_ns.items():
        for percentile in (50, 99):
            results.put(f"{name}_p{percentile}", _median_percentile_ms(rounds, percentile))


def _name(segments: int, sizes: Sizes) -> str:
    is_first = segments == sizes.segments[0]
    return "controller.decision_ms" if is_first else f"controller.decision_{segments // 1000}k_ms"


def _median_percentile_ms(rounds: list[list[int]], percentile: int) -> float:
    of_rounds = [statistics.quantiles(waits_ns, n=100, method="inclusive")[percentile - 1] for waits_ns in rounds]
    return statistics.median(of_rounds) / NS_PER_MS


@contextlib.contextmanager
def _opened(folder: Path, segments: int) -> Iterator[Trials]:
    """A controller that knows so many segments."""
    arrived: queue.SimpleQueue[ReceivedCommand] = queue.SimpleQueue()
    receiver = CommandReceiver(UnixAddress(folder / "nvme_io.sock"), arrived.put)
    address = UnixAddress(folder / "controller.sock")
    settings = {
        "NVME_IO": f"unix://{folder / 'nvme_io.sock'}",
        "GPU_WORKER": f"unix://{folder / 'gpu_worker.sock'}",
        **SETTINGS,
    }
    receiver.start()
    try:
        with service_process("migration_controller", address, settings), PeerChannel(address) as channel:
            process = ProcessName("gpu_worker", os.urandom(16))
            reporter = TelemetryReporter(channel, process, telemetry=Recorder())
            try:
                yield Trials(channel, reporter, arrived, segments=segments)
            finally:
                reporter.stop()
    finally:
        receiver.stop()


def first_command(
    arrived: queue.SimpleQueue[ReceivedCommand],
    reasons: Collection[str],
    *,
    since_ns: int,
    follow: Callable[[ReceivedCommand], None],
) -> ReceivedCommand:
    """The first command that came since then for one of these reasons. Others follow from events of before.

    Args:
        arrived: commands, as they come.
        reasons: of what is waited for.
        since_ns: on the monotonic clock.
        follow: called with every command, the one that is returned too: all are carried out.

    Raises:
        PeerTimeoutError: none comes.
    """
    end_ns = time.monotonic_ns() + int(DEADLINE_S * NS_PER_S)
    while (left_ns := end_ns - time.monotonic_ns()) > 0:
        with contextlib.suppress(queue.Empty):
            command = arrived.get(timeout=left_ns / NS_PER_S)
            follow(command)
            if command.received_ns >= since_ns and command.reason in reasons:
                return command
    message = f"no command in {DEADLINE_S:.0f} s: what the controller wrote above says why"
    raise PeerTimeoutError(message, peer="migration_controller")


class Trials:
    """A worker with its segments, as far as the controller sees it: what it is told to move has moved at once.

    Args:
        channel: to the controller.
        reporter: of the worker, not started.
        arrived: commands.
        segments: how many there are.
    """

    def __init__(
        self,
        channel: PeerChannel,
        reporter: TelemetryReporter,
        arrived: queue.SimpleQueue[ReceivedCommand],
        *,
        segments: int,
    ) -> None:
        self._channel = channel
        self._reporter = reporter
        self._arrived = arrived
        self._never = threading.Event()
        self._ticks = itertools.count(1)
        self._rules = {"room": self._room, "earned": self._earned, "watermark": self._watermark}
        self._generations = dict.fromkeys(range(segments), 1)
        self._in_host = segments // HOST_PART
        self._host = dict.fromkeys(range(self._in_host))
        """In the order in which they came."""
        self._cold = dict.fromkeys(range(self._in_host, segments))
        self._moved: dict[int, None] = {}
        """Of which the next report tells."""
        self._capacity_bytes = 2 * self._in_host * SEGMENT_BYTES
        """Rooms are told as each rule needs them; which segments lie there matters to what is searched."""
        whole = tuple(self._segment(number) for number in range(segments))
        reporter.report(Report(segments=whole, tiers=self._rooms("room")))
        reporter.start()
        self._room()  # It is answered only after all of that.

    def decide(self, trials: int) -> list[int]:
        """Nanoseconds from event to command: so many of each rule, in turn."""
        waits_ns = []
        for _ in range(trials):
            for rule in self._rules.values():
                waits_ns.append(rule())
                self._settle()
        return waits_ns

    def call(self, calls: int) -> list[int]:
        """Nanoseconds of a call to the controller in which nothing is decided."""
        waits_ns = []
        for _ in range(calls):
            start_ns = time.monotonic_ns()
            self._channel.wait_until_serving(timeout_ns=int(DEADLINE_S * NS_PER_S))
            waits_ns.append(time.monotonic_ns() - start_ns)
        return waits_ns

    def _room(self) -> int:
        return self._after("room", {next(iter(self._cold)): 1.0})

    def _earned(self) -> int:
        wanted = next(iter(self._cold))
        for _ in range(2):
            self._reporter.report(self._report("earned", {wanted: 1.0}))
            self._pause()
        return self._after("earned", {wanted: 1.0})

    def _watermark(self) -> int:
        return self._after("watermark", {})

    def _after(self, rule: str, touched: Mapping[int, float]) -> int:
        """Tell of the event; how long the first command took that follows from it."""
        report = self._report(rule, touched)
        start_ns = time.monotonic_ns()
        self._reporter.report(report)
        command = first_command(self._arrived, REASONS[rule], since_ns=start_ns, follow=self._obey)
        return command.received_ns - start_ns

    def _obey(self, command: ReceivedCommand) -> None:
        self._place(command.segment, command.tiers, command.generation)

    def _settle(self) -> None:
        """Take what else was commanded, and tell where things lie and that HOST has room, until nothing more comes."""
        self._pause()
        self._drain()
        is_still = False
        while not is_still:
            while len(self._host) > self._in_host:
                self._follow(next(iter(self._host)), COLD)
            while len(self._host) < self._in_host:
                self._follow(next(iter(self._cold)), BOTH)
            self._reporter.report(self._report("room", {}))
            # A whole tick, and what is left of this one.
            self._pause()
            self._pause()
            is_still = self._drain() == 0

    def _pause(self) -> None:
        """Until the next tick has begun."""
        self._never.wait((TICK_NS - time.monotonic_ns() % TICK_NS) / NS_PER_S)

    def _drain(self) -> int:
        """Carry out what has come. How much that was."""
        count = 0
        with contextlib.suppress(queue.Empty):
            while True:
                self._obey(self._arrived.get_nowait())
                count += 1
        return count

    def _follow(self, number: int, tiers: frozenset[Tier]) -> None:
        """Move a segment by the worker's own rules."""
        self._place(number, tiers, self._generations[number] + 1)

    def _place(self, number: int, tiers: frozenset[Tier], generation: int) -> None:
        source, target = (self._cold, self._host) if tiers == BOTH else (self._host, self._cold)
        source.pop(number, None)
        target[number] = None
        self._generations[number] = generation
        self._moved[number] = None

    def _report(self, rule: str, touched: Mapping[int, float]) -> Report:
        """Of the next tick. What came to HOST last is read in each, the rest no more: it is colder."""
        read = list(self._host)[-min(TOUCHED, len(self._host) // 2) :]
        masses = {**dict.fromkeys(read, PLAIN_MASS), **touched}
        moved = tuple(self._segment(number) for number in self._moved)
        self._moved.clear()
        return Report(
            tiers=self._rooms(rule),
            tick=next(self._ticks),
            touches=tuple(SegmentTouch(SegmentId(number), mass) for number, mass in masses.items()),
            segments=moved,
        )

    def _rooms(self, rule: str) -> tuple[TierRoom, ...]:
        used_bytes = int(USED[rule] * self._capacity_bytes)
        cold_bytes = 4 * len(self._generations) * SEGMENT_BYTES
        return TierRoom(Tier.HOST, self._capacity_bytes, used_bytes), TierRoom(Tier.NVME, cold_bytes, cold_bytes // 4)

    def _segment(self, number: int) -> ReportedSegment:
        return ReportedSegment(
            segment=SegmentId(number),
            generation=self._generations[number],
            key=BlockKey(number.to_bytes(32, "big")),
            blocks=16,
            size_bytes=SEGMENT_BYTES,
            tiers=BOTH if number in self._host else COLD,
        )
