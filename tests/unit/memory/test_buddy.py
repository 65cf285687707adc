import pytest

from h3kv.memory.buddy import BuddyAllocator, extent_class


@pytest.mark.parametrize(("blocks", "size"), [(1, 1), (2, 2), (3, 4), (4, 4), (5, 8), (9, 16), (16, 16)])
def test_extent_class_is_the_smallest_that_holds(blocks: int, size: int) -> None:
    assert extent_class(blocks) == size


@pytest.mark.parametrize("blocks", [0, -1, 17])
def test_no_extent_holds_other_numbers_of_blocks(blocks: int) -> None:
    with pytest.raises(ValueError, match="1 to 16"):
        extent_class(blocks)


def test_lowest_offsets_come_first() -> None:
    room = BuddyAllocator(units=3)
    assert [room.allocate(16) for _ in range(4)] == [0, 16, 32, None]
    room.release(16)
    room.release(0)
    assert room.allocate(16) == 0
    room.check_integrity()


def test_small_extents_gather_in_broken_units() -> None:
    room = BuddyAllocator(units=2)
    assert [room.allocate(size) for size in (1, 8, 1, 2, 4)] == [0, 8, 1, 2, 4]
    assert room.allocate(16) == 16
    assert room.free_blocks == 0
    room.check_integrity()


def test_neighbours_become_one_again() -> None:
    room = BuddyAllocator(units=1)
    offsets = [room.allocate(1) for _ in range(16)]
    assert offsets == list(range(16))
    for offset in (3, 0, 2, 1, 15, 7, 5, 4, 6, 14, 12, 13, 9, 8, 11, 10):
        room.release(offset)
        room.check_integrity()
    assert room.allocate(16) == 0


def test_an_empty_room_holds_whatever_fits_by_sum() -> None:
    """Admission relies on it: a request alone in the store is never refused for want of a whole piece."""
    room = BuddyAllocator(units=3)
    sizes = [1] * 5 + [4] * 3 + [2, 1, 4, 8, 16]
    assert sum(sizes) == 48
    assert None not in [room.allocate(size) for size in sizes]
    assert room.free_blocks == 0
    room.check_integrity()
