"""The node directory in a Redis or Valkey server, with what this process said in its own memory.

    h3:1:<namespace>:owner:<name>        boot token, for its lease
    h3:1:<namespace>:block:<32 bytes>    an entry, see `entries`, for its lease

Every change is kept until the server has it. While the server is away the node goes on with what it knows; afterwards
the heartbeat tells whether the server still knows this process, and if not, all is said again.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Sequence
from itertools import islice
from typing import Any

import redis

from h3kv.core.ports import Clock
from h3kv.core.types import BlockKey
from h3kv.core.units import NS_PER_MS
from h3kv.directory import scripts
from h3kv.directory.entries import FORMAT_VERSION, DirectoryEntry, check_entry, check_key, check_owner, decode, encode
from h3kv.directory.node_directory import DirectoryConfig, DirectoryStatistics
from h3kv.directory.server import Server
from h3kv.policy.migration_state import Owner

SUPERSEDED, DONE, ABSENT = 0, 1, 2
"""What scripts return about an owner."""


class RedisNodeDirectory:
    """Satisfies `NodeDirectory`.

    Args:
        url: see `Server`.
        clock: for pauses after failures, and to know when entries must be said again.
        config: bounds.

    Raises:
        ConfigError: the URL cannot be read. A server that is not there is no error: it may come later.
    """

    def __init__(self, url: str, clock: Clock, config: DirectoryConfig | None = None) -> None:
        self._clock = clock
        self._config = config or DirectoryConfig()
        self._server = Server(url, clock, self._config)
        self._prefix = f"h3:{FORMAT_VERSION}:{self._config.namespace}:".encode()
        self._said: OrderedDict[BlockKey, tuple[DirectoryEntry, int]] = OrderedDict()
        """What this process published, with the time at which it was last sent, oldest first."""
        self._waiting: OrderedDict[BlockKey, tuple[DirectoryEntry, str]] = OrderedDict()
        """Changes that the server does not know, and the script that makes each; the newest of a key."""
        self._unjoined: dict[str, Owner] = {}
        """Lives that the server was not told of yet."""
        self._cursor = 0
        self._malformed = 0
        self._dropped = 0

    # Owners

    def join(self, owner: Owner) -> None:
        """See `NodeDirectory.join`. While the server is away, the next heartbeat joins."""
        check_owner(owner)
        self._unjoined[owner.name] = owner
        lease = self._config.owner_lease_ns // NS_PER_MS
        if self._server.call(lambda client: client.set(self._owner_key(owner.name), owner.boot, px=lease)):
            del self._unjoined[owner.name]

    def heartbeat(self, owner: Owner) -> bool:
        """See `NodeDirectory.heartbeat`. Sends what waits, and what would lapse. True while the server is away."""
        check_owner(owner)
        if self._unjoined.get(owner.name) == owner:
            self.join(owner)
        lease = str(self._config.owner_lease_ns // NS_PER_MS).encode()
        results = self._server.run([(scripts.HEARTBEAT, [self._owner_key(owner.name)], [owner.boot.encode(), lease])])
        if results is None:
            return True
        if results[0] == SUPERSEDED:
            self._forget(owner)
            return False
        now_ns = self._clock.now_ns()
        for key, (entry, sent_ns) in self._said.items():
            if results[0] == DONE and now_ns - sent_ns < self._config.entry_lease_ns // 2:
                break
            if entry.owner == owner:
                self._waiting.setdefault(key, (entry, scripts.PUBLISH))
        self._flush()
        return True

    def leave(self, owner: Owner) -> None:
        """See `NodeDirectory.leave`."""
        check_owner(owner)
        self._forget(owner)
        if self._unjoined.get(owner.name) == owner:
            del self._unjoined[owner.name]
        self._server.run([(scripts.LEAVE, [self._owner_key(owner.name)], [owner.boot.encode()])])

    # Entries

    def publish(self, entries: Sequence[DirectoryEntry]) -> None:
        """See `NodeDirectory.publish`."""
        for entry in entries:
            check_entry(entry)
        for entry in entries:
            if not self._said_later(entry):
                self._said[entry.key] = (entry, self._clock.now_ns())
                self._said.move_to_end(entry.key)
                self._wait_for(entry, scripts.PUBLISH)
        self._bound(self._said)
        self._flush()

    def withdraw(self, entries: Sequence[DirectoryEntry]) -> None:
        """See `NodeDirectory.withdraw`."""
        for entry in entries:
            check_entry(entry)
        for entry in entries:
            known, _ = self._said.get(entry.key, (None, 0))
            if not self._said_later(entry) and (known is None or known.owner == entry.owner):
                self._said.pop(entry.key, None)
                self._wait_for(entry, scripts.WITHDRAW)
        self._flush()

    def find(self, keys: Sequence[BlockKey]) -> tuple[DirectoryEntry | None, ...]:
        """See `NodeDirectory.find`. While the server is away, what this process published."""
        for key in keys:
            check_key(key)
        return self._read_or_none(keys) or tuple(self._said.get(key, (None, 0))[0] for key in keys)

    def entries(self) -> Iterator[DirectoryEntry]:
        """See `NodeDirectory.entries`. While the server is away, what this process published."""
        cursor: int | None = 0
        while cursor is not None:
            step = self._scan(cursor)
            if step is None:
                yield from [entry for entry, _ in self._said.values()]
                return
            cursor, keys = step
            yield from [entry for entry in self._read_or_none(keys) if entry is not None]

    def sweep(self) -> int:
        """See `NodeDirectory.sweep`."""
        step = self._scan(self._cursor)
        if step is None:
            return 0
        cursor, keys = step
        self._cursor = cursor or 0
        values = self._server.call(lambda client: self._values(client, keys))
        arguments, blocks = [], []
        for key, value in zip(keys, values or (), strict=False):
            entry = None if value is None else self._decoded(key, value)
            if entry is not None and value is not None:
                blocks += [self._block_key(key), self._owner_key(entry.owner.name)]
                arguments += [value, entry.owner.boot.encode()]
        results = self._server.run([(scripts.SWEEP, blocks, arguments)]) if blocks else None
        return results[0] if results else 0

    # State

    def statistics(self) -> DirectoryStatistics:
        """See `NodeDirectory.statistics`."""
        return DirectoryStatistics(
            entries=len(self._said),
            waiting=len(self._waiting),
            is_degraded=self._server.is_degraded,
            errors_total=self._server.errors_total,
            malformed_total=self._malformed,
            dropped_total=self._dropped,
        )

    def check_integrity(self) -> None:
        """See `NodeDirectory.check_integrity`."""
        assert len(self._said) <= self._config.entries_max
        assert len(self._waiting) <= self._config.entries_max
        assert all(
            self._said[key][0] == entry
            for key, (entry, script) in self._waiting.items()
            if script is scripts.PUBLISH and key in self._said
        )

    def close(self) -> None:
        """See `NodeDirectory.close`."""
        self._server.close()

    # Changes on their way

    def _said_later(self, entry: DirectoryEntry) -> bool:
        """Whether its owner said something newer about its block."""
        known, _ = self._said.get(entry.key, (None, 0))
        return known is not None and known.owner == entry.owner and known.generation > entry.generation

    def _wait_for(self, entry: DirectoryEntry, script: str) -> None:
        self._waiting[entry.key] = (entry, script)
        self._waiting.move_to_end(entry.key)
        self._bound(self._waiting)

    def _bound(self, table: OrderedDict[BlockKey, Any]) -> None:
        while len(table) > self._config.entries_max:
            table.popitem(last=False)
            self._dropped += 1

    def _forget(self, owner: Owner) -> None:
        """Nothing that this life said counts any longer."""
        for table in (self._said, self._waiting):
            for key in [key for key, (entry, _) in table.items() if entry.owner == owner]:
                del table[key]

    def _flush(self) -> None:
        """Send what waits, oldest first, as far as one call may."""
        for _ in range(self._config.batches_per_call):
            if not self._waiting or self._server.is_resting:
                return
            batch = list(islice(self._waiting.values(), self._config.batch_entries))
            groups: dict[tuple[str, Owner], list[DirectoryEntry]] = {}
            for entry, script in batch:
                groups.setdefault((script, entry.owner), []).append(entry)
            results = self._server.run([self._call(script, owner, group) for (script, owner), group in groups.items()])
            if results is None:
                return
            is_done = True
            for ((script, owner), group), result in zip(groups.items(), results, strict=True):
                if script is scripts.PUBLISH and result == ABSENT:
                    is_done = False
                    continue
                if script is scripts.PUBLISH and result == SUPERSEDED:
                    self._forget(owner)
                self._settle(group)
            if not is_done:
                # The next heartbeat joins, and sends it again.
                return

    def _settle(self, group: list[DirectoryEntry]) -> None:
        now_ns = self._clock.now_ns()
        for entry in group:
            self._waiting.pop(entry.key, None)
            if self._said.get(entry.key, (None, 0))[0] == entry:
                self._said[entry.key] = (entry, now_ns)
                self._said.move_to_end(entry.key)

    def _call(self, script: str, owner: Owner, group: list[DirectoryEntry]) -> tuple[str, list[bytes], list[bytes]]:
        keys = [self._block_key(entry.key) for entry in group]
        values = [encode(entry) for entry in group]
        if script is scripts.WITHDRAW:
            return script, keys, values
        lease = str(self._config.entry_lease_ns // NS_PER_MS).encode()
        return script, [self._owner_key(owner.name), *keys], [owner.boot.encode(), lease, *values]

    # Reading

    def _owner_key(self, name: str) -> bytes:
        return self._prefix + b"owner:" + name.encode()

    def _block_key(self, key: BlockKey) -> bytes:
        return self._prefix + b"block:" + key

    def _decoded(self, key: BlockKey, value: bytes) -> DirectoryEntry | None:
        entry = decode(key, value)
        self._malformed += entry is None
        return entry

    def _values(self, client: redis.Redis, keys: Sequence[BlockKey]) -> list[bytes | None]:
        """Values as they are, in batches."""
        pipe = client.pipeline(transaction=False)
        size = self._config.batch_entries
        for first in range(0, len(keys), size):
            pipe.mget([self._block_key(key) for key in keys[first : first + size]])
        return [value for values in pipe.execute() for value in values]

    def _read_or_none(self, keys: Sequence[BlockKey]) -> tuple[DirectoryEntry | None, ...]:
        """Entries whose owner is there; nothing at all where the server fails."""
        return self._server.call(lambda client: self._read(client, keys)) or ()

    def _read(self, client: redis.Redis, keys: Sequence[BlockKey]) -> tuple[DirectoryEntry | None, ...]:
        """Entries whose owner is there."""
        values = self._values(client, keys)
        found = [None if value is None else self._decoded(key, value) for key, value in zip(keys, values, strict=True)]
        names = sorted({entry.owner.name for entry in found if entry is not None})
        if not names:
            return tuple(None for _ in keys)
        boots: list[Any] = client.mget([self._owner_key(name) for name in names])
        there = {Owner(name, boot.decode("ascii", "replace")) for name, boot in zip(names, boots, strict=True) if boot}
        return tuple(entry if entry is not None and entry.owner in there else None for entry in found)

    def _scan(self, cursor: int) -> tuple[int | None, list[BlockKey]] | None:
        """Keys from a cursor on, and the next cursor; None for that at the end, and for all where the server fails."""
        start = self._prefix + b"block:"
        count = self._config.batch_entries
        step: Any = self._server.call(lambda client: client.scan(cursor, match=start + b"*", count=count))
        if step is None:
            return None
        following, keys = step
        return following or None, [BlockKey(key[len(start) :]) for key in keys]
