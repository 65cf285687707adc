"""Settings of the cold store."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from h3kv.tiers.cold.budget import utc_day
from h3kv.tiers.io import Backend

Wrap = Literal["none", "lz4"]


@dataclass(frozen=True, slots=True)
class ColdStoreConfig:
    """Size and limits of the cold tier."""

    capacity_bytes: int | None
    """Cap on the file or device in total, tables included. None: as large as the store was made. Lower than that drops
    what lies beyond."""
    backend: Backend = "auto"
    """What reads and writes: io_uring, or threads where it is refused."""
    depth: int = 64
    """Operations that the device is given at a time."""
    write_bytes_per_day: int | None = None
    """Bytes that may be written in a day (UTC), over all processes that use the store. None: any."""
    wrap: Wrap = "none"
    """Whether slabs are written with fewer bytes, at the price of threads that wrap and unwrap them. A wrapped slab is
    read whole. What was written under another setting is read as it was written."""
    codec_threads: int = 2
    """That wrap and unwrap. They begin with the first slab that needs them."""
    today: Callable[[], int] = utc_day
    """Number of the day now."""
