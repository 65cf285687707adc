"""A request between submission and start."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final

from h3kv.core.hashing import extend_keys, root_key
from h3kv.core.limits import BLOCK_TOKENS
from h3kv.core.types import Tier
from h3kv.engine.events import RequestStatistics
from h3kv.engine.needs import KvNeed
from h3kv.engine.prefix import reusable_blocks
from h3kv.engine.request import Request, RequestId
from h3kv.engine.sequence import RunningSequence
from h3kv.policy.admission import bound_cached_tokens, count_blocks, reserved_blocks

TENANT_PLACES_LEFT: Final = 4
"""One in so many places."""
NO_TENANT: Final = b""


@dataclass(frozen=True, slots=True)
class WaitingRequest:
    """Checked, but without room yet, or without room any more."""

    id: RequestId
    request: Request
    need: KvNeed
    submitted_ns: int
    suspended: RunningSequence | None = None
    """One that ran already and gave its room back: it goes on where it was."""

    def statistics(self, now_ns: int, tier: Tier) -> RequestStatistics:
        """What there is to say of a request that ends while it waits."""
        if self.suspended is not None:
            return self.suspended.statistics()
        return RequestStatistics(
            prompt_tokens=len(self.request.prompt),
            cached_tokens={tier: 0},
            generated_tokens=0,
            waiting_ns=now_ns - self.submitted_ns,
            prefill_ns=0,
            time_to_first_token_ns=None,
            inter_token_ns=(),
        )


def in_turn(
    waiting: Iterable[WaitingRequest], running: Iterable[RunningSequence], *, places: int
) -> list[WaitingRequest]:
    """Those that may start now, in the order in which they may: suspended ones, then of the tenant that has the fewest
    running, then by submission.

    Args:
        waiting: in the order of submission, suspended ones before others.
        running: beside which they start.
        places: sequences that may run. One tenant leaves a quarter of them to others, who do not wait for its answers.
    """
    counts = Counter(sequence.request.tenant for sequence in running)
    most = places - places // TENANT_PLACES_LEFT

    def has_place(each: WaitingRequest) -> bool:
        tenant = each.request.tenant
        return each.suspended is not None or tenant == NO_TENANT or counts[tenant] < most

    return sorted(filter(has_place, waiting), key=lambda each: (each.suspended is None, counts[each.request.tenant]))


def need_of(
    request: Request,
    fingerprint: bytes,
    *,
    retrieves: bool = False,
    tokens: Sequence[int] | None = None,
    reserves_all: bool = False,
) -> KvNeed:
    """What a request needs to start. Hashes its tokens.

    Args:
        request: checked.
        fingerprint: digest of everything but the tokens that decides the KV.
        retrieves: whether it decodes under retrieval.
        tokens: prompt and what there is of the answer, of one that goes on; None: it begins.
        reserves_all: whether it starts only where it is sure of its longest.
    """
    root = root_key(fingerprint, request.tenant)
    known: Sequence[int] = request.prompt if tokens is None else tokens
    blocks = count_blocks(bound_cached_tokens(len(request.prompt), request.sampling.max_new_tokens))
    return KvNeed(
        keys=[root, *extend_keys(root, known)],
        reusable_blocks=reusable_blocks(len(known)),
        prompt_blocks=len(known) // BLOCK_TOKENS,
        blocks=blocks,
        # Indexes are counted in when it starts, and not again.
        reserved_blocks=blocks if retrieves or reserves_all else reserved_blocks(len(known), blocks),
        retrieves=retrieves,
    )
