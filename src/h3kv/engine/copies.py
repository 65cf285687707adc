"""Segments on their way between the tiers, as the placer knows them."""

from __future__ import annotations

from dataclasses import dataclass

from h3kv.core.types import SlotHandle
from h3kv.engine.segment import Arrival, Segment


@dataclass(slots=True)
class Copying:
    """A segment on its way into the cold store."""

    segment: Segment
    handles_L: tuple[SlotHandle, ...]
    reason: str
    layers_left: int
    start_ns: int
    error: Exception | None = None


@dataclass(frozen=True, slots=True)
class Arriving:
    """A segment on its way back into the home."""

    segment: Segment
    arrival: Arrival
    reason: str
    start_ns: int
