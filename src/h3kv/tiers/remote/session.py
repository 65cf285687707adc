"""What a client has from one life of the server: a channel, and what the store kept."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from h3kv.core.types import SegmentLabel, SlotHandle
from h3kv.memory.region import Region
from h3kv.tiers.remote.channel import ChannelSide


@dataclass(frozen=True, slots=True)
class KeptSegment:
    """A segment of the server's store that is this client's."""

    label: SegmentLabel
    handles_L: tuple[SlotHandle, ...]
    """The server's: good for this session."""


@dataclass(frozen=True, slots=True, eq=False)
class ColdSession:
    """From a registration to the end of the server."""

    side: ChannelSide
    capacity_bytes: int
    """Of the store, as its statistics have it."""
    kept: Sequence[KeptSegment]
    """Oldest first."""
    note_posted: Callable[[int], None]
    """Says how many records were pushed in all."""


class SessionSource(Protocol):
    """Finds the server again when it is gone, on threads of its own."""

    @property
    def current(self) -> ColdSession | None:
        """The session; another one after each return of the server, None while it is gone. Costs nothing."""
        ...

    def renew(self, session: ColdSession) -> None:
        """The server has ended this session's channel: get another. Does nothing for a session of before."""
        ...


class SharedRanges:
    """Which memory the server can reach.

    Args:
        regions: with slots, mapped.
    """

    def __init__(self, regions: Sequence[Region]) -> None:
        starts = [region.address + region.geometry.data_offset for region in regions]
        self._ranges = [
            (start, start + region.geometry.data_bytes) for start, region in zip(starts, regions, strict=True)
        ]

    def holds(self, address: int, size_bytes: int) -> bool:
        """Whether all of it lies in one of them."""
        return any(start <= address and address + size_bytes <= end for start, end in self._ranges)
