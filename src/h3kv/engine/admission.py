"""Whether a request can be served at all, said before anything is taken for it."""

from __future__ import annotations

from collections.abc import Mapping

from h3kv.core.errors import ContextLengthError, TierFullError
from h3kv.core.layout import CacheLayout
from h3kv.core.limits import SEGMENT_BLOCKS_MAX
from h3kv.core.types import StoreStatistics, Tier
from h3kv.core.units import format_size
from h3kv.engine.request import Request
from h3kv.policy.admission import bound_cached_tokens, count_blocks


def check_context(request: Request, context_tokens: int) -> None:
    """Check that prompt and answer fit the model's context.

    Raises:
        ContextLengthError: they do not; the message has the sum.
    """
    prompt, answer = len(request.prompt), request.sampling.max_new_tokens
    if prompt + answer > context_tokens:
        raise ContextLengthError(
            f"{prompt} prompt tokens + {answer} answer tokens = {prompt + answer} tokens, but the context holds "
            f"{context_tokens}; shorten the prompt, lower max_new_tokens to {max(context_tokens - prompt, 0)} or less, "
            "or raise model.max_context",
            needed_tokens=prompt + answer,
            limit_tokens=context_tokens,
        )


def check_memory(
    request: Request, layout: CacheLayout, tiers: Mapping[Tier, StoreStatistics], *, room_blocks: int
) -> None:
    """Check that otherwise empty tiers hold the request at its worst: nothing found, longest answer.

    Args:
        request: checked against the context.
        layout: of the KV.
        tiers: capacities of all tiers.
        room_blocks: blocks of one sequence that they hold together.

    Raises:
        TierFullError: they do not; the message has the sum and the cap that would do.
    """
    prompt, answer = len(request.prompt), request.sampling.max_new_tokens
    blocks = count_blocks(bound_cached_tokens(prompt, answer))
    if blocks <= room_blocks:
        return
    needed_bytes = blocks * layout.block_bytes
    largest = Tier.NVME if Tier.NVME in tiers else Tier.HOST if Tier.HOST in tiers else Tier.DEVICE
    unit_bytes = layout.slab.size_bytes(SEGMENT_BLOCKS_MAX)
    missing_bytes = (blocks - room_blocks) * layout.block_bytes
    enough_bytes = -(-(tiers[largest].capacity_bytes + missing_bytes) // unit_bytes) * unit_bytes
    setting = "nvme.capacity" if largest is Tier.NVME else f"{largest}.kv_bytes"
    caps = " + ".join(f"{tier} {tiers[tier].capacity_bytes}" for tier in tiers)
    raise TierFullError(
        f"{prompt} prompt tokens + {answer} answer tokens take {blocks} blocks x "
        f"{layout.block_bytes} bytes = {needed_bytes} bytes ({format_size(needed_bytes)}) of KV, but the caps ({caps} "
        f"bytes) leave room for {room_blocks} blocks; raise {setting} to at least {enough_bytes}, shorten the "
        "prompt, or lower max_new_tokens",
        tier=largest,
        needed_bytes=needed_bytes,
        free_bytes=room_blocks * layout.block_bytes,
    )
