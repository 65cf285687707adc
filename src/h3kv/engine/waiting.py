"""A request between submission and start."""

from __future__ import annotations

from dataclasses import dataclass

from h3kv.core.hashing import extend_keys, root_key
from h3kv.core.limits import BLOCK_TOKENS
from h3kv.core.types import Tier
from h3kv.engine.events import RequestStatistics
from h3kv.engine.pool import KvNeed
from h3kv.engine.prefix import reusable_blocks
from h3kv.engine.request import Request, RequestId
from h3kv.policy.admission import bound_cached_tokens, count_blocks


@dataclass(frozen=True, slots=True)
class WaitingRequest:
    """Checked, but without room yet."""

    id: RequestId
    request: Request
    need: KvNeed
    submitted_ns: int

    def statistics(self, now_ns: int, tier: Tier) -> RequestStatistics:
        """What there is to say of a request that ends before it started."""
        return RequestStatistics(
            prompt_tokens=len(self.request.prompt),
            cached_tokens={tier: 0},
            generated_tokens=0,
            waiting_ns=now_ns - self.submitted_ns,
            prefill_ns=0,
            time_to_first_token_ns=None,
            inter_token_ns=(),
        )


def need_of(request: Request, fingerprint: bytes, *, retrieves: bool = False) -> KvNeed:
    """What a request needs to start, and whether it decodes under retrieval. Hashes its prompt."""
    root = root_key(fingerprint, request.tenant)
    prompt_tokens = len(request.prompt)
    return KvNeed(
        keys=[root, *extend_keys(root, request.prompt)],
        reusable_blocks=reusable_blocks(prompt_tokens),
        prompt_blocks=prompt_tokens // BLOCK_TOKENS,
        blocks=count_blocks(bound_cached_tokens(prompt_tokens, request.sampling.max_new_tokens)),
        retrieves=retrieves,
    )
