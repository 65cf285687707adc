"""Whether a request can be served at all, said before anything is taken for it."""

from __future__ import annotations

from dataclasses import replace

from h3kv.core.errors import ContextLengthError, TierFullError
from h3kv.core.limits import BLOCK_TOKENS
from h3kv.core.units import describe_size
from h3kv.engine.pool import KvPool
from h3kv.engine.request import Request
from h3kv.policy.admission import bound_cached_tokens, count_blocks


def check_context(request: Request, context_tokens: int) -> None:
    """Check that prompt and answer fit the model's context.

    Raises:
        ContextLengthError: they do not; the message has the sum.
    """
    prompt, answer = len(request.prompt), request.sampling.max_new_tokens
    if prompt + answer > context_tokens:
        left = context_tokens - prompt
        lower = f"lower max_new_tokens to {left} or less, " if left > 0 else ""
        raise ContextLengthError(
            f"{prompt} prompt tokens + {answer} answer tokens = {prompt + answer} tokens, but the context holds "
            f"{context_tokens}; shorten the prompt, {lower}or raise model.max_context (--max-context)",
            needed_tokens=prompt + answer,
            limit_tokens=context_tokens,
        )


def cut_to_room(request: Request, pool: KvPool, *, held_blocks: int) -> Request:
    """The request with as long an answer as otherwise empty tiers hold, where a shorter one will do.

    Args: as of `check_memory`.
    """
    room_tokens = (pool.capacity.blocks + held_blocks) * BLOCK_TOKENS
    # The last token of an answer is never read.
    length = room_tokens - len(request.prompt) + 1
    if not request.may_be_cut or not 1 <= length < request.sampling.max_new_tokens:
        return request
    return replace(request, sampling=replace(request.sampling, max_new_tokens=length))


def check_memory(request: Request, pool: KvPool, *, held_blocks: int) -> None:
    """Check that otherwise empty tiers hold the request at its worst: nothing found, longest answer.

    Args:
        request: checked against the context.
        pool: whose tiers are to hold it.
        held_blocks: of the prompt, which documents hold.

    Raises:
        TierFullError: they do not; the message has the sum and the cap that would do.
    """
    prompt, answer = len(request.prompt), request.sampling.max_new_tokens
    blocks, room_blocks = count_blocks(bound_cached_tokens(prompt, answer)), pool.capacity.blocks + held_blocks
    if blocks <= room_blocks:
        return
    block_bytes, tiers = pool.layout.block_bytes, pool.statistics()
    last = list(tiers)[-1]
    caps = " + ".join(f"{tier} {describe_size(tiers[tier].capacity_bytes)}" for tier in tiers)
    raise TierFullError(
        f"{prompt:,} prompt tokens + {answer:,} answer tokens take {blocks:,} blocks of {BLOCK_TOKENS} tokens and "
        f"{describe_size(block_bytes)} = {describe_size(blocks * block_bytes)} of KV, but the caps ({caps}) leave room "
        f"for {room_blocks:,} blocks ({room_blocks * BLOCK_TOKENS:,} tokens, "
        f"{describe_size(room_blocks * block_bytes)}); {pool.capacity.cure_for(blocks)}, shorten the prompt, or lower "
        "max_new_tokens",
        tier=last,
        needed_bytes=blocks * block_bytes,
        free_bytes=room_blocks * block_bytes,
    )
