"""What the sequences of a pool have in common."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from h3kv.attention import native, sealing
from h3kv.attention.page_seams import PageKernels
from h3kv.attention.recall import RecallSample
from h3kv.attention.touches import TouchSample
from h3kv.core.limits import BLOCK_TOKENS
from h3kv.core.ports import Offload, Telemetry
from h3kv.core.retrieval import RetrievalSetting
from h3kv.engine.attended import AttendedTokens
from h3kv.engine.capacity import Census
from h3kv.engine.page_cache import PageCache
from h3kv.engine.page_lane import PATIENCE_NS, PageLane
from h3kv.engine.segment import Segment
from h3kv.engine.segments import SegmentTable
from h3kv.engine.stream import SlabStream


@dataclass(frozen=True, slots=True)
class KvParts:
    """What every sequence of a pool shares."""

    segments: SegmentTable
    page_kernels: PageKernels
    stream: SlabStream | None
    """Gives what lies in the cold store; None where there is none."""
    pages: PageCache | None
    """Keeps single pages that lie there."""
    telemetry: Telemetry
    """Receives the bytes that leave windows."""
    window_blocks: int
    """Newest whole blocks of a sequence that are always attended to exactly."""
    is_sealing: bool
    """Whether the processor reaches the home, so that full segments are clustered there."""
    is_eager: bool
    """Own segments are opened when the sequence starts, so that it can always end."""
    census: Census
    """Who runs."""
    recall_sample: RecallSample = field(default_factory=RecallSample)
    """Of all sequences."""
    touch_sample: TouchSample = field(default_factory=TouchSample)
    """Of all sequences."""
    offload: Offload = native.LOCAL
    """Who attends to what is not on the device."""

    @property
    def is_clustered(self) -> bool:
        """Whether tokens of full segments are permuted."""
        return self.segments.layout.slab.page.encoding.is_clustered

    def attended_tokens(self) -> AttendedTokens:
        """Counts what the tokens of one answer attend to."""
        layout, window_tokens = self.segments.layout, self.window_blocks * BLOCK_TOKENS
        return AttendedTokens(layers=layout.layers, kv_heads=layout.slab.kv_heads, window_tokens=window_tokens)

    def page_lane(self, setting: RetrievalSetting) -> PageLane | None:
        """Single pages of the cold store for one sequence; None where there are none.

        Raises:
            ConfigError: there is too little room for what the setting reads.
        """
        if self.pages is None:
            return None
        self.pages.check_budget(setting.budget_tokens)
        patience_ns = PATIENCE_NS if setting.best_effort else None
        return PageLane(self.pages, self.segments.layout.layers, patience_ns=patience_ns)

    def cluster(self, segment: Segment, blocks: int) -> None:
        """Permute the tokens of an open segment whose first blocks are filled, where that is done here."""
        if self.is_sealing and self.segments.indexes.is_clustered(segment.room_blocks):
            assert segment.addresses_L is not None, "an open segment lies in its home"
            slabs_L = np.array(segment.addresses_L, dtype=np.uint64)
            sealing.seal(slabs_L, layout=self.segments.layout.slab, blocks=blocks)
            segment.clustered_blocks = blocks
