"""Thresholds of the migration rules, and the pairs of tiers between which segments move."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, NamedTuple

from h3kv.core.errors import ConfigError
from h3kv.core.types import Tier
from h3kv.core.units import NS_PER_MS, NS_PER_S


class TierPair(NamedTuple):
    """Two tiers between which segments move: promoted from slow to fast, demoted from fast to slow."""

    fast: Tier
    slow: Tier


DEVICE_HOST: Final = TierPair(Tier.DEVICE, Tier.HOST)
HOST_NVME: Final = TierPair(Tier.HOST, Tier.NVME)


@dataclass(frozen=True, slots=True)
class MigrationConfig:
    """What the rules compare with.

    Raises:
        ConfigError: a value that no rule can work with; the field is named.
    """

    pairs: tuple[TierPair, ...] = (HOST_NVME,)
    """In which segments move; on a node with a device also `DEVICE_HOST`. Others are left to the data plane."""
    tick_ns: int = 100 * NS_PER_MS
    """Length of a tick: of the reports of touches as of the byte budgets."""
    touch_mass_min: float = 0.01
    """Attention mass, as a share of all attention of a tick, from which a segment counts as touched: an even share in a
    context of 100 segments, 100K tokens."""
    promote_free_fraction_min: float = 0.15
    """Free share of a fast tier from which any touched segment is promoted. Below it a place must be earned."""
    promote_touches_in_row: int = 3
    """Ticks in a row in which a segment must be touched to earn a place."""
    displace_margin: float = 2.0
    """How many times hotter it must be than what goes for it: as many decayed uses."""
    heat_half_life_ns: int = 300 * NS_PER_S
    """Time in which a use of a segment loses half its weight. A conversation goes on after a minute or two."""
    eviction_threshold_ns: int = 10 * NS_PER_S
    """`eviction_threshold`: a segment that was not touched for so long is idle."""
    jitter_ns_max: float = 25.0
    """Standard deviation of a fast tier's access time above which idle segments leave it."""
    jitter_used_fraction_min: float = 0.90
    """Used share of a fast tier down to which jitter makes segments leave. 0 empties it of all that is idle."""
    watermark_high: float = 0.95
    """Used share of a fast tier from which idle segments leave it,"""
    watermark_low: float = 0.90
    """and at which they stop leaving."""
    hysteresis_ns: int = 10 * NS_PER_S
    """For how long a segment that was moved is not moved back, and one whose move failed not moved again."""
    promote_bytes_per_tick: int = 64 << 20
    demote_bytes_per_tick: int = 64 << 20
    """Bytes that commands of a tick may move, for each direction. A segment larger than that takes the budgets of the
    ticks after it."""
    command_timeout_ns: int = 2 * NS_PER_S
    """After which a command is void, to those who carry it out and to those who gave it."""
    commands_in_flight_max: int = 64
    """Commands under way at a time, and segments that wait for the room that commands make."""
    segments_max: int = 1 << 17
    """Segments that are known at a time. Those beyond are left to the data plane."""
    owners_max: int = 256

    def __post_init__(self) -> None:
        fractions = (
            "promote_free_fraction_min",
            "jitter_used_fraction_min",
            "watermark_low",
            "watermark_high",
            "touch_mass_min",
        )
        for field in fractions:
            self._require(0.0 <= getattr(self, field) <= 1.0, field, "a share from 0 to 1")
        positive = (
            "tick_ns",
            "promote_touches_in_row",
            "heat_half_life_ns",
            "promote_bytes_per_tick",
            "demote_bytes_per_tick",
            "command_timeout_ns",
            "commands_in_flight_max",
            "segments_max",
            "owners_max",
        )
        for field in positive:
            self._require(getattr(self, field) > 0, field, "more than 0")
        for field in ("eviction_threshold_ns", "hysteresis_ns", "jitter_ns_max"):
            self._require(getattr(self, field) >= 0, field, "at least 0")
        self._require(self.watermark_low <= self.watermark_high, "watermark_low", "at most watermark_high")
        self._require(self.displace_margin >= 1.0, "displace_margin", "at least 1")
        fasts = {pair.fast for pair in self.pairs}
        is_chain = len(fasts) == len(self.pairs) and all(pair in {DEVICE_HOST, HOST_NVME} for pair in self.pairs)
        self._require(is_chain, "pairs", "neighbouring tiers, each pair once, the faster one first")

    def _require(self, holds: bool, field: str, rule: str) -> None:
        if not holds:
            raise ConfigError(f"migration.{field} is {getattr(self, field)!r}: it must be {rule}", field=field)
