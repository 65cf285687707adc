"""A cold store over many lives against a dict: whatever is done in whatever order, what was written can be found."""

from __future__ import annotations

import contextlib
import random
from pathlib import Path

import pytest

from h3kv.core.errors import TierFullError
from h3kv.core.types import SegmentId, SlotHandle
from h3kv.testing.cold_segments import open_store as open_cold_store
from h3kv.testing.cold_segments import payload, read_segment, restore, settle, submit_segments
from h3kv.testing.faulty_files import FaultPlan, FaultyFiles
from h3kv.tiers.cold import ColdStore

UNITS = 3
STEPS = 40
LIVES = 4


class Model:
    """What must be in the store: numbers with the segments and slots that hold them now."""

    def __init__(self, rng: random.Random) -> None:
        self.rng = rng
        self.held: dict[int, tuple[SegmentId, list[SlotHandle]]] = {}
        self.next_number = 1

    def adopt(self, store: ColdStore) -> None:
        """A new process finds exactly what is held."""
        kept = restore(store, first=1_000_000 + self.next_number)
        assert set(kept) == set(self.held)
        self.held = {number: (segment.segment, list(segment.handles_L)) for number, segment in kept.items()}

    def write(self, store: ColdStore) -> None:
        sizes = [(self.next_number + at, self.rng.choice([1, 2, 3, 7, 16])) for at in range(self.rng.randint(1, 3))]
        self.next_number += len(sizes)
        try:
            handles = submit_segments(store, sizes)
        except TierFullError:
            return
        gone = {number for number in handles if self.rng.random() < 0.15}
        for number in gone:
            store.release(handles[number])
        settle(store, 2 * len(sizes))
        self.held |= {number: (SegmentId(number), handles[number]) for number in handles.keys() - gone}

    def release(self, store: ColdStore) -> None:
        for number in self.rng.sample(sorted(self.held), min(2, len(self.held))):
            store.release(self.held.pop(number)[1])

    def read(self, store: ColdStore) -> None:
        for number in self.rng.sample(sorted(self.held), min(2, len(self.held))):
            segment, handles = self.held[number]
            for layer, (data, error) in enumerate(read_segment(store, segment, handles)):
                assert error is None
                assert data == bytes(payload(number, layer, len(data)))


@pytest.mark.parametrize("seed", range(12))
def test_what_was_written_and_not_released_is_there_in_every_life(tmp_path: Path, seed: int) -> None:
    rng = random.Random(seed)
    model = Model(rng)
    for _ in range(LIVES):
        store = open_cold_store(tmp_path, units=UNITS, engine=lambda files: FaultyFiles(files, FaultPlan()))
        with contextlib.closing(store):
            model.adopt(store)
            for _ in range(STEPS):
                rng.choice([model.write, model.write, model.release, model.read])(store)
                store.check_integrity()
