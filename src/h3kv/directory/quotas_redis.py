"""Quota counters in a Redis or Valkey server, shared by all processes that serve a tenant.

    h3:1:<namespace>:quota:<SHA-256 of the name, in hex>    when its bucket is full again, in us of the server's clock;
                                                            gone by itself when it is

Each change is one script, which the server carries out at once, by its own clock. While the server is away this process
counts by itself: buckets begin full then.
"""

from __future__ import annotations

import hashlib
from typing import Final

from h3kv.core.ports import Clock
from h3kv.directory.entries import FORMAT_VERSION
from h3kv.directory.node_directory import DirectoryConfig
from h3kv.directory.quotas import MINUTE_US, Charge, Refusal
from h3kv.directory.quotas_memory import MemoryQuotas
from h3kv.directory.server import Server

# A clock that was set back, or a stranger's value, counts as an empty bucket at most.
_COMMON: Final = f"""
local time = redis.call('TIME')
local now = tonumber(time[1]) * 1000000 + tonumber(time[2])
local full = math.min(math.max(now, tonumber(redis.call('GET', KEYS[1])) or 0), now + {MINUTE_US})
local function keep(value)
    redis.call('SET', KEYS[1], string.format('%.0f', value), 'PX', math.ceil((value - now) / 1000))
end
"""

TAKE: Final = (
    _COMMON
    + f"""
local after = full + tonumber(ARGV[1])
local excess = after - now - {MINUTE_US}
if excess > 0 then return excess end
if after > now then keep(after) end
return -after
"""
)
"""KEYS: the bucket. ARGV: the cost in us. Returns after how many us it would fit; taken: when it is paid, below 0."""

GIVE_BACK: Final = (
    _COMMON
    + """
local after = full - math.min(tonumber(ARGV[1]), math.max(tonumber(ARGV[2]) - now, 0))
if after > now then keep(after) else redis.call('DEL', KEYS[1]) end
return 0
"""
)
"""KEYS: the bucket. ARGV: the part in us, and when the charge is paid."""


class RedisQuotas:
    """Satisfies `QuotaCounters`.

    Args:
        url: see `Server`.
        clock: for pauses after failures, and for buckets of its own.
        config: of the server: namespace, time limits.

    Raises:
        ConfigError: the URL cannot be read. A server that is not there is no error: it may come later.
    """

    def __init__(self, url: str, clock: Clock, config: DirectoryConfig | None = None) -> None:
        config = config or DirectoryConfig()
        self._server = Server(url, clock, config)
        self._own = MemoryQuotas(clock, is_local=True)
        self._prefix = f"h3:{FORMAT_VERSION}:{config.namespace}:quota:"

    @property
    def is_degraded(self) -> bool:
        """See `QuotaCounters.is_degraded`."""
        return self._server.is_degraded

    def take(self, tenant: str, cost_us: int) -> Charge | Refusal:
        """See `QuotaCounters.take`."""
        assert 0 <= cost_us <= MINUTE_US
        results = self._server.run([(TAKE, [self._key(tenant)], [str(cost_us).encode()])])
        if results is None:
            return self._own.take(tenant, cost_us)
        return Refusal(results[0]) if results[0] > 0 else Charge(tenant, cost_us, -results[0])

    def give_back(self, charge: Charge, part_us: int) -> None:
        """See `QuotaCounters.give_back`. What the server cannot be told comes back with the minute."""
        assert 0 <= part_us <= charge.cost_us
        if charge.is_local:
            self._own.give_back(charge, part_us)
        else:
            arguments = [str(part_us).encode(), str(charge.paid_us).encode()]
            self._server.run([(GIVE_BACK, [self._key(charge.tenant)], arguments)])

    def check_integrity(self) -> None:
        """See `QuotaCounters.check_integrity`."""
        self._own.check_integrity()

    def close(self) -> None:
        """See `QuotaCounters.close`."""
        self._server.close()

    def _key(self, tenant: str) -> bytes:
        """Any name makes a key of one size and of plain characters."""
        return (self._prefix + hashlib.sha256(tenant.encode()).hexdigest()).encode()
