"""Room in the home of segments: taken where it is free, made where it can be."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence

from h3kv.core.errors import TierFullError
from h3kv.core.layout import CacheLayout
from h3kv.core.ports import AddressableStore
from h3kv.core.types import SlotHandle
from h3kv.engine.segment import RoomMaker


class HomeRoom:
    """Not thread-safe.

    Args:
        home: where room is taken.
        layout: of its slabs.
    """

    def __init__(self, home: AddressableStore, layout: CacheLayout) -> None:
        self._home = home
        self._layout = layout
        self._maker: RoomMaker | None = None

    def serve(self, maker: RoomMaker) -> None:
        """Say who makes room from now on. Without one, a full home refuses."""
        self._maker = maker

    @property
    def refused_blocks(self) -> int:
        """Blocks that failed arrivals still hold."""
        return 0 if self._maker is None else self._maker.refused_blocks

    def free_blocks(self) -> int:
        """Blocks over all layers that nobody holds. They may lie apart."""
        return self._home.statistics().free_bytes // self._layout.block_bytes

    def reserve(self, sizes: Sequence[int], *, waits: bool) -> list[SlotHandle]:
        """Slots for all layers of segments of these sizes, segment by segment. See `SegmentTable.open`."""
        slots = [blocks for blocks in sizes for _ in range(self._layout.layers)]
        needed = sum(sizes)
        while True:
            free = self.free_blocks()
            if needed <= free:
                # Refused where the free room lies in too small pieces.
                with contextlib.suppress(TierFullError):
                    return self._home.reserve(slots)
            self._check(needed)
            assert self._maker is not None
            if not self._maker.make_room(max(needed, free + 1), waits=waits):
                return self._home.reserve(slots)

    def _check(self, needed: int) -> None:
        statistics = self._home.statistics()
        freeable = 0 if self._maker is None else self._maker.freeable_blocks()
        needed_bytes, freeable_bytes = needed * self._layout.block_bytes, freeable * self._layout.block_bytes
        if self._maker is None or needed_bytes > statistics.free_bytes + freeable_bytes:
            raise TierFullError(
                f"{needed_bytes} bytes are needed; of {statistics.capacity_bytes} bytes {statistics.free_bytes} are "
                f"free, {freeable_bytes} can be freed, and the rest is in use by running requests or pinned documents: "
                f"wait for a request to end, unpin or delete a document, or raise {statistics.tier}.kv_bytes",
                tier=statistics.tier,
                needed_bytes=needed_bytes,
                free_bytes=statistics.free_bytes + freeable_bytes,
            )
