"""Quota counters in one process's memory: for a node without a server, and while the server is away."""

from __future__ import annotations

from collections import OrderedDict
from typing import Final

from h3kv.core.ports import Clock
from h3kv.core.units import NS_PER_S
from h3kv.directory.quotas import MINUTE_US, US_PER_S, Charge, Refusal

_NS_PER_US: Final = NS_PER_S // US_PER_S


class MemoryQuotas:
    """Satisfies `QuotaCounters`. It keeps the tenants whose buckets are not full: those of the last minute.

    Args:
        clock: by which buckets fill.
        is_local: what its charges say: whether a server should have counted them.
    """

    def __init__(self, clock: Clock, *, is_local: bool = False) -> None:
        self._clock = clock
        self._is_local = is_local
        self._full_us: OrderedDict[str, int] = OrderedDict()
        """When each is full again; the one that was asked for longest ago first."""

    @property
    def is_degraded(self) -> bool:
        """See `QuotaCounters.is_degraded`."""
        return False

    def take(self, tenant: str, cost_us: int) -> Charge | Refusal:
        """See `QuotaCounters.take`."""
        assert 0 <= cost_us <= MINUTE_US
        now_us = self._forget_full()
        full_us = max(self._full_us.get(tenant, 0), now_us) + cost_us
        if full_us > now_us + MINUTE_US:
            return Refusal(full_us - now_us - MINUTE_US)
        self._full_us[tenant] = full_us
        self._full_us.move_to_end(tenant)
        return Charge(tenant, cost_us, full_us, is_local=self._is_local)

    def give_back(self, charge: Charge, part_us: int) -> None:
        """See `QuotaCounters.give_back`."""
        assert 0 <= part_us <= charge.cost_us
        unpaid_us = max(charge.paid_us - self._now_us(), 0)
        if charge.tenant in self._full_us:
            self._full_us[charge.tenant] -= min(part_us, unpaid_us)
        self._forget_full()

    def check_integrity(self) -> None:
        """See `QuotaCounters.check_integrity`."""
        now_us = self._now_us()
        assert all(full_us <= now_us + MINUTE_US for full_us in self._full_us.values())

    def close(self) -> None:
        """See `QuotaCounters.close`."""

    def _now_us(self) -> int:
        return self._clock.now_ns() // _NS_PER_US

    def _forget_full(self) -> int:
        """Forget buckets that are full, as far as nobody asked for them lately. Returns the time."""
        now_us = self._now_us()
        while self._full_us and next(iter(self._full_us.values())) <= now_us:
            self._full_us.popitem(last=False)
        return now_us
