"""How often bytes are copied by the processor on their way, so that a test can say how often they may be."""

from __future__ import annotations

from collections import Counter
from typing import Final

INTO_SLOT: Final = "into_slot"
"""Moves whose bytes the caller had elsewhere."""
OUT_OF_SLOT: Final = "out_of_slot"
"""Fetches from a tier in memory."""
SLOT_TO_READER: Final = "slot_to_reader"
"""Verified reads of a slot that another process may release meanwhile."""


class CopyMeter:
    """Bytes that the processor copied, by the way that they went. What a device or the kernel moves does not count."""

    def __init__(self) -> None:
        self._bytes: Counter[str] = Counter()

    def count(self, way: str, size_bytes: int) -> None:
        """So many bytes were copied once on this way."""
        assert size_bytes >= 0
        self._bytes[way] += size_bytes

    def bytes_copied(self, way: str) -> int:
        """Bytes so far."""
        return self._bytes[way]

    def passes(self, way: str, size_bytes: int) -> float:
        """How often so many bytes were copied: 0.0 for a way without copies, 1.0 for one pass over them."""
        assert size_bytes > 0
        return self._bytes[way] / size_bytes
