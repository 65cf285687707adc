"""How many bytes attention reads of the cold context, as a share of what it takes in bf16.

Cold is what lies behind the window and the sinks. Exact attention reads every cold token whole: codes and scales.
Retrieval reads planes and summaries, the chosen clusters, and tokens outside the window that are in no index.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Final

from h3kv.attention.retrieval import RetrievalMeter
from h3kv.core.layout import SCALES_BYTES, CacheLayout
from h3kv.core.limits import BLOCK_TOKENS, SINK_BLOCKS

SINK_TOKENS: Final = SINK_BLOCKS * BLOCK_TOKENS

PLAIN_BYTES: Final = 2
"""Of a number in bf16, whatever element type runs."""


@dataclass(frozen=True, slots=True)
class Reading:
    """What decode steps read of cold tokens, over all layers and KV heads."""

    plain_bytes: float = 0.0
    """What the cold tokens take in bf16, once for each step."""
    read_bytes: float = 0.0
    """Bytes that were used: planes, summaries, clusters, and tokens that are read exactly."""
    page_bytes: float = 0.0
    """The same with whole pages in place of clusters, as a disk gives them."""
    recall_sum: float = 0.0
    recall_count: int = 0

    def __add__(self, other: Reading) -> Reading:
        return Reading(
            self.plain_bytes + other.plain_bytes,
            self.read_bytes + other.read_bytes,
            self.page_bytes + other.page_bytes,
            self.recall_sum + other.recall_sum,
            self.recall_count + other.recall_count,
        )

    @property
    def share(self) -> float | None:
        """Bytes read over plain bytes; None before any cold token was read."""
        return self.read_bytes / self.plain_bytes if self.plain_bytes else None

    @property
    def page_share(self) -> float | None:
        """The same with whole pages."""
        return self.page_bytes / self.plain_bytes if self.plain_bytes else None

    @property
    def recall(self) -> float | None:
        """Mean share of the attention mass that was read exactly; None where it was not measured."""
        return self.recall_sum / self.recall_count if self.recall_count else None


def plain_token_bytes(layout: CacheLayout) -> int:
    """Bytes of one token's keys and values in bf16, of one layer."""
    return 2 * layout.slab.kv_heads * layout.slab.page.head_dim * PLAIN_BYTES


def exact_token_bytes(layout: CacheLayout) -> float:
    """What exact attention reads of one token in one layer: keys, values and scales, no places or summaries."""
    page = layout.slab.page
    scales_bytes = 0 if page.is_raw else SCALES_BYTES
    coded_bytes = page.keys_bytes + page.values_bytes + page.nibbles_bytes + scales_bytes
    return layout.slab.kv_heads * coded_bytes / BLOCK_TOKENS


def snapshot(meter: RetrievalMeter) -> RetrievalMeter:
    """Its figures as they are now."""
    return copy.copy(meter)


def read_by_chunk(
    layout: CacheLayout,
    before: RetrievalMeter,
    after: RetrievalMeter,
    *,
    rows: int,
    tokens: int,
    window_tokens: int,
) -> Reading:
    """What one chunk read.

    Args:
        layout: of the KV.
        before: the sequence's meter before the chunk.
        after: its meter now.
        rows: of the chunk.
        tokens: in the cache behind it.
        window_tokens: newest of them that are not counted; nor are the sinks.
    """
    cold_tokens = max(tokens - window_tokens - SINK_TOKENS, 0)
    # The meter counts every row once for each layer that retrieves; the others read all cold tokens.
    retrieving_rows = after.rows - before.rows
    exact_tokens = (rows * layout.layers - retrieving_rows) * cold_tokens
    # It takes the sinks for cold.
    exact_tokens += max(after.exact_tokens - before.exact_tokens - retrieving_rows * SINK_TOKENS, 0)
    scanned_bytes = after.plane_bytes - before.plane_bytes + after.summary_bytes - before.summary_bytes
    read_bytes = scanned_bytes + exact_token_bytes(layout) * exact_tokens
    return Reading(
        plain_bytes=rows * cold_tokens * plain_token_bytes(layout) * layout.layers,
        read_bytes=read_bytes + after.cluster_bytes - before.cluster_bytes,
        page_bytes=read_bytes + after.page_bytes - before.page_bytes,
        recall_sum=after.recall_sum - before.recall_sum,
        recall_count=after.recalls - before.recalls,
    )
