"""What each tier did in a whole run: the table and the lines at its end."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

from rich.table import Table

from h3kv.cli.report import Answer
from h3kv.cli.tier_report import Traffic, flows, take_snapshot
from h3kv.core.limits import SEGMENT_TOKENS_MAX
from h3kv.core.types import Tier
from h3kv.core.units import describe_size
from h3kv.engine.cold_reads import WRAPPED
from h3kv.node import Node
from h3kv.telemetry import names

LEGEND: Final = (
    "peak: most in use after any step; found: prompt tokens whose KV lay there when a question came; in, out: copied "
    "into and out of a tier (attention reads device and host in place); dropped: segments given up to make room"
)


class Peaks:
    """The most that each tier had in use, looked at after each step."""

    def __init__(self, node: Node) -> None:
        self._node = node
        self._used = {tier: statistics.used_bytes for tier, statistics in node.statistics().items()}

    def look(self) -> None:
        """Take notice of what is in use now."""
        for tier, statistics in self._node.statistics().items():
            self._used[tier] = max(self._used[tier], statistics.used_bytes)

    @property
    def used_bytes(self) -> Mapping[Tier, int]:
        """By tier."""
        return self._used


def dropped_segments(node: Node) -> dict[Tier, int]:
    """Segments that were given up to make room, by the tier that held them last."""
    return {tier: int(node.telemetry.value(names.EVICTED_SEGMENTS, tier=tier)) for tier in node.statistics()}


def found_tokens(answers: Sequence[Answer]) -> dict[Tier, int]:
    """Prompt tokens of all answers whose KV was found, by the tier in which it lay."""
    return {tier: sum(answer.statistics.cached_tokens.get(tier, 0) for answer in answers) for tier in Tier}


def summary_table(node: Node, peaks: Peaks, answers: Sequence[Answer], *, before: Traffic) -> Table:
    """One row for each tier; traffic is that since `before`."""
    grid = Table(title_justify="left", show_edge=False, pad_edge=False, box=None)
    grid.add_column("tier", style="dim")
    for name in ("peak", "cap", "found", "in", "out", "dropped"):
        grid.add_column(name, justify="right")
    found, dropped, after = found_tokens(answers), dropped_segments(node), take_snapshot(node, 0).traffic
    for tier, statistics in node.statistics().items():
        copied = [end - start for end, start in zip(flows(tier, after), flows(tier, before), strict=True)]
        grid.add_row(
            tier.value,
            describe_size(peaks.used_bytes[tier]),
            describe_size(statistics.capacity_bytes),
            f"{found[tier]:,} tokens" if found[tier] else "-",
            *(describe_size(amount) if amount else "-" for amount in copied),
            f"{dropped[tier]:,}" if dropped[tier] else "-",
        )
    return grid


def warnings(node: Node) -> list[str]:
    """What was computed again or will be missed by the next run; empty where nothing was lost."""
    lines = []
    lost = dropped_segments(node).get(Tier.NVME, 0)
    if lost:
        lines.append(
            f"the cold store was full: {lost:,} segments of up to {SEGMENT_TOKENS_MAX:,} tokens, those used longest "
            "ago, were dropped to make room; raise --store-capacity to keep more"
        )
    taken = int(node.telemetry.value(names.STORE_AREAS_TAKEN, tier=Tier.NVME))
    if taken:
        lines.append(
            f"KV of another model, encoding or element type was dropped from {taken:,} areas of the cold store to make "
            "room; raise --store-capacity to keep both"
        )
    damaged = int(node.telemetry.value(names.CORRUPT_SLABS, tier=Tier.NVME))
    if damaged:
        lines.append(
            f"{damaged:,} slabs in the cold store were damaged: their tokens were computed again and are stored anew; "
            "look at the disk if that happens more than once"
        )
    wrapped = int(node.telemetry.value(names.LOST_SEGMENTS, reason=WRAPPED))
    if wrapped:
        lines.append(
            f"{wrapped:,} segments in the cold store are wrapped in LZ4, which retrieval cannot read: their "
            "tokens were computed again and are stored anew"
        )
    return lines
