"""Break the N-th operation of a store's life, for every N: after a restart each segment is absent or intact."""

from __future__ import annotations

import contextlib
import itertools
import os
import shutil
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import pytest

from h3kv.core.errors import H3Error, SlabCorruptError, StoreError, TierBrokenError
from h3kv.core.types import SegmentId, SlabKey, SlotHandle, StoredSegment
from h3kv.testing.cold_segments import (
    LAYOUT,
    OTHER_FINGERPRINT,
    is_intact,
    number_of,
    open_store,
    payload,
    read_segment,
    restore,
    settle,
    submit_segments,
    write_segments,
)
from h3kv.testing.faulty_files import CrashError, FaultPlan, FaultyFiles
from h3kv.tiers.cold import ColdStore
from h3kv.tiers.cold.config import Wrap
from h3kv.tiers.cold.format import format_store
from h3kv.tiers.cold.geometry import AREA_ALIGNMENT, MIB, AreaGeometry, layout_mark
from h3kv.tiers.io import FLUSH, WRITE

SEED = 7
UNITS = 3


@dataclass
class Story:
    """What one process asked for, and what it was told."""

    acknowledged: set[int] = field(default_factory=set)
    released: set[int] = field(default_factory=set)
    handles: dict[int, list[SlotHandle]] = field(default_factory=dict)

    def write(self, store: ColdStore, *segments: tuple[int, int]) -> None:
        handles = submit_segments(store, segments)
        ended = settle(store, 2 * len(segments))
        for number in handles:
            errors = [completion.error for completion in ended if completion.move.key.segment == number]
            self.handles[number] = handles[number]
            if errors == [None, None]:
                self.acknowledged.add(number)
            else:
                assert all(isinstance(error, TierBrokenError) for error in errors), errors
                assert store.lookup(SlabKey(SegmentId(number), 0)) is None
                assert store.is_degraded

    def release(self, store: ColdStore, number: int) -> None:
        store.release(self.handles[number])
        self.released.add(number)


def live(folder: Path, plan: FaultPlan, story: Story, *, wrap: Wrap = "none") -> None:
    """Two processes one after the other: they write, give back, and write again where something lay."""
    for first, room in ((1, 16), (10, 8)):
        store = open_store(folder, units=UNITS, engine=lambda files: FaultyFiles(files, plan), wrap=wrap)
        with contextlib.closing(store):
            kept = restore(store)
            story.handles.update({number: list(segment.handles_L) for number, segment in kept.items()})
            for number in kept.keys() & {4}:
                story.release(store, number)
            story.write(store, (first, 2), (first + 1, room), (first + 2, 1))
            story.release(store, first + 1)
            story.write(store, (first + 3, room))
            story.write(store, (first + 4, 1), (first + 5, 1))
            story.release(store, first + 4)
            store.check_integrity()


@pytest.fixture
def folders(tmp_path: Path) -> Iterator[Path]:
    """Where stores are made: in memory, if the machine has such a place that knows direct I/O."""
    if not os.access("/dev/shm", os.W_OK):
        yield tmp_path
        return
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        yield Path(folder)


def check(folder: Path, story: Story) -> None:
    """Nothing that was acknowledged is lost, nothing that is found is wrong."""
    store = open_store(folder, units=UNITS)
    with contextlib.closing(store):
        kept = restore(store)
        store.check_integrity()
        assert set(kept) >= story.acknowledged - story.released
        for segment in kept.values():
            assert is_intact(store, segment)
        before = store.statistics().used_bytes
        story.write(store, (100, 1))
        assert store.statistics().used_bytes > before
        store.check_integrity()


def operations(folders: Path, kinds: frozenset[int]) -> int:
    """How many operations of these kinds the story has when nothing breaks."""
    folder = folders / "whole"
    folder.mkdir()
    plan = FaultPlan(kinds=kinds)
    live(folder, plan, Story())
    return plan.done


@pytest.mark.slow
@pytest.mark.parametrize(("kept", "wrap"), [("none", "none"), ("some", "none"), ("all", "none"), ("some", "lz4")])
def test_crash_at_any_write_or_flush_leaves_segments_absent_or_intact(
    folders: Path, kept: Literal["none", "some", "all"], wrap: Wrap
) -> None:
    kinds = frozenset({WRITE, FLUSH})
    for number in range(1, operations(folders, kinds) + 1):
        folder = folders / str(number)
        folder.mkdir()
        story = Story()
        with pytest.raises(CrashError):
            live(folder, FaultPlan(number, "crash", kinds=kinds, kept=kept, seed=SEED), story, wrap=wrap)
        check(folder, story)


