"""One segment as part of a sequence."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from h3kv.attention.page_table import PageRun
from h3kv.core.hashing import extend_keys
from h3kv.core.limits import BLOCK_TOKENS
from h3kv.core.types import BlockKey, SegmentLabel, Tier
from h3kv.engine.segment import Segment
from h3kv.engine.segments import SegmentTable


@dataclass(slots=True, eq=False)
class Held:
    """A pinned segment as part of the sequence. `start` and `end` count the sequence's blocks."""

    segment: Segment
    start: int
    end: int
    """Behind the last block that is used: it grows while an own segment is filled."""
    is_own: bool
    version: int
    """Of the segment when its place was last looked up."""


def label_of(held: Held, keys: list[BlockKey], tokens: Sequence[int]) -> SegmentLabel:
    """Under what a segment is found.

    Args:
        held: its place in the sequence.
        keys: of the sequence: the root, so that block b has keys[b + 1]. Those that are not there yet are added.
        tokens: of the sequence, as far as the segment reaches.
    """
    known = len(keys) - 1
    keys += extend_keys(keys[-1], tokens[known * BLOCK_TOKENS : held.end * BLOCK_TOKENS])
    return SegmentLabel(tuple(keys[held.start + 1 : held.end + 1]), keys[held.start])


def run_of(segments: SegmentTable, segment: Segment) -> PageRun:
    """Where a segment lies now."""
    addresses_L: tuple[int | None, ...] = segment.addresses_L or (None,) * segments.layout.layers
    return PageRun(
        segment.id,
        addresses_L,
        segment.room_blocks,
        is_device=segments.tier is Tier.DEVICE,
        clustered_blocks=segment.clustered_blocks,
        index_L=segments.indexes.addresses(segment),
    )
