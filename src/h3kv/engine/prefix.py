"""The part of a prompt whose KV is there already.

    blocks of the prompt   0 | 1   2   3 | 4   5   6   7
    found in               A | B0  B1  B2| C0  C1  ?
    mounted               (A, 1), (B, 3), (C, 2)

A mount is always a segment's beginning. When two segments hold equal blocks, the directory may name one for block 5 and
the other for block 6; then the run is walked from its end: the segment of the last block holds all blocks up to its own
first one, because keys are chained.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from h3kv.core.limits import BLOCK_TOKENS
from h3kv.core.ports import Directory
from h3kv.core.types import BlockKey, BlockLocation, SegmentId
from h3kv.engine.segment import Segment
from h3kv.engine.segments import SegmentTable


@dataclass(frozen=True, slots=True)
class Mount:
    """The first blocks of a sealed segment, as part of a sequence that holds one pin on it."""

    segment: Segment
    blocks: int

    @property
    def blocks_beside(self) -> int:
        """Blocks that the mount takes beside its own: one partly used pins all. What documents hold has its room."""
        return -self.blocks if self.segment.holds else self.segment.room_blocks - self.blocks


def reusable_blocks(prompt_tokens: int) -> int:
    """Whole blocks of a prompt that may be reused: its last token is always computed, for its logits."""
    return (prompt_tokens - 1) // BLOCK_TOKENS


def cover(locations: Sequence[BlockLocation]) -> list[tuple[SegmentId, int]]:
    """Segments with their number of blocks that make up these locations, in order; each used from its first block.

    Nothing when the locations contradict themselves.
    """
    runs: list[tuple[SegmentId, int]] = []
    end = len(locations)
    while end > 0:
        last = locations[end - 1]
        runs.append((last.segment, last.index + 1))
        end -= last.index + 1
    return runs[::-1] if end == 0 else []


def mount_prefix(keys: Sequence[BlockKey], directory: Directory, segments: SegmentTable) -> list[Mount]:
    """The longest known prefix, pinned. What is lost between finding and pinning is recomputed, and all after it.

    Args:
        keys: of the prompt's blocks that may be reused.
        directory: gives hints.
        segments: pins; the caller unpins every mount. When something is raised, nothing is pinned.
    """
    mounts: list[Mount] = []
    start = 0
    try:
        for segment_id, blocks in cover(directory.find(keys)):
            segment = segments.pin(segment_id, keys=keys[start : start + blocks])
            if segment is None:
                break
            mounts.append(Mount(segment, blocks))
            start += blocks
    except BaseException:
        for mount in mounts:
            segments.unpin(mount.segment)
        raise
    return mounts


def held_prefix(keys: Sequence[BlockKey], directory: Directory, segments: SegmentTable) -> int:
    """Blocks of a prompt that documents hold. Arguments as of `mount_prefix`; nothing is pinned."""
    held = 0
    for segment_id, blocks in cover(directory.find(keys)):
        segment = segments.find(segment_id)
        held += blocks if segment is not None and segment.holds else 0
    return held
