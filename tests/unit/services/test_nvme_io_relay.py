"""Commands reach the holder of their segment once, and everyone learns how moves ended."""

from __future__ import annotations

import contextlib
import itertools

import pytest

from h3kv.api.common.v1 import commands_pb2, types_pb2
from h3kv.api.nvme_io.v1 import nvme_io_service_pb2 as pb
from h3kv.core.errors import PeerTimeoutError, RequestError
from services.nvme_io.relay import EVENTS_KEPT, Relay

HOLDER, TOKEN, SENDER = 2, b"h" * 16, b"s" * 16
NVME, HOST = types_pb2.TIER_NVME, types_pb2.TIER_HOST


class Clock:
    """Moves on with each look."""

    def __init__(self) -> None:
        self.now = 0

    def __call__(self) -> int:
        self.now += 1_000_000
        return self.now


def command(number: int, *, owner: bytes = TOKEN, timeout_ns: int = 10**9, reason: str = "hot") -> commands_pb2.Command:
    return commands_pb2.Command(
        id=commands_pb2.CommandId(sender_boot_token=SENDER, number=number),
        segment=types_pb2.SegmentRef(key=bytes(32), segment=number, owner_boot_token=owner, generation=1),
        timeout_ns=timeout_ns,
        reason=reason,
    )


def ended(number: int, outcome: commands_pb2.Outcome = commands_pb2.OUTCOME_DONE) -> pb.MoveEnded:
    sent = commands_pb2.CommandId(sender_boot_token=SENDER, number=number)
    return pb.MoveEnded(outcome=commands_pb2.CommandOutcome(id=sent, outcome=outcome), reason="hot")


def events(relay: Relay, holder: int | None, after: int) -> list[pb.WatchMovesResponse]:
    """What a watcher has to be told now."""
    found: list[pb.WatchMovesResponse] = []
    with contextlib.suppress(PeerTimeoutError):
        found.extend(relay.watch(holder, after, is_over=lambda: False, deadline_ns=0))
    return found


@pytest.fixture
def relay() -> Relay:
    relay = Relay(Clock())
    relay.join(HOLDER, TOKEN)
    return relay


def test_command_sent_twice_reaches_its_holder_once_and_keeps_its_first_outcome(relay: Relay) -> None:
    for _ in range(2):
        (outcome,) = relay.pass_on([command(1)], NVME, HOST)
        assert outcome.outcome == commands_pb2.OUTCOME_RELAYED
    (event,) = events(relay, HOLDER, 0)
    assert (event.event, event.command.command.id.number, event.command.target) == (1, 1, HOST)
    assert events(relay, None, 0) == []
    relay.report([ended(1, commands_pb2.OUTCOME_BUSY), ended(1)])
    (outcome,) = relay.pass_on([command(1)], NVME, HOST)
    assert outcome.outcome == commands_pb2.OUTCOME_BUSY
    for holder, first in ((None, 0), (HOLDER, 1)):
        (event,) = events(relay, holder, first)
        assert event.move.outcome.outcome == commands_pb2.OUTCOME_BUSY


def test_command_that_is_read_late_says_the_time_that_is_left(relay: Relay) -> None:
    relay.pass_on([command(1, timeout_ns=500_000_000)], NVME, HOST)
    (early,) = events(relay, HOLDER, 0)
    assert 0 < early.command.command.timeout_ns < 500_000_000
    for _ in range(500):
        events(relay, None, 0)
    (late,) = events(relay, HOLDER, 0)
    assert late.command.command.timeout_ns == 0


def test_commands_for_nobody_or_too_late_do_nothing(relay: Relay) -> None:
    strange, late = command(1, owner=b"x" * 16), command(2, timeout_ns=0)
    outcomes = [each.outcome for each in relay.pass_on([strange, late], NVME, HOST)]
    assert outcomes == [commands_pb2.OUTCOME_UNKNOWN_SEGMENT, commands_pb2.OUTCOME_EXPIRED]
    assert events(relay, HOLDER, 0) == []


def test_malformed_call_does_nothing_at_all(relay: Relay) -> None:
    for bad in (command(0), command(2, owner=b""), command(2, reason="No Label"), command(1)):
        with pytest.raises(RequestError):
            relay.pass_on([command(1), bad], NVME, HOST)
    assert events(relay, HOLDER, 0) == []


def test_outcome_of_an_unknown_command_is_passed_over_and_moves_of_ones_own_are_told(relay: Relay) -> None:
    relay.report([ended(7), pb.MoveEnded(reason="lru")])
    (event,) = events(relay, None, 0)
    assert event.move.reason == "lru"


def test_watcher_that_was_away_goes_on_where_it_was_unless_too_much_happened(relay: Relay) -> None:
    relay.report([pb.MoveEnded(size_bytes=at) for at in range(10)])
    assert [event.event for event in events(relay, None, 6)] == [7, 8, 9, 10]
    relay.report([pb.MoveEnded()] * EVENTS_KEPT)
    for lost in (6, 10**6):
        with pytest.raises(RequestError):
            next(relay.watch(None, lost, is_over=lambda: False, deadline_ns=0))
    newest = relay.watch(None, None, is_over=lambda: False, deadline_ns=1 << 60)
    gone = itertools.chain([False], itertools.repeat(True))
    assert list(relay.watch(None, 10 + EVENTS_KEPT, is_over=lambda: next(gone), deadline_ns=1 << 60)) == []
    relay.close()
    assert list(newest) == []


def test_stream_of_a_holder_ends_with_it(relay: Relay) -> None:
    stream = relay.watch(HOLDER, 0, is_over=lambda: False, deadline_ns=1 << 60)
    relay.pass_on([command(1)], NVME, HOST)
    assert next(stream).command.command.id.number == 1
    relay.leave(HOLDER)
    assert list(stream) == []
