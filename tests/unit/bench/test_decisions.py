"""Which command counts for an event of which the controller was told."""

from __future__ import annotations

import queue

from h3kv.bench.decisions import REASONS, first_command
from h3kv.core.types import SegmentId
from h3kv.rpc.command_receiver import BOTH, COLD, ReceivedCommand

START_NS = 1_000


def test_commands_of_earlier_events_are_carried_out_and_not_timed() -> None:
    late = ReceivedCommand(SegmentId(1), 2, COLD, "watermark", START_NS - 1)
    of_another_rule = ReceivedCommand(SegmentId(2), 2, BOTH, "earned", START_NS + 1)
    right = ReceivedCommand(SegmentId(3), 2, COLD, "watermark", START_NS + 2)
    after = ReceivedCommand(SegmentId(4), 2, COLD, "watermark", START_NS + 3)
    arrived: queue.SimpleQueue[ReceivedCommand] = queue.SimpleQueue()
    for command in (late, of_another_rule, right, after):
        arrived.put(command)
    followed: list[ReceivedCommand] = []
    found = first_command(arrived, REASONS["watermark"], since_ns=START_NS, follow=followed.append)
    assert found == right
    assert followed == [late, of_another_rule, right]
