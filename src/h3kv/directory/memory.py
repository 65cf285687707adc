"""The node directory in one process's memory: for a node without a server."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Sequence
from itertools import islice

from h3kv.core.ports import Clock
from h3kv.core.types import BlockKey
from h3kv.directory.entries import DirectoryEntry, check_entry, check_key, check_owner
from h3kv.directory.node_directory import DirectoryConfig, DirectoryStatistics
from h3kv.policy.migration_state import Owner


class MemoryNodeDirectory:
    """Satisfies `NodeDirectory`. Full, it forgets the entry that was published longest ago."""

    def __init__(self, clock: Clock, config: DirectoryConfig | None = None) -> None:
        self._clock = clock
        self._config = config or DirectoryConfig()
        self._entries: OrderedDict[BlockKey, tuple[DirectoryEntry, int]] = OrderedDict()
        """With the time at which each lapses, oldest first; `sweep` goes round by moving what it saw to the end."""
        self._owners: dict[str, tuple[str, int]] = {}
        """Boot token, and the time until which it is believed to be there."""
        self._dropped = 0

    def join(self, owner: Owner) -> None:
        """See `NodeDirectory.join`."""
        check_owner(owner)
        self._owners[owner.name] = (owner.boot, self._clock.now_ns() + self._config.owner_lease_ns)

    def heartbeat(self, owner: Owner) -> bool:
        """See `NodeDirectory.heartbeat`."""
        check_owner(owner)
        boot, until_ns = self._owners.get(owner.name, (owner.boot, 0))
        if boot != owner.boot and self._clock.now_ns() < until_ns:
            return False
        self.join(owner)
        for key, (entry, _) in list(self._entries.items()):
            if entry.owner == owner:
                self._entries[key] = (entry, self._clock.now_ns() + self._config.entry_lease_ns)
        return True

    def leave(self, owner: Owner) -> None:
        """See `NodeDirectory.leave`."""
        check_owner(owner)
        if self._owners.get(owner.name, ("", 0))[0] == owner.boot:
            del self._owners[owner.name]

    def publish(self, entries: Sequence[DirectoryEntry]) -> None:
        """See `NodeDirectory.publish`."""
        for entry in entries:
            check_entry(entry)
        for entry in entries:
            known, _ = self._entries.get(entry.key, (None, 0))
            is_older = known is not None and known.owner == entry.owner and known.generation > entry.generation
            if self._is_there(entry.owner) and not is_older:
                self._entries[entry.key] = (entry, self._clock.now_ns() + self._config.entry_lease_ns)
                self._entries.move_to_end(entry.key)
        while len(self._entries) > self._config.entries_max:
            self._entries.popitem(last=False)
            self._dropped += 1

    def withdraw(self, entries: Sequence[DirectoryEntry]) -> None:
        """See `NodeDirectory.withdraw`."""
        for entry in entries:
            check_entry(entry)
        for entry in entries:
            known, _ = self._entries.get(entry.key, (None, 0))
            if known is not None and known.owner == entry.owner and known.generation <= entry.generation:
                del self._entries[entry.key]

    def find(self, keys: Sequence[BlockKey]) -> tuple[DirectoryEntry | None, ...]:
        """See `NodeDirectory.find`."""
        for key in keys:
            check_key(key)
        return tuple(self._valid(key) for key in keys)

    def entries(self) -> Iterator[DirectoryEntry]:
        """See `NodeDirectory.entries`."""
        for key in list(self._entries):
            entry = self._valid(key)
            if entry is not None:
                yield entry

    def sweep(self) -> int:
        """See `NodeDirectory.sweep`."""
        removed = 0
        for key in list(islice(self._entries, self._config.batch_entries)):
            if self._valid(key) is None:
                del self._entries[key]
                removed += 1
            else:
                self._entries.move_to_end(key)
        now_ns = self._clock.now_ns()
        self._owners = {name: (boot, until) for name, (boot, until) in self._owners.items() if now_ns < until}
        return removed

    def statistics(self) -> DirectoryStatistics:
        """See `NodeDirectory.statistics`."""
        return DirectoryStatistics(
            entries=len(self._entries),
            waiting=0,
            is_degraded=False,
            errors_total=0,
            malformed_total=0,
            dropped_total=self._dropped,
        )

    def check_integrity(self) -> None:
        """See `NodeDirectory.check_integrity`."""
        assert len(self._entries) <= self._config.entries_max
        assert all(key == entry.key for key, (entry, _) in self._entries.items())

    def close(self) -> None:
        """See `NodeDirectory.close`."""

    def _is_there(self, owner: Owner) -> bool:
        boot, until_ns = self._owners.get(owner.name, ("", 0))
        return boot == owner.boot and self._clock.now_ns() < until_ns

    def _valid(self, key: BlockKey) -> DirectoryEntry | None:
        entry, until_ns = self._entries.get(key, (None, 0))
        if entry is None or self._clock.now_ns() >= until_ns or not self._is_there(entry.owner):
            return None
        return entry
