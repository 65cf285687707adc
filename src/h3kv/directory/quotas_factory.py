"""The quota counters that a configuration names."""

from __future__ import annotations

from h3kv.core.errors import ConfigError
from h3kv.core.ports import Clock
from h3kv.directory.factory import MEMORY
from h3kv.directory.node_directory import DirectoryConfig
from h3kv.directory.quotas import QuotaCounters
from h3kv.directory.quotas_memory import MemoryQuotas


def open_quotas(place: str, clock: Clock, config: DirectoryConfig | None = None) -> QuotaCounters:
    """Counters to be closed by the caller.

    Args:
        place: `memory`, for one process alone, or the URL of a Redis or Valkey server: that of the directory.
        clock: by which buckets fill where no server has a clock, and pauses count.
        config: of the server: namespace, time limits.

    Raises:
        ConfigError: neither, or the client for such servers is not installed.
    """
    if place == MEMORY:
        return MemoryQuotas(clock)
    try:
        from h3kv.directory.quotas_redis import RedisQuotas
    except ModuleNotFoundError as error:
        if error.name != "redis":
            raise
        message = f"directory is not {MEMORY!r}, but the client is missing: pip install redis"
        raise ConfigError(message, field="directory") from error
    return RedisQuotas(place, clock, config)
