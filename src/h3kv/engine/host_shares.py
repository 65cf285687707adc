"""The parts of the HOST cap that are set aside for what is read from the cold store."""

from __future__ import annotations

from dataclasses import dataclass, field

from h3kv.core.errors import ConfigError
from h3kv.core.layout import CacheLayout
from h3kv.core.limits import SEGMENT_BLOCKS_MAX
from h3kv.core.types import SlotHandle
from h3kv.core.units import describe_size, format_size
from h3kv.engine.stream import SLOTS_MIN
from h3kv.tiers.host import RegionStore

STAGING_DIVISOR = 3
"""Staging takes a third of the HOST cap at most, but for the fewest slots that attention can do with."""


@dataclass(frozen=True, slots=True)
class HostShares:
    """Slots for slabs of full segments, one layer each; released by nobody while the store is open."""

    staging: list[SlotHandle] = field(default_factory=list)
    """Whole slabs pass through these."""
    pages: list[SlotHandle] = field(default_factory=list)
    """Single pages are kept in these."""

    @property
    def blocks(self) -> int:
        """Of one layer, together."""
        return sum(slot.blocks for slot in (*self.staging, *self.pages))


def reserve_shares(host: RegionStore, layout: CacheLayout, *, staging_bytes: int, page_cache_bytes: int) -> HostShares:
    """Take slots out of an empty store, so that room for one open segment is left.

    Args:
        host: the store.
        layout: of the model's KV.
        staging_bytes: wanted for staging.
        page_cache_bytes: wanted for single pages; 0: none.

    Raises:
        ConfigError: the cap is too small; the message has the sum.
    """
    staging = _reserve_staging(host, layout, staging_bytes)
    if page_cache_bytes == 0 or not layout.slab.page.encoding.is_clustered:
        return HostShares(staging)
    slab_bytes = layout.slab.size_bytes(SEGMENT_BLOCKS_MAX)
    statistics = host.statistics()
    free_bytes = statistics.free_bytes - SEGMENT_BLOCKS_MAX * layout.block_bytes
    slots = min(page_cache_bytes, free_bytes) // slab_bytes
    if slots < 1:
        needed_bytes = statistics.capacity_bytes - free_bytes + slab_bytes
        raise ConfigError(
            "staging and one open segment leave no room in HOST for single pages of the cold store; raise "
            f"host.kv_bytes to at least {format_size(needed_bytes)}",
            field="host.kv_bytes",
        )
    return HostShares(staging, host.reserve([SEGMENT_BLOCKS_MAX] * slots))


def _reserve_staging(host: RegionStore, layout: CacheLayout, staging_bytes: int) -> list[SlotHandle]:
    slab_bytes = layout.slab.size_bytes(SEGMENT_BLOCKS_MAX)
    capacity_bytes = host.statistics().capacity_bytes
    slots = max(min(staging_bytes, capacity_bytes // STAGING_DIVISOR) // slab_bytes, SLOTS_MIN)
    needed_bytes = slots * slab_bytes + SEGMENT_BLOCKS_MAX * layout.block_bytes
    if needed_bytes > capacity_bytes:
        raise ConfigError(
            f"the host cap is {describe_size(capacity_bytes)}, but {describe_size(needed_bytes)} are needed: "
            f"{slots} staging slots of {describe_size(slab_bytes)} + one open segment of {SEGMENT_BLOCKS_MAX} blocks "
            f"({describe_size(SEGMENT_BLOCKS_MAX * layout.block_bytes)}); raise host.kv_bytes to at least "
            f"{format_size(needed_bytes)}",
            field="host.kv_bytes",
        )
    return host.reserve([SEGMENT_BLOCKS_MAX] * slots)
