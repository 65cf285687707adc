"""How much room a sequence may come to need, known before it starts."""

from __future__ import annotations

from typing import Final

from h3kv.core.limits import BLOCK_TOKENS, EXTENT_CLASSES_BLOCKS, SEGMENT_BLOCKS_MAX, SINK_BLOCKS


def count_blocks(tokens: int) -> int:
    """Blocks that so many tokens touch."""
    return -(-tokens // BLOCK_TOKENS)


def bound_cached_tokens(prompt_tokens: int, answer_tokens: int) -> int:
    """Tokens whose KV a request leaves at most: the last token of an answer is never read."""
    return prompt_tokens + answer_tokens - 1


ANSWER_BLOCKS_RESERVED: Final = 4
"""Blocks of an answer that a sequence has room for when it starts: 256 tokens. Longer answers find more as they grow,
or wait; most end before."""


def reserved_blocks(prompt_tokens: int, blocks: int) -> int:
    """Blocks that a sequence is sure of when it starts, of those that it may come to need at the longest."""
    return min(count_blocks(prompt_tokens) + ANSWER_BLOCKS_RESERVED, blocks)


def plan_rooms(first_block: int, prompt_end: int, end: int) -> list[int]:
    """Sizes of the segments that a sequence opens for its blocks `first_block` to `end`, in order.

        blocks   0 |  1 .. 16 | 17 .. 20 | 21 | 22 | 23 24 | 25 .. 28 | 29 ...
        sizes    1 |    16    |    4     | 1  | 1  |   2   |    4     | 8, 16, 16
                 sinks         prompt    prompt_end     answer

    Each size is an extent class, so that nothing is lost by rounding. The prompt's blocks will all be filled, so they
    come in large segments. How long the answer becomes is open: its segments begin small and double, so that what is
    never filled is given back, and a partly filled one wastes less than the answer takes.

    Args:
        first_block: the sequence's first block that is not taken from others.
        prompt_end: the first block that the prompt does not fill.
        end: the number of blocks at the longest.
    """
    sizes: list[int] = []
    at = first_block
    if at == 0 and end > 0:
        sizes.append(SINK_BLOCKS)
        at = SINK_BLOCKS
    while at < prompt_end:
        sizes.append(_largest_class(prompt_end - at))
        at += sizes[-1]
    size_limit = 1
    while at < end:
        sizes.append(_largest_class(min(end - at, size_limit)))
        at += sizes[-1]
        size_limit = min(2 * size_limit, SEGMENT_BLOCKS_MAX)
    return sizes


def _largest_class(blocks: int) -> int:
    return max(size for size in EXTENT_CLASSES_BLOCKS if size <= blocks)
