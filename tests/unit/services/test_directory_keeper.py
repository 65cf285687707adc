"""What the controller publishes of its node."""

from __future__ import annotations

import logging

import pytest

from h3kv.core.types import BlockKey, SegmentId, Tier
from h3kv.core.units import NS_PER_S
from h3kv.directory.memory import MemoryNodeDirectory
from h3kv.policy.migration_state import Owner
from h3kv.rpc.reports import ReportedSegment
from h3kv.testing.clock import ManualClock
from services.migration_controller.directory_keeper import DirectoryKeeper
from services.migration_controller.view import Change


def change(name: str, number: int) -> Change:
    key = BlockKey(number.to_bytes(32, "big"))
    segment = ReportedSegment(SegmentId(number), 1, key, 16, 1 << 20, frozenset({Tier.HOST}))
    return Change(Owner(name, "aa" * 16), said=(segment,), gone=())


def test_a_name_that_is_none_costs_its_own_entries_alone(caplog: pytest.LogCaptureFixture) -> None:
    directory = MemoryNodeDirectory(ManualClock())
    keeper = DirectoryKeeper(directory, node="here")
    keeper.start()
    with caplog.at_level(logging.ERROR):
        keeper.changed(change("gpu worker!", 1))
        keeper.changed(change("gpu_worker", 2))
        keeper.stop(timeout_ns=10 * NS_PER_S)
    assert [each.owner.name for each in directory.entries()] == ["here.gpu_worker"]
    assert "directory_failed" in caplog.text
