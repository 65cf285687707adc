import pytest

from h3kv.core.limits import EXTENT_CLASSES_BLOCKS
from h3kv.policy.admission import bound_cached_tokens, count_blocks, plan_rooms


@pytest.mark.parametrize(
    ("first", "prompt_end", "end", "sizes"),
    [
        (0, 0, 0, []),
        (0, 0, 1, [1]),
        (0, 1, 1, [1]),
        (0, 0, 4, [1, 1, 2]),
        (0, 17, 17, [1, 16]),
        (0, 40, 41, [1, 16, 16, 4, 2, 1, 1]),
        (0, 22, 60, [1, 16, 4, 1, 1, 2, 4, 8, 16, 4, 2, 1]),
        (5, 5, 5, []),
        (5, 5, 6, [1]),
        (5, 21, 22, [16, 1]),
        (3, 2, 4, [1]),
    ],
)
def test_rooms_cover_the_blocks_with_the_sinks_apart(first: int, prompt_end: int, end: int, sizes: list[int]) -> None:
    assert plan_rooms(first, prompt_end, end) == sizes


def test_rooms_are_extent_classes_that_add_up() -> None:
    for first in range(0, 40, 3):
        for prompt_end in range(first, 60, 7):
            for end in range(prompt_end, 90, 5):
                sizes = plan_rooms(first, prompt_end, end)
                assert sum(sizes) == end - first
                assert set(sizes) <= set(EXTENT_CLASSES_BLOCKS)


def test_last_token_of_an_answer_takes_no_room() -> None:
    assert bound_cached_tokens(64, 1) == 64
    assert count_blocks(bound_cached_tokens(64, 1)) == 1
    assert count_blocks(bound_cached_tokens(64, 2)) == 2
