"""How much KV the tiers hold together, and how much of it running sequences may come to need."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from h3kv.core.errors import TierFullError
from h3kv.core.layout import CacheLayout
from h3kv.core.limits import BLOCK_TOKENS, SEGMENT_BLOCKS_MAX
from h3kv.core.ports import AddressableStore, PersistentStore
from h3kv.core.types import Tier
from h3kv.core.units import describe_size, format_size
from h3kv.tiers.index_store import IndexStore


@dataclass(slots=True)
class Census:
    """Sequences that run, and what they may come to need."""

    running: int = 0
    blocks: int = 0


class Capacity:
    """Counts sequences in and out, so that all that run have the room that they are sure of. Not thread-safe.

    Args:
        layout: of all stores.
        home: where segments are written.
        cold: where they may go; None: nowhere.
        index: room for their indexes then; None: they have none.
        apart_bytes: of the home, taken for slabs and pages that are read from the cold store.
        sequences_max: that may run at a time, by the device's room.
        cold_cure: says what makes the cold store hold so many blocks.
    """

    def __init__(
        self,
        layout: CacheLayout,
        home: AddressableStore,
        cold: PersistentStore | None,
        index: IndexStore | None,
        *,
        apart_bytes: int,
        sequences_max: int,
        cold_cure: Callable[[int], str],
    ) -> None:
        self._layout = layout
        self._home = home
        self._cold = cold
        self._index = index
        self._apart_bytes = apart_bytes
        self._sequences_max = sequences_max
        self._cold_cure = cold_cure
        self._held: Callable[[], int] = lambda: 0
        self._held_home: Callable[[], int] = lambda: 0
        self._longest: Callable[[], int] = lambda: 0
        self.census = Census()

    def serve_held(self, held: Callable[[], int], *, in_home: Callable[[], int]) -> None:
        """Say who knows how many blocks documents hold, in all and in the home: these are nobody else's."""
        self._held, self._held_home = held, in_home

    def serve_longest(self, longest: Callable[[], int]) -> None:
        """Say who knows the blocks of the longest request that was taken on, beside those that documents hold: it must
        find room when it runs alone.
        """
        self._longest = longest

    @property
    def home_blocks(self) -> int:
        """Blocks of the home over all layers that segments may take."""
        return (self._home.statistics().capacity_bytes - self._apart_bytes) // self._layout.block_bytes

    @property
    def blocks(self) -> int:
        """Blocks of one sequence that all tiers hold together, beside what documents hold."""
        if self._cold is None or self._cold.is_degraded:
            # What a degraded store holds can be read, but nothing more goes there.
            return self.home_blocks - self._held_home()
        return self.all_blocks - self._held()

    @property
    def all_blocks(self) -> int:
        """The same without documents, and as if the cold store took whatever comes."""
        if self._cold is None:
            return self.home_blocks
        cold_blocks = self._cold.statistics().capacity_bytes // self._layout.block_bytes
        return self.home_blocks - SEGMENT_BLOCKS_MAX + cold_blocks

    @property
    def spare_blocks(self) -> int:
        """Blocks that no request may come to need: neither all that run together, nor the longest one alone."""
        return self.blocks - max(self.census.blocks, self._longest())

    def cure_for(self, blocks: int) -> str:
        """What makes all tiers hold so many blocks of one sequence: the cap of the last one."""
        if self._cold is not None:
            return self._cold_cure(blocks - self.home_blocks + SEGMENT_BLOCKS_MAX)
        unit_bytes = self._layout.slab.size_bytes(SEGMENT_BLOCKS_MAX)
        enough_bytes = -(-blocks * self._layout.block_bytes // unit_bytes) * unit_bytes
        return f"raise {self._home.tier}.kv_bytes to at least {format_size(enough_bytes)}"

    def commit(self, blocks: int, *, retrieves: bool = False) -> None:
        """Count a sequence in.

        Args:
            blocks: that it may come to need.
            retrieves: whether their indexes have to stay in memory.

        Raises:
            TierFullError: those that run leave too little.
        """
        self._check_sequences()
        self._check_tiers(blocks)
        if retrieves and self._index is not None:
            self._check_index(blocks, self._index)
        self.census.blocks += blocks
        self.census.running += 1

    def extend(self, blocks: int) -> None:
        """Count in more blocks of a sequence.

        Raises:
            TierFullError: those that run leave too little.
        """
        self._check_tiers(blocks)
        self.census.blocks += blocks

    def uncommit(self, blocks: int) -> None:
        """Count a sequence out."""
        self.census.blocks -= blocks
        self.census.running -= 1

    @property
    def places(self) -> int:
        """Sequences that may run at a time: each has a window on the device and, with a cold store, an open segment in
        HOST.
        """
        if self._cold is None:
            return self._sequences_max
        return min(self._sequences_max, self.home_blocks // SEGMENT_BLOCKS_MAX)

    def _check_sequences(self) -> None:
        if self.census.running >= self.places:
            raise TierFullError(
                f"the caps have room for the windows and open segments of {self.places} running sequences: wait for "
                "one to end, or raise device.kv_bytes and host.kv_bytes",
                tier=Tier.DEVICE,
                needed_bytes=self._layout.block_bytes,
                free_bytes=0,
            )

    def _check_tiers(self, blocks: int) -> None:
        left = self.blocks - self.census.blocks
        if self._cold is not None and blocks > left:
            raise TierFullError(
                f"the request may come to need {self.describe(blocks)}, and running ones leave {self.describe(left)} "
                "of all tiers: wait for one to end, or raise nvme.capacity",
                tier=Tier.NVME,
                needed_bytes=blocks * self._layout.block_bytes,
                free_bytes=left * self._layout.block_bytes,
            )

    def _check_index(self, blocks: int, index: IndexStore) -> None:
        left = index.slots * SEGMENT_BLOCKS_MAX - self.census.blocks
        if blocks > left:
            needed_bytes = -(-blocks // SEGMENT_BLOCKS_MAX) * index.slot_bytes
            cure = f"raise host.index_bytes to at least {format_size(needed_bytes)}"
            if self.census.blocks:
                cure = "wait for one to end, or raise host.index_bytes"
            raise TierFullError(
                f"the request may come to need the index of {blocks:,} blocks, and running ones leave room for "
                f"{max(left, 0):,} in the index region of {describe_size(index.slots * index.slot_bytes)}: {cure}",
                tier=Tier.HOST,
                needed_bytes=needed_bytes,
                free_bytes=max(left, 0) // SEGMENT_BLOCKS_MAX * index.slot_bytes,
            )

    def describe(self, blocks: int) -> str:
        """Blocks in words."""
        size = describe_size(blocks * self._layout.block_bytes)
        return f"{blocks:,} blocks ({blocks * BLOCK_TOKENS:,} tokens, {size})"
