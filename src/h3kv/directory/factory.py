"""The node directory that a configuration names."""

from __future__ import annotations

from h3kv.core.errors import ConfigError
from h3kv.core.ports import Clock
from h3kv.directory.memory import MemoryNodeDirectory
from h3kv.directory.node_directory import DirectoryConfig, NodeDirectory

MEMORY = "memory"


def open_directory(place: str, clock: Clock, config: DirectoryConfig | None = None) -> NodeDirectory:
    """A directory to be closed by the caller.

    Args:
        place: `memory`, for a node without a server, or the URL of a Redis or Valkey server.
        clock: by which leases and pauses count.
        config: bounds.

    Raises:
        ConfigError: neither, or the client for such servers is not installed.
    """
    if place == MEMORY:
        return MemoryNodeDirectory(clock, config)
    try:
        from h3kv.directory.redis_directory import RedisNodeDirectory
    except ModuleNotFoundError as error:
        if error.name != "redis":
            raise
        message = f"directory.url is not {MEMORY!r}, but the client is missing: pip install redis"
        raise ConfigError(message, field="url") from error
    return RedisNodeDirectory(place, clock, config)
