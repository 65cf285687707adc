"""What the cold store says when it cannot do what it was asked for."""

from __future__ import annotations

from pathlib import Path

from h3kv.core.errors import SlabCorruptError, TierFullError
from h3kv.core.types import SlabKey, StoreStatistics, Tier
from h3kv.tiers.cold.budget import WriteBudget
from h3kv.tiers.cold.extents import Extent


def no_room(path: Path, statistics: StoreStatistics, needed_bytes: int) -> TierFullError:
    """Its areas are full, or what is free lies apart."""
    return TierFullError(
        f"{needed_bytes} bytes do not fit into {path}: {statistics.free_bytes} of {statistics.capacity_bytes} bytes "
        "are free, perhaps apart; release something first or raise nvme.capacity",
        tier=Tier.NVME,
        needed_bytes=needed_bytes,
        free_bytes=statistics.free_bytes,
    )


def budget_spent(path: Path, budget: WriteBudget, needed_bytes: int) -> TierFullError:
    """Today's bytes are written."""
    left_bytes = max(budget.left_bytes or 0, 0)
    return TierFullError(
        f"{needed_bytes} bytes are over what may still be written to {path} today, {left_bytes} of "
        f"{budget.limit_bytes} bytes: wait for the next day, or raise nvme.write_bytes_per_day",
        tier=Tier.NVME,
        needed_bytes=needed_bytes,
        free_bytes=left_bytes,
    )


def given_up(path: Path, key: SlabKey, extent: Extent) -> SlabCorruptError:
    """A slab, or another one of its segment, is not as it was written."""
    return SlabCorruptError(
        f"{key} in {path} does not match its checksums: its segment of {extent.blocks} blocks is given up; compute its "
        "tokens again",
        key=key,
    )
