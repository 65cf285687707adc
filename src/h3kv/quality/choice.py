"""Which of the measured variants to take: the one that reads the fewest bytes and keeps a stated loss."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from h3kv.core.errors import ConfigError


@dataclass(frozen=True, slots=True)
class LossLimit:
    """The loss that is accepted."""

    perplexity_change: float = 5e-3
    """Relative rise of perplexity. A standard error is kept as distance, so that luck does not choose."""
    top1: float = 0.98
    """Share of tokens whose likeliest one must be full attention's."""
    passkey: float = 1.0
    """Passkeys found, of those that full attention finds."""

    def check(self) -> None:
        """Raise ConfigError unless something could keep it."""
        if not 0 <= self.perplexity_change < math.inf:
            raise ConfigError(
                f"perplexity = {self.perplexity_change}: a relative rise is 0 or more, such as 0.005",
                field="perplexity",
            )
        for field, share in (("top1", self.top1), ("passkey", self.passkey)):
            if not 0 <= share <= 1:
                raise ConfigError(f"{field} = {share}: a share is from 0 to 1", field=field)


@dataclass(frozen=True, slots=True)
class Candidate:
    """What was measured of a variant."""

    name: str
    is_exact: bool
    bytes_share: float
    """Bytes read per cold token, over the bytes of its plain numbers."""
    perplexity_change: float
    perplexity_se: float
    top1: float
    passkey: float


def failures(candidate: Candidate, limit: LossLimit) -> list[str]:
    """What a candidate misses, in words; nothing if it keeps the loss."""
    found = []
    change = candidate.perplexity_change + candidate.perplexity_se
    if not change <= limit.perplexity_change:
        found.append(
            f"perplexity {candidate.perplexity_change:+.3%} and its standard error {candidate.perplexity_se:.3%} are "
            f"more than {limit.perplexity_change:+.3%}"
        )
    if not candidate.top1 >= limit.top1:
        found.append(f"top-1 {candidate.top1:.4f} is less than {limit.top1:.4f}")
    if not candidate.passkey >= limit.passkey:
        found.append(f"passkeys {candidate.passkey:.3f} are less than {limit.passkey:.3f} of full attention's")
    return found


def acceptable(candidates: Sequence[Candidate], limit: LossLimit) -> list[Candidate]:
    """Those that keep the loss, fewest bytes first. Of equal bytes exact comes first, then the smaller change."""
    kept = [candidate for candidate in candidates if not failures(candidate, limit)]
    return sorted(kept, key=lambda kept: (kept.bytes_share, not kept.is_exact, abs(kept.perplexity_change), kept.name))


def near_misses(candidates: Sequence[Candidate], limit: LossLimit, *, count: int = 2) -> list[str]:
    """Names of the dearest retrieving candidates that read less than the first that keeps the loss, and miss it.

    Loss falls with bytes, so what misses by least is what costs most: dearest first, at most so many.
    """
    kept = acceptable(candidates, limit)
    ceiling = kept[0].bytes_share if kept else float("inf")
    missing = [one for one in candidates if not one.is_exact and one.bytes_share < ceiling and failures(one, limit)]
    return [one.name for one in sorted(missing, key=lambda one: (-one.bytes_share, one.name))[:count]]
