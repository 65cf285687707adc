"""The seam of the node directory, and its settings."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

from h3kv.core.errors import ConfigError
from h3kv.core.types import BlockKey
from h3kv.core.units import NS_PER_MS, NS_PER_S
from h3kv.directory.entries import DirectoryEntry, check_name
from h3kv.policy.migration_state import Owner


@dataclass(frozen=True, slots=True)
class DirectoryConfig:
    """Bounds of a node directory.

    Raises:
        ConfigError: a duration or bound is not positive.
        RequestError: the namespace has characters that do not belong there.
    """

    namespace: str = "default"
    """Directories of different names share a server without meeting."""
    owner_lease_ns: int = 15 * NS_PER_S
    """For how long a process is believed to be there after its last heartbeat."""
    entry_lease_ns: int = 3_600 * NS_PER_S
    """For how long an entry is kept that nobody says again. Heartbeats do, for what this process published."""
    entries_max: int = 1 << 17
    """Entries that this process keeps in its memory."""
    batch_entries: int = 256
    """Entries in one command to the server, during which it does nothing else."""
    batches_per_call: int = 8
    """Commands that one call sends at most."""
    timeout_ns: int = 250 * NS_PER_MS
    """For how long a call waits for the server."""
    backoff_ns_min: int = 100 * NS_PER_MS
    backoff_ns_max: int = 10 * NS_PER_S
    """For how long the server is left alone after it failed: from the one, doubling, to the other."""

    def __post_init__(self) -> None:
        check_name(self.namespace, "the namespace of the directory")
        for field in self.__slots__:
            value = getattr(self, field)
            if field != "namespace" and value <= 0:
                raise ConfigError(f"directory.{field} is {value}: it must be more than 0", field=field)
        for field in ("owner_lease_ns", "entry_lease_ns"):
            if getattr(self, field) < NS_PER_MS:
                raise ConfigError(f"directory.{field} must be at least 1ms", field=field)


@dataclass(frozen=True, slots=True)
class DirectoryStatistics:
    """State of one process's view of the directory."""

    entries: int
    """That it keeps itself: all of them, or those that it published."""
    waiting: int
    """Changes that the server does not know yet."""
    is_degraded: bool
    """Whether the server cannot be reached: answers come from what this process knows."""
    errors_total: int
    """Calls to the server that failed."""
    malformed_total: int
    """Values that were no entries."""
    dropped_total: int
    """Entries and changes forgotten because there were too many."""


class NodeDirectory(Protocol):
    """Where blocks lie, across processes. Not thread-safe: one thread calls it.

    Answers are hints: an owner confirms or denies them. An entry counts only while the life of the owner that said it
    is there: it has joined, no later life of it has, and its last heartbeat is not too long ago. Of two entries for a
    key the newer one counts.

    No call raises because a server cannot be reached; `statistics` tells.
    """

    def join(self, owner: Owner) -> None:
        """This life of a process is there now. Entries of earlier lives count no longer. Raises RequestError."""
        ...

    def heartbeat(self, owner: Owner) -> bool:
        """It is still there. False: a later life has joined, this one's entries count no longer."""
        ...

    def leave(self, owner: Owner) -> None:
        """It is there no longer; a later life stays."""
        ...

    def publish(self, entries: Sequence[DirectoryEntry]) -> None:
        """Say where blocks lie. Of lives that are not there it changes nothing, nor does an older generation.

        Raises:
            RequestError: a field cannot be kept. Nothing was published.
        """
        ...

    def withdraw(self, entries: Sequence[DirectoryEntry]) -> None:
        """Take entries back: as far as this life of their owner said them last, under no later generation.

        Raises:
            RequestError: a field cannot be kept. Nothing was withdrawn.
        """
        ...

    def find(self, keys: Sequence[BlockKey]) -> tuple[DirectoryEntry | None, ...]:
        """The entry of each key. Raises RequestError where a key has the wrong size."""
        ...

    def entries(self) -> Iterator[DirectoryEntry]:
        """All entries that count, each once as far as nobody changes them meanwhile; fewer where the server fails."""
        ...

    def sweep(self) -> int:
        """Look at some entries and remove those that count no longer. Returns how many that were. Called now and then,
        it comes by all of them.
        """
        ...

    def statistics(self) -> DirectoryStatistics:
        """State and totals now."""
        ...

    def check_integrity(self) -> None:
        """Assert that bounds hold."""
        ...

    def close(self) -> None:
        """End connections. Calling it again does nothing."""
        ...
