"""What the tiers of a node hold, moved and run on: for people and for machines."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from rich.table import Table

from h3kv.core.types import StoreStatistics, Tier
from h3kv.core.units import NS_PER_S, describe_size
from h3kv.node import Node
from h3kv.telemetry import names

GB: Final = 10**9

SPEED_SHOWN_MIN: Final = 0.01
"""GB/s: the last digit that is shown."""


@dataclass(frozen=True, slots=True)
class Traffic:
    """Bytes that left and reached tiers since the node was opened."""

    to_nvme_bytes: int
    """Segments written from HOST to the cold store."""
    to_host_bytes: int
    """Segments brought back from the cold store into HOST."""
    streamed_bytes: int
    """Slabs read from the cold store into staging, for one use."""


@dataclass(frozen=True, slots=True)
class TierSnapshot:
    """The tiers at one moment."""

    at_ns: int
    tiers: Mapping[Tier, StoreStatistics]
    traffic: Traffic


def take_snapshot(node: Node, now_ns: int) -> TierSnapshot:
    """The tiers of a node now. Between two steps only."""
    moved = node.telemetry.value
    stream = node.pool.stream
    traffic = Traffic(
        to_nvme_bytes=int(moved(names.MOVED_BYTES, source=Tier.HOST, target=Tier.NVME)),
        to_host_bytes=int(moved(names.MOVED_BYTES, source=Tier.NVME, target=Tier.HOST)),
        streamed_bytes=0 if stream is None else stream.bytes_fetched_total,
    )
    return TierSnapshot(now_ns, node.statistics(), traffic)


def tier_table(now: TierSnapshot, before: TierSnapshot) -> Table:
    """One row for each tier; speeds are those between two snapshots."""
    grid = Table(title_justify="left", show_edge=False, pad_edge=False, box=None)
    grid.add_column("tier", style="dim")
    for name in ("used", "cap", "in", "out", "in GB/s", "out GB/s"):
        grid.add_column(name, justify="right")
    seconds = (now.at_ns - before.at_ns) / NS_PER_S
    for tier, statistics in now.tiers.items():
        sizes = [describe_size(statistics.used_bytes), describe_size(statistics.capacity_bytes)]
        copied = flows(tier, now.traffic)
        cells = [describe_size(amount) if amount else "-" for amount in copied]
        earlier = flows(tier, before.traffic)
        speeds = [_speed(after - start, seconds) for after, start in zip(copied, earlier, strict=True)]
        grid.add_row(tier.value, *sizes, *cells, *speeds)
    return grid


def tier_fields(node: Node) -> dict[str, object]:
    """The tiers under the stable keys of `--json`. What there is not is null."""
    stores = node.stores
    snapshot = take_snapshot(node, 0)
    traffic = snapshot.traffic
    host, cold, volume, io = stores.host, stores.cold, stores.volume, stores.io
    return {
        "tiers": {
            tier.value: {
                "used_bytes": statistics.used_bytes,
                "cap_bytes": statistics.capacity_bytes,
                "moves": statistics.moves_total,
            }
            for tier, statistics in snapshot.tiers.items()
        },
        "moved_bytes": {
            "host_to_nvme": traffic.to_nvme_bytes,
            "nvme_to_host": traffic.to_host_bytes,
            "nvme_streamed": traffic.streamed_bytes,
        },
        "region": None
        if host is None
        else {
            "kind": host.region.kind.value,
            "huge_pages": host.region.has_huge_pages,
            "fallback_reason": host.region.fallback_reason,
        },
        "store": None
        if cold is None or volume is None or io is None
        else {
            "path": str(volume.place.path),
            "backend": io.backend,
            "fallback_reason": io.fallback_reason,
            "direct": volume.place.is_direct,
            "fixed_buffers": io.fixed_buffers,
            "buffers_reason": io.buffers_reason,
            "degraded": cold.is_degraded,
        },
    }


def fallbacks(node: Node) -> list[str]:
    """What the cold store has to do without, in one line; empty where nothing is missing."""
    volume, io = node.stores.volume, node.stores.io
    if volume is None or io is None:
        return []
    missing = []
    if io.fallback_reason is not None:
        missing.append(f"threads instead of io_uring ({io.fallback_reason})")
    if not volume.place.is_direct:
        missing.append("I/O through the page cache (the file system has no O_DIRECT)")
    if io.backend == "io_uring" and not io.fixed_buffers:
        missing.append(f"buffers that are not registered ({io.buffers_reason})")
    return [f"the cold store at {volume.place.path} uses {', '.join(missing)}: it is slower"] if missing else []


def flows(tier: Tier, traffic: Traffic) -> tuple[int, int]:
    """Bytes copied into and out of a tier by moves and by the stream."""
    if tier is Tier.HOST:
        return traffic.to_host_bytes, traffic.to_nvme_bytes
    if tier is Tier.NVME:
        return traffic.to_nvme_bytes, traffic.to_host_bytes + traffic.streamed_bytes
    return 0, 0


def _speed(moved_bytes: int, seconds: float) -> str:
    if not (moved_bytes and seconds):
        return "-"
    speed = moved_bytes / seconds / GB
    return f"{speed:.2f}" if speed >= SPEED_SHOWN_MIN else f"<{SPEED_SHOWN_MIN}"
