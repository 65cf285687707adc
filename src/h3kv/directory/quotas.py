"""The seam of quota counters: how much of a tenant's minute is used, across all processes that serve it.

A quota of N tokens a minute is a bucket of N tokens that fills up all the time. Its state is one number: the moment at
which it will be full again. A request of T tokens moves that moment by T/N of a minute, and is refused where it would
come to lie more than a minute ahead:

    now                        full again                 now + 1 min
     |------- used ----------------|-------- left -----------|
                                   |--- T/N min ---| the next request fits

So costs are times, in whole microseconds, and a changed quota leaves the share of the minute that was used.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Protocol

US_PER_S: Final = 1_000_000
MINUTE_US: Final = 60 * US_PER_S


@dataclass(frozen=True, slots=True)
class Charge:
    """A part of a tenant's minute that was taken."""

    tenant: str
    cost_us: int
    paid_us: int
    """When time has paid it back, by the clock of whoever counted it: from then on there is nothing to give back."""
    is_local: bool = False
    """Whether the server of the counters was away, so that this process alone knows of it."""


@dataclass(frozen=True, slots=True)
class Refusal:
    """It would be too much now."""

    wait_us: int
    """Until it would fit, if nobody takes anything meanwhile: more than 0."""


class QuotaCounters(Protocol):
    """The buckets of all tenants. Not thread-safe: calls come one at a time.

    No call raises because a server cannot be reached: then this process counts by itself, since a tenant that gets too
    much for a while costs less than one that gets nothing.
    """

    @property
    def is_degraded(self) -> bool:
        """Whether a server cannot be reached, so that this process counts by itself."""
        ...

    def take(self, tenant: str, cost_us: int) -> Charge | Refusal:
        """Take a part of a tenant's minute, at once for all who ask.

        Args:
            tenant: any text.
            cost_us: from 0 to `MINUTE_US`.
        """
        ...

    def give_back(self, charge: Charge, part_us: int) -> None:
        """Give back a part of what was taken, as far as time has not paid it back already."""
        ...

    def check_integrity(self) -> None:
        """Assert that no bucket is emptier than empty."""
        ...

    def close(self) -> None:
        """End connections. Calling it again does nothing."""
        ...


def cost_us(tokens: int, per_minute: int) -> int:
    """The part of a minute that tokens take of a quota, rounded up.

    Args:
        tokens: 0 to `per_minute`.
        per_minute: the quota, at least 1.
    """
    assert 0 <= tokens <= per_minute
    return -(-tokens * MINUTE_US // per_minute) if tokens else 0
