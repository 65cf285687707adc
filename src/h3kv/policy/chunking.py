"""Where the chunks of a prompt end."""

from __future__ import annotations

from h3kv.core.limits import BLOCK_TOKENS


def chunk_end(start: int, prompt_tokens: int, *, base_tokens: int, room_tokens: int, resident_tokens: int) -> int:
    """The position at which the chunk that begins at `start` ends.

    Each chunk reads all tokens before it. While memory holds them, chunks are `base_tokens` long; beyond that a chunk
    reads cold bytes too, so its length grows with them:

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
        end += min(growth * base_tokens, room_tokens)
    return min(end, prompt_tokens)
