"""One connection to a Redis or Valkey server, which may fail at any time."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import redis
from redis.backoff import NoBackoff
from redis.retry import Retry

from h3kv.core.errors import ConfigError
from h3kv.core.ports import Clock
from h3kv.core.units import NS_PER_S
from h3kv.directory.node_directory import DirectoryConfig

SCHEMES = ("redis://", "rediss://", "unix://")

Result = TypeVar("Result")


class Server:
    """Calls that come to nothing where the server cannot be reached, and then for a while are not even tried.

    Args:
        url: `redis://[:password@]host:port/db`, `rediss://` for TLS, or `unix://path?db=0`.
        clock: by which it is left alone after a failure.
        config: time limit of a call, bounds of the pause.

    Raises:
        ConfigError: the URL cannot be read. Its text, which may hold a password, is not repeated.
    """

    def __init__(self, url: str, clock: Clock, config: DirectoryConfig) -> None:
        self._clock = clock
        self._config = config
        self._client = _client(url, config)
        self._backoff_ns = 0
        self._retry_ns = 0
        self.errors_total = 0

    @property
    def is_degraded(self) -> bool:
        """Whether the last call failed."""
        return self._backoff_ns > 0

    @property
    def is_resting(self) -> bool:
        """Whether a call would not be tried now."""
        return self.is_degraded and self._clock.now_ns() < self._retry_ns

    def call(self, work: Callable[[redis.Redis], Result]) -> Result | None:
        """What `work` returns; None where the server cannot be reached, or is left alone."""
        if self.is_resting:
            return None
        try:
            result = work(self._client)
        except (redis.RedisError, OSError):
            self._fail()
            return None
        self._backoff_ns = 0
        return result

    def run(self, calls: list[tuple[str, list[bytes], list[bytes]]]) -> list[int] | None:
        """Results of scripts, sent together: each with its keys and arguments. None as for `call`."""

        def send(client: redis.Redis) -> list[int]:
            pipe: Any = client.pipeline(transaction=False)
            for script, keys, arguments in calls:
                pipe.eval(script, len(keys), *keys, *arguments)
            return [int(result) for result in pipe.execute()]

        return self.call(send)

    def close(self) -> None:
        """End the connection."""
        self._client.close()

    def _fail(self) -> None:
        self.errors_total += 1
        doubled_ns = max(2 * self._backoff_ns, self._config.backoff_ns_min)
        self._backoff_ns = min(doubled_ns, self._config.backoff_ns_max)
        self._retry_ns = self._clock.now_ns() + self._backoff_ns
        # Half a reply may still be on its way.
        self._client.connection_pool.disconnect()


def _client(url: str, config: DirectoryConfig) -> redis.Redis:
    rule = f"directory.url must begin with {', '.join(SCHEMES)}, such as redis://127.0.0.1:6379/0"
    if not url.startswith(SCHEMES):
        raise ConfigError(rule, field="url")
    seconds = config.timeout_ns / NS_PER_S
    try:
        return redis.Redis.from_url(
            url,
            socket_timeout=seconds,
            socket_connect_timeout=seconds,
            retry=Retry(NoBackoff(), 0),
            protocol=2,
            health_check_interval=0,
        )
    except ValueError as error:
        raise ConfigError(rule, field="url") from error
