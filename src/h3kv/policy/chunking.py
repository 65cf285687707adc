"""Where the chunks of a prompt end."""

from __future__ import annotations

from typing import Final

from h3kv.core.limits import BLOCK_TOKENS

HALVED_AFTER_CHUNKS: Final = 8
QUARTERED_AFTER_CHUNKS: Final = 32
"""With chunks of 1,024 tokens, 8K and 32K: there attention takes two and ten times what all else takes."""


def chunk_end(start: int, prompt_tokens: int, *, base_tokens: int, room_tokens: int, resident_tokens: int) -> int:
    """The position at which the chunk that begins at `start` ends.

    Each chunk reads all tokens before it, so that one takes the longer the deeper it lies. While memory holds them,
    chunks are `base_tokens` long at first and shorter deep down, so that others wait less for the end of one:

        begins at / base_tokens       0 .. 7    8 .. 31   32 ...
        length                        base      base / 2  base / 4

    Beyond that a chunk reads cold bytes too, so its length grows with them:

        begins at / resident_tokens   0 .. 1    1 .. 2    2 .. 3    ...
        length                        base      2 base    3 base    ... up to the room

    Ends are counted from the start of the prompt, wherever the first chunk begins: a prompt that was partly found is
    cut as one that was not. They are a function of positions and configuration, never of time or placement. A prompt
    that was partly found begins with a shorter chunk, whose products may round differently: logits in fp32 agree within
    1e-4.

    Args:
        start: first token of the chunk, in [0, prompt_tokens).
        prompt_tokens: length of the prompt.
        base_tokens: shortest regular chunk, a multiple of 64.
        room_tokens: what a chunk may take of the device, a multiple of 64, at least 64.
        resident_tokens: tokens that the tiers in memory hold, at least 1.

    Returns:
        A multiple of 64 after `start`, or `prompt_tokens`.

    Cost: one step for each chunk before.
    """
    assert 0 <= start < prompt_tokens
    assert base_tokens >= BLOCK_TOKENS and base_tokens % BLOCK_TOKENS == 0
    assert room_tokens >= BLOCK_TOKENS and room_tokens % BLOCK_TOKENS == 0
    assert resident_tokens >= 1
    end = 0
    while end <= start:
        growth = 1 + end // resident_tokens if end > resident_tokens else 1
        length = growth * base_tokens if growth > 1 else base_tokens // _divisor(end // base_tokens)
        end += min(max(length // BLOCK_TOKENS, 1) * BLOCK_TOKENS, room_tokens)
    return min(end, prompt_tokens)


def _divisor(chunks: int) -> int:
    """By what a chunk is shorter that begins behind so many."""
    if chunks < HALVED_AFTER_CHUNKS:
        return 1
    return 2 if chunks < QUARTERED_AFTER_CHUNKS else 4
