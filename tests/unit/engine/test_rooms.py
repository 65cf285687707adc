"""Sizes of segments, one after the other."""

from collections.abc import Iterator

from h3kv.engine.rooms import Rooms


def sizes_from(first_block: int) -> Iterator[int]:
    return iter([1, 4, 8, 16] if first_block == 0 else [2, 4])


def test_sizes_come_in_order_and_one_that_found_no_room_comes_again() -> None:
    rooms = Rooms(sizes_from, 0)
    assert rooms.take() == 1
    size = rooms.take()
    rooms.put_back(size)
    assert [rooms.take(), rooms.take()] == [4, 8]


def test_enough_sizes_are_taken_for_so_many_blocks() -> None:
    rooms = Rooms(sizes_from, 0)
    assert rooms.take_all(6) == [1, 4, 8]
    assert rooms.take_all(0) == []
    assert rooms.take() == 16


def test_sizes_begin_again_behind_what_is_kept() -> None:
    rooms = Rooms(sizes_from, 0)
    rooms.take()
    rooms.restart(5)
    assert rooms.take_all(6) == [2, 4]
