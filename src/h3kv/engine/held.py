"""Segments as parts of a sequence."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from h3kv.attention.page_table import PageRun
from h3kv.core.errors import SlabUnavailableError
from h3kv.core.hashing import extend_keys
from h3kv.core.limits import BLOCK_TOKENS
from h3kv.core.types import BlockKey, SegmentLabel, SlabKey, Tier
from h3kv.engine.segment import Phase, Segment
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


class HeldRow:
    """The segments that one sequence pins, in the order of its blocks.

    Args:
        segments: where pins are given back.
        retrieves: whether the sequence will decode under retrieval: indexes stay in memory then.
    """

    def __init__(self, segments: SegmentTable, *, retrieves: bool) -> None:
        self._segments = segments
        self._retrieves = retrieves
        self._row: list[Held] = []
        # How many of the first ones are known to be sealed.
        self._sealed = 0

    def __iter__(self) -> Iterator[Held]:
        return iter(self._row)

    def __len__(self) -> int:
        return len(self._row)

    @property
    def last(self) -> Held | None:
        """The one with the newest blocks."""
        return self._row[-1] if self._row else None

    @property
    def sealed_blocks(self) -> int:
        """Blocks from the first on that lie in sealed segments."""
        while self._sealed < len(self._row) and self._row[self._sealed].segment.phase is Phase.SEALED:
            self._sealed += 1
        return self._row[self._sealed - 1].end if self._sealed else 0

    @property
    def document_blocks(self) -> int:
        """Blocks of segments that documents hold."""
        return sum(held.end - held.start for held in self._row if held.segment.holds)

    def before(self, held: Held) -> Segment | None:
        """The segment in front of one."""
        at = self._row.index(held)
        return self._row[at - 1].segment if at else None

    def behind(self, block: int) -> list[Held]:
        """Those with blocks from this one on, in order."""
        first = len(self._row)
        while first > 0 and self._row[first - 1].end > block:
            first -= 1
        return self._row[first:]

    def retrieve(self) -> None:
        """The sequence decodes under retrieval from now on."""
        if not self._retrieves:
            self._retrieves = True
            for held in self._row:
                held.segment.retrieving += 1

    def add(self, held: Held) -> None:
        """Take over a pin."""
        held.segment.retrieving += self._retrieves
        self._row.append(held)

    def let_go(self) -> None:
        """Give the last pin back."""
        segment = self._row.pop().segment
        self._sealed = min(self._sealed, len(self._row))
        segment.retrieving -= self._retrieves
        self._segments.unpin(segment)


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


def unknown_tokens_error(held: Held) -> SlabUnavailableError:
    """For the loss of a segment of a sequence whose owner alone knows its tokens."""
    message = "a part of this sequence's KV cannot be read any more, and its tokens are not known here: start again"
    return SlabUnavailableError(message, key=SlabKey(held.segment.id, 0))


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
