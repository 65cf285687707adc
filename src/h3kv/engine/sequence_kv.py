"""The KV that one sequence holds: mounted segments of others, then segments of its own.

    blocks   0 | 1  2  3 | 4 ............... 19 | 20 ..
          (A, 1) (B, 3)    own, sealed when full  own, open

A sequence pins every segment that it reads until it ends.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass

from h3kv.attention.paged import PagedCache, PageKernels
from h3kv.core.errors import TierFullError
from h3kv.core.hashing import extend_keys
from h3kv.core.limits import BLOCK_TOKENS
from h3kv.core.ports import Directory
from h3kv.core.types import BlockKey, Tier
from h3kv.engine.prefix import Mount, mount_prefix
from h3kv.engine.segments import Segment, SegmentTable
from h3kv.policy.admission import plan_rooms


@dataclass(frozen=True, slots=True)
class _Own:
    """A segment that this sequence opened, with its place in the sequence in blocks."""

    segment: Segment
    start: int
    end: int


class SequenceKv:
    """Owns the pins of one sequence from `open_kv` to `close`.

    Args:
        mounts: reused beginnings, pinned.
        own: open segments with room for all other tokens, pinned.
        segments: where both come from.
        page_kernels: of the page cache.
        keys: the root key, then those of the prompt's whole blocks. Taken over.
    """

    def __init__(
        self,
        mounts: Sequence[Mount],
        own: Sequence[Segment],
        *,
        segments: SegmentTable,
        page_kernels: PageKernels,
        keys: list[BlockKey],
    ) -> None:
        self._segments = segments
        self._pinned = [*(mount.segment for mount in mounts), *own]
        self._previous = mounts[-1].segment if mounts else None
        self._keys = keys
        self._reused_blocks = sum(mount.blocks for mount in mounts)
        pages = self._reused_blocks + sum(segment.room_blocks for segment in own)
        self.cache = PagedCache(page_kernels, segments.layout, pages=pages)
        self._open: list[_Own] = []
        for mount in mounts:
            self.cache.mount(mount.segment.addresses_L, mount.blocks, room_blocks=mount.segment.room_blocks)
        at = self._reused_blocks
        for segment in own:
            self.cache.extend(segment.addresses_L, segment.room_blocks)
            self._open.append(_Own(segment, at, at + segment.room_blocks))
            at += segment.room_blocks

    @property
    def reused_tokens(self) -> dict[Tier, int]:
        """Tokens of the mounts, by the tier in which they lie."""
        return {self._segments.tier: self._reused_blocks * BLOCK_TOKENS}

    @property
    def pins(self) -> int:
        """Pins that this sequence holds, one for each segment."""
        return len(self._pinned)

    def seal_full(self, tokens: Sequence[int]) -> None:
        """Share own segments that are full. `tokens`: all of the sequence, from the first."""
        while self._open and self._open[0].end * BLOCK_TOKENS <= self.cache.tokens:
            own = self._open.pop(0)
            self._seal(own, own.end, tokens)

    def close(self, tokens: Sequence[int]) -> None:
        """Share the whole blocks that are left, then give all pins and all other room back.

        Sharing that goes wrong costs the reuse of those blocks and is not raised: the sequence has ended either way.
        """
        whole_blocks = min(self.cache.tokens, len(tokens)) // BLOCK_TOKENS
        try:
            with contextlib.suppress(Exception):
                for own in self._open:
                    if whole_blocks > own.start:
                        self._seal(own, min(own.end, whole_blocks), tokens)
        finally:
            self._open.clear()
            while self._pinned:
                self._segments.unpin(self._pinned.pop())

    def _seal(self, own: _Own, end: int, tokens: Sequence[int]) -> None:
        # keys[0] is the root, so block b has keys[b + 1].
        known = len(self._keys) - 1
        self._keys += extend_keys(self._keys[-1], tokens[known * BLOCK_TOKENS : end * BLOCK_TOKENS])
        self._segments.seal(own.segment, self._keys[own.start + 1 : end + 1], parent=self._previous)
        self._previous = own.segment


@dataclass(frozen=True, slots=True)
class KvNeed:
    """What a sequence needs to start."""

    keys: list[BlockKey]
    """The root key, then those of the prompt's whole blocks."""
    reusable_blocks: int
    """Blocks of the prompt that may be taken from others."""
    prompt_blocks: int
    """Blocks that the prompt fills."""
    blocks: int
    """Blocks of the whole sequence at its longest."""


def open_kv(
    need: KvNeed, directory: Directory, segments: SegmentTable, *, page_kernels: PageKernels, is_alone: bool
) -> SequenceKv:
    """Room for a sequence, with as much of its beginning reused as is known.

    Args:
        need: of the sequence.
        directory: names known blocks.
        segments: gives pins and room.
        page_kernels: of the page cache.
        is_alone: no other sequence will give room back: then reuse is given up piece by piece where the reused
            segments themselves take the room. A partly used segment pins all of its blocks.

    Raises:
        TierFullError: the room is pinned by others. Nothing is held then.
    """
    mounts: list[Mount] = []
    own: list[Segment] = []
    try:
        mounts = mount_prefix(need.keys[1 : need.reusable_blocks + 1], directory, segments)
        own = _open_own(need, mounts, segments, may_unmount=is_alone)
        return SequenceKv(mounts, own, segments=segments, page_kernels=page_kernels, keys=list(need.keys))
    except BaseException:
        for segment in [*own, *(mount.segment for mount in mounts)]:
            segments.unpin(segment)
        raise


def _open_own(need: KvNeed, mounts: list[Mount], segments: SegmentTable, *, may_unmount: bool) -> list[Segment]:
    """Segments for all blocks behind the mounts. Takes mounts off the end of the list where it may and must."""
    while True:
        try:
            return segments.open(plan_rooms(sum(mount.blocks for mount in mounts), need.prompt_blocks, need.blocks))
        except TierFullError:
            if not (may_unmount and mounts):
                raise
            segments.unpin(mounts.pop().segment)