@pytest.mark.slow
@pytest.mark.parametrize("for_ever", [False, True], ids=["once", "for ever"])
@pytest.mark.parametrize(("mode", "wrap"), [("error", "none"), ("torn", "none"), ("torn", "lz4")])
def test_failed_write_or_flush_leaves_segments_absent_or_intact(
    folders: Path, mode: Literal["error", "torn"], wrap: Wrap, for_ever: bool
) -> None:
    kinds = frozenset({WRITE, FLUSH})
    for number in range(1, operations(folders, kinds) + 1):
        folder = folders / str(number)
        folder.mkdir()
        story = Story()
        with contextlib.suppress(H3Error):
            live(folder, FaultPlan(number, mode, for_ever=for_ever, kinds=kinds), story, wrap=wrap)
        check(folder, story)


@pytest.mark.slow
def test_flipped_bit_in_any_write_is_never_served(folders: Path) -> None:
    kinds = frozenset({WRITE})
    damaged_in_all = 0
    for number in range(1, operations(folders, kinds) + 1):
        folder = folders / str(number)
        folder.mkdir()
        with contextlib.suppress(StoreError):
            live(folder, FaultPlan(number, "flip", kinds=kinds), Story())
        store = open_store(folder, units=UNITS)
        with contextlib.closing(store):
            damaged = [kept for kept in restore(store).values() if is_refused(store, kept)]
            assert len(damaged) <= 1
            damaged_in_all += len(damaged)
            store.check_integrity()
    assert damaged_in_all > 0, "no bit was flipped in what a restart finds"


def is_refused(store: ColdStore, kept: StoredSegment) -> bool:
    """Whether a slab of a segment is refused as damaged. Every other slab has the bytes that were written."""
    number, is_damaged = number_of(kept.label), False
    for layer, (data, error) in enumerate(read_segment(store, kept.segment, kept.handles_L)):
        if error is None:
            assert data == bytes(payload(number, layer, len(data))), "damaged bytes were served"
        else:
            assert isinstance(error, SlabCorruptError), error
            is_damaged = True
    return is_damaged


@pytest.mark.slow
@pytest.mark.parametrize("kept", ["none", "some", "all"])
def test_crash_while_an_area_changes_hands_leaves_both_models_absent_or_intact(
    folders: Path, kept: Literal["none", "some", "all"]
) -> None:
    made = folders / "made"
    made.mkdir()
    capacity = make_two_areas(made)
    with contextlib.closing(open_store(made, capacity_bytes=capacity)) as store:
        write_segments(store, [(1, 16), (2, 16)])
    for number in itertools.count(1):
        folder = folders / f"taken{number}"
        shutil.copytree(made, folder)
        plan = FaultPlan(number, "crash", kinds=frozenset({WRITE, FLUSH}), kept=kept, seed=SEED)
        acknowledged = take_area_over(folder, capacity, plan)
        with contextlib.closing(open_store(folder, capacity_bytes=capacity, fingerprint=OTHER_FINGERPRINT)) as store:
            found = restore(store)
            assert set(found) >= acknowledged
            assert all(is_intact(store, segment) for segment in found.values())
        with contextlib.closing(open_store(folder, capacity_bytes=capacity)) as store:
            found = restore(store)
            assert 2 in found, "the area that nobody took"
            assert all(is_intact(store, segment) for segment in found.values())
        if plan.done < number:
            return


def take_area_over(folder: Path, capacity: int, plan: FaultPlan) -> set[int]:
    """Numbers of another model's segments that it was told were written."""
    acknowledged: set[int] = set()
    with contextlib.suppress(CrashError):
        store = open_store(
            folder,
            capacity_bytes=capacity,
            fingerprint=OTHER_FINGERPRINT,
            engine=lambda files: FaultyFiles(files, plan),
        )
        with contextlib.closing(store):
            write_segments(store, [(21, 8), (22, 8)])
            acknowledged = {21, 22}
    return acknowledged


def make_two_areas(folder: Path) -> int:
    """A store of two areas of one unit each; its cap."""
    area_bytes = -(-AreaGeometry(layout_mark(LAYOUT), 0).unit_bytes // AREA_ALIGNMENT) * AREA_ALIGNMENT
    capacity = MIB + 2 * area_bytes
    format_store(
        folder,
        lambda files: FaultyFiles(files, FaultPlan()),
        capacity_bytes=capacity,
        area_bytes=area_bytes,
        yes=None,
    )
    return capacity
