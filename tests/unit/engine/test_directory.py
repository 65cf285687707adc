from h3kv.core.types import BlockKey, BlockLocation, SegmentId
from h3kv.engine.directory import MemoryDirectory

A, B, C, D = (BlockKey(bytes([letter])) for letter in b"abcd")
FIRST, SECOND = SegmentId(1), SegmentId(2)


def test_longest_known_prefix_is_found() -> None:
    directory = MemoryDirectory()
    directory.publish([A, B], FIRST)
    directory.publish([D], SECOND)
    assert directory.find([A, B, C, D]) == [BlockLocation(FIRST, 0), BlockLocation(FIRST, 1)]
    assert directory.find([C, A]) == []
    assert directory.find([]) == []


def test_known_key_keeps_its_place_until_it_is_withdrawn() -> None:
    directory = MemoryDirectory()
    directory.publish([A, B], FIRST)
    directory.publish([A, B, C], SECOND)
    assert directory.find([A, B, C]) == [BlockLocation(FIRST, 0), BlockLocation(FIRST, 1), BlockLocation(SECOND, 2)]
    directory.withdraw([A, B], FIRST)
    assert directory.find([A, B, C]) == [BlockLocation(SECOND, at) for at in range(3)]
    directory.withdraw([A, B, C], SECOND)
    assert directory.find([A]) == []
    assert len(directory) == 0


def test_withdrawing_what_another_holds_changes_nothing() -> None:
    directory = MemoryDirectory()
    directory.publish([A], FIRST)
    directory.withdraw([A, B], SECOND)
    assert directory.find([A]) == [BlockLocation(FIRST, 0)]


def test_publishing_twice_is_publishing_once() -> None:
    directory = MemoryDirectory()
    directory.publish([A], FIRST)
    directory.publish([A], FIRST)
    directory.withdraw([A], FIRST)
    assert len(directory) == 0
