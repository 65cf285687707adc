import itertools

import pytest

from h3kv.core.limits import BLOCK_TOKENS
from h3kv.policy.chunking import chunk_end


def ends(prompt: int, *, start: int = 0, base: int = 256, room: int = 4096, resident: int = 1024) -> list[int]:
    found = [start]
    while found[-1] < prompt:
        found.append(chunk_end(found[-1], prompt, base_tokens=base, room_tokens=room, resident_tokens=resident))
    return found[1:]


def test_prompt_that_memory_holds_is_cut_at_multiples_of_the_base() -> None:
    assert ends(900) == [256, 512, 768, 900]
    assert ends(1280) == [256, 512, 768, 1024, 1280]


def test_chunks_grow_with_the_cold_tokens_that_they_read() -> None:
    assert ends(6000) == [256, 512, 768, 1024, 1280, 1792, 2304, 3072, 4096, 5376, 6000]


def test_chunks_deep_down_are_shorter_while_memory_holds_the_prompt() -> None:
    cuts = [0, *ends(12_000, resident=1 << 40)]
    lengths = {start: end - start for start, end in itertools.pairwise(cuts[:-1])}
    assert {length for start, length in lengths.items() if start < 8 * 256} == {256}
    assert {length for start, length in lengths.items() if 8 * 256 <= start < 32 * 256} == {128}
    assert {length for start, length in lengths.items() if start >= 32 * 256} == {64}


def test_room_bounds_the_growth() -> None:
    assert ends(3000, room=512) == [256, 512, 768, 1024, 1280, 1792, 2304, 2816, 3000]
    assert ends(300, room=128) == [128, 256, 300]


def test_prompt_that_was_partly_found_is_cut_as_one_that_was_not() -> None:
    whole = ends(6000)
    for start in (64, 256, 1000, 1024, 1984, 4096, 5999):
        assert ends(6000, start=start) == [end for end in whole if end > start]


@pytest.mark.parametrize("resident", [1, 64, 1000, 1 << 40])
@pytest.mark.parametrize("base", [64, 192, 1024])
@pytest.mark.parametrize("room", [64, 320, 8192])
def test_every_chunk_makes_progress_in_whole_blocks_within_its_room(base: int, room: int, resident: int) -> None:
    prompt = 5_001
    position = 0
    for end in ends(prompt, base=base, room=room, resident=resident):
        assert position < end <= position + room
        assert end % BLOCK_TOKENS == 0 or end == prompt
        position = end
    assert position == prompt
