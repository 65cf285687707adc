"""How a controller learns again, after a restart, what lies where."""

from h3kv.core.types import BlockKey, SegmentId, Tier
from h3kv.directory.controller_view import (
    ControllerView,
    OwnerReport,
    void_entries,
    with_entries,
    with_report,
    without,
)
from h3kv.directory.entries import DirectoryEntry
from h3kv.directory.memory import MemoryNodeDirectory
from h3kv.policy.migration import step
from h3kv.policy.migration_config import MigrationConfig
from h3kv.policy.migration_state import (
    MigrationState,
    Owner,
    OwnerJoined,
    OwnerLeft,
    SegmentGone,
    SegmentRef,
    SegmentReported,
)
from h3kv.testing.clock import ManualClock

HOST, NVME = Tier.HOST, Tier.NVME
OLD, NEW = Owner("gpu_worker", "boot-1"), Owner("gpu_worker", "boot-2")


def entry(number: int, owner: Owner = OLD, *, generation: int = 1, tier: Tier = HOST) -> DirectoryEntry:
    return DirectoryEntry(BlockKey(number.to_bytes(32)), tier, owner, SegmentId(number), generation, 0)


def reported(number: int, owner: Owner = OLD, *, generation: int = 1, tier: Tier = HOST) -> SegmentReported:
    return SegmentReported(owner, SegmentId(number), generation, 100, frozenset({tier}))


def test_a_restarted_controller_knows_whom_to_expect_and_commands_nothing_until_they_report() -> None:
    directory = MemoryNodeDirectory(ManualClock())
    directory.join(OLD)
    directory.publish([entry(1), entry(2)])
    view = with_entries(ControllerView(), directory.entries())
    assert view.awaited == (OLD,)
    assert view.owners["gpu_worker"].segments == {}
    view, events = with_report(view, OwnerReport(OLD, (reported(2), reported(3))))
    assert events == (OwnerJoined(OLD), reported(2), reported(3))
    assert view.awaited == ()
    assert list(view.owners["gpu_worker"].hints.values()) == [entry(2)]
    assert void_entries(view, directory.entries()) == (entry(1),)
    directory.withdraw(void_entries(view, directory.entries()))
    assert list(directory.entries()) == [entry(2)]
    directory.check_integrity()


def test_reports_give_only_what_changed() -> None:
    view, _ = with_report(ControllerView(), OwnerReport(OLD, (reported(1), reported(2), reported(3))))
    moved = reported(2, generation=2, tier=NVME)
    view, events = with_report(view, OwnerReport(OLD, (reported(1), moved, reported(4))))
    assert events == (SegmentGone(OLD, SegmentId(3)), moved, reported(4))
    _, events = with_report(view, OwnerReport(OLD, (reported(1), moved, reported(4))))
    assert events == ()


def test_another_boot_token_is_a_restart() -> None:
    view, events = with_report(ControllerView(), OwnerReport(OLD, (reported(1), reported(2))))
    state, _ = step(MigrationState(MigrationConfig()), events, 1)
    view, events = with_report(view, OwnerReport(NEW, (reported(1, NEW),)))
    assert events == (OwnerJoined(NEW), reported(1, NEW))
    state, _ = step(state, events, 2)
    assert set(state.segments) == {SegmentRef("gpu_worker", SegmentId(1))}
    assert void_entries(view, [entry(1), entry(1, NEW)]) == (entry(1),)


def test_owners_are_believed_before_the_directory() -> None:
    view, _ = with_report(ControllerView(), OwnerReport(OLD, (reported(1, generation=2, tier=NVME),)))
    late = [entry(1), entry(1, generation=2), entry(9), entry(1, NEW, generation=2, tier=NVME)]
    assert with_entries(view, late) == view
    true = entry(1, generation=2, tier=NVME)
    assert list(with_entries(view, [true]).owners["gpu_worker"].hints.values()) == [true]


def test_a_process_that_ends_takes_its_word_along_but_not_a_later_lifes() -> None:
    view, _ = with_report(ControllerView(), OwnerReport(NEW, (reported(1, NEW),)))
    assert without(view, OLD) == (view, ())
    assert without(view, NEW) == (ControllerView(), (OwnerLeft(NEW),))
    hinted = with_entries(ControllerView(), [entry(1)])
    assert without(hinted, OLD) == (ControllerView(), ())
