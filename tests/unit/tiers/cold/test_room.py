import random

import pytest

from h3kv.core.limits import EXTENT_CLASSES_BLOCKS
from h3kv.testing.cold_segments import LAYOUT
from h3kv.tiers.cold.geometry import AreaGeometry, layout_mark
from h3kv.tiers.cold.room import Room
from h3kv.tiers.cold.superblock import AreaEntry

MARK = layout_mark(LAYOUT)
GEOMETRY = AreaGeometry(MARK, 2 * AreaGeometry(MARK, 0).unit_bytes)
"""Two units an area."""


def entry(used: int) -> AreaEntry:
    return AreaEntry(bytes(32), MARK, claimed=1, used=used)


def test_free_areas_are_taken_first_then_those_unused_for_longest() -> None:
    room = Room(GEOMETRY, [entry(5), entry(3), None, entry(9), entry(4)], ours=[3])
    assert room.reserve([16, 16]) == [96, 112]
    assert room.take_claims() == []
    taken = [room.reserve([16, 16]) for _ in range(4)]
    assert taken == [[64, 80], [32, 48], [128, 144], [0, 16]]
    assert room.take_claims() == [2, 1, 4, 0]
    assert room.take_claims() == []
    assert room.reserve([1]) is None
    room.check_integrity()


def test_what_does_not_fit_takes_nothing() -> None:
    room = Room(GEOMETRY, [None], ours=[])
    assert room.reserve([16, 8, 16]) is None
    assert room.used_blocks == 0
    assert room.reserve([16, 16]) == [0, 16]
    room.release([0])
    assert room.reserve([8, 8]) == [0, 8]
    room.check_integrity()


def test_what_does_not_fit_leaves_the_areas_of_others_alone() -> None:
    room = Room(GEOMETRY, [entry(5), None, entry(3)], ours=[])
    assert room.reserve([16]) == [32]
    assert room.reserve([16] * 6) is None
    assert room.take_claims() == [1], "only what the reservation before took"
    assert room.used_blocks == 16
    assert room.reserve([16, 16]) == [48, 64]
    assert room.take_claims() == [2]
    room.check_integrity()


@pytest.mark.parametrize("seed", range(20))
def test_restored_extents_lie_where_they_lay(seed: int) -> None:
    rng = random.Random(seed)
    before = Room(GEOMETRY, [None], ours=[])
    taken: dict[int, int] = {}
    for _ in range(60):
        size = rng.choice(EXTENT_CLASSES_BLOCKS)
        found = before.reserve([size])
        if found is not None:
            taken[found[0]] = size
        if taken and rng.random() < 0.5:
            gone = rng.choice(sorted(taken))
            before.release([gone])
            del taken[gone]
    after = Room(GEOMETRY, [entry(1)], ours=[0])
    after.restore(0, taken.items())
    after.check_integrity()
    assert after.used_blocks == sum(taken.values())
    free = [after.reserve([1]) for _ in range(GEOMETRY.blocks - after.used_blocks)]
    blocks = {found[0] for found in free if found is not None}
    assert len(blocks) == len(free)
    assert blocks.isdisjoint(block for first, size in taken.items() for block in range(first, first + size))
    after.release(taken)
    after.check_integrity()
