"""Which pages hold a sequence's tokens, layer by layer, and where they lie.

Shapes: L layers, K KV heads, N pages, B pages of a run, S indexed segments, M of the pages that are in none of them.

    columns   -32 .......... -17 | -16 ........... -1 | 0 | 1 | 2 ...
              the second segment | the first segment  | block 0, 1, 2, ...
              that is partly     | that is partly     |
              used               | used               |

Column b is block b of the sequence, whose tokens are 64 b and up. The tokens of a clustered segment are permuted.
Where all of them are used, nobody sees the difference, since all of them lie before any query. Where only the first
blocks are used, every page of the segment holds some tokens of the sequence and some strangers: its pages stand in the
lead, in front of block 0, under the positions that its tokens have in the sequence, and the columns of its blocks stay
empty.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from h3kv.attention.native import BATCH_DTYPE, PAGE_DTYPE, RunOffsets, write_addresses
from h3kv.attention.retrieval import INDEXED_DTYPE
from h3kv.core.layout import CacheLayout
from h3kv.core.limits import BLOCK_TOKENS
from h3kv.core.types import SegmentId

UNSEEN: Final = np.iinfo(np.int32).max
"""Position of a stranger: after any query."""


@dataclass(frozen=True, slots=True)
class PageRun:
    """Where a run of consecutive blocks of one segment lies."""

    segment: SegmentId | None
    """None: room that moves with nobody else."""
    addresses_L: tuple[int | None, ...]
    """First byte of each layer's slot; None where a `SlabSource` has it."""
    room_blocks: int
    """Size of each slot, in blocks."""
    first_block: int = 0
    """The run's first block, counted from the slot's."""
    is_device: bool = True
    """Whether the device's own kernels reach it."""
    clustered_blocks: int = 0
    """Blocks among which the segment's tokens are permuted; 0: they lie in order."""
    index_L: tuple[int, ...] | None = None
    """First byte of each layer's index in memory, with the pages or apart; None where it lies on NVMe or is not
    wanted."""


@dataclass(frozen=True, slots=True)
class ColdRun:
    """Columns [start, end) of a segment that lies on NVMe in one layer; negative in the lead."""

    start: int
    end: int
    segment: SegmentId
    offsets: RunOffsets


@dataclass(frozen=True, slots=True)
class _Indexed:
    """A clustered segment that is used as a whole, with its index in memory: its last block, and its rows."""

    end: int
    rows_L: NDArray[np.void]
    segment: SegmentId


@dataclass(frozen=True, slots=True)
class _Partial:
    """A clustered segment of which the first blocks are used."""

    blocks: range
    """Of the sequence."""
    column: int
    """Of its first page: negative."""
    positions_LKT: NDArray[np.int32]
    """In the sequence, of all tokens in its pages."""

    @property
    def pages(self) -> int:
        """Of the whole segment, in one layer and KV head."""
        return int(self.positions_LKT.shape[2]) // BLOCK_TOKENS


@dataclass(frozen=True, slots=True)
class IndexedSegments:
    """Segments that a step may retrieve from, in position order, and the columns that they leave to be read."""

    rows_LS: NDArray[np.void]
    """INDEXED_DTYPE; `pages` is 0 where the pages lie on NVMe."""
    segments: tuple[SegmentId, ...]
    others_M: NDArray[np.intp]
    """Columns of the view that belong to none of them, in order."""
    cold_L: tuple[tuple[ColdRun, ...], ...]
    """Runs of these columns that lie on NVMe, by layer."""

    def __bool__(self) -> bool:
        return bool(self.segments)


class PageTable:
    """The pages of one sequence. Not thread-safe.

    Args:
        layout: geometry of all slots.
        pages: room to begin with, in blocks.
        is_native: whether the native kernels reach device runs too.
    """

    def __init__(self, layout: CacheLayout, *, pages: int, is_native: bool) -> None:
        self._layout = layout
        self._is_native = is_native
        # Columns that there is room for in front of block 0, and those of them that are used: the nearest.
        self._front = self._lead = 0
        self._table_LKN = _new_table(layout, max(pages, 1), front=0)
        self._is_device_N = np.ones(self._table_LKN.shape[2], dtype=bool)
        # By first block, in the order in which they were mounted, which is that of the blocks.
        self._partials: dict[int, _Partial] = {}
        self._cold_L: list[dict[int, ColdRun]] = [{} for _ in range(layout.layers)]
        self._indexed: dict[int, _Indexed] = {}
        self._retrievable: tuple[int, IndexedSegments] | None = None
        self._views_L: list[NDArray[Any]] = []
        self._counted = 0
        self.pages = 0
        """Blocks that were placed, filled or not."""

    @property
    def counted(self) -> int:
        """Tokens that the counts speak of."""
        return self._counted

    @property
    def strangers(self) -> int:
        """Tokens in the pages of the view that are none of the sequence's."""
        return BLOCK_TOKENS * sum(partial.pages - len(partial.blocks) for partial in self._partials.values())

    @property
    def is_device_N(self) -> NDArray[np.bool_]:
        """Which columns of the view the device's kernels reach."""
        return self._is_device_N[self._front - self._lead :][: self._width]

    def view(self, layer: int) -> NDArray[Any]:
        """The pages that hold the counted tokens, [K, N]."""
        return self._views_L[layer]

    def appending(self, layer: int) -> NDArray[Any]:
        """The view without the lead: token t of the sequence is in page t // 64."""
        return self._views_L[layer][:, self._lead :]

    def batch_rows(self, position: int) -> NDArray[np.void]:
        """Where a token that is counted already is written and what it reads, for each layer: [L] of BATCH_DTYPE."""
        assert self._counted > position, "the token is counted before"
        table_LKN = self._table_LKN
        rows_L = np.empty(self._layout.layers, dtype=BATCH_DTYPE)
        layers_L = table_LKN.ctypes.data + np.arange(self._layout.layers, dtype=np.uint64) * np.uint64(
            table_LKN.strides[0]
        )
        page_bytes = PAGE_DTYPE.itemsize
        rows_L["pages"] = layers_L + np.uint64((self._front - self._lead) * page_bytes)
        rows_L["append_page"] = layers_L + np.uint64((self._front + position // BLOCK_TOKENS) * page_bytes)
        rows_L["pages_stride"] = table_LKN.strides[1] // page_bytes
        rows_L["page_count"] = self._width
        rows_L["position"] = position
        return rows_L

    def copy(self, layer: int, tokens: int) -> NDArray[Any]:
        """The first tokens' pages, [K, N] from block 0 on, to be kept.

        Clustered segments have no order of tokens there: none may be placed.
        """
        assert not self._indexed and not self._lead, "tokens of clustered segments do not lie in order"
        table_KN = self._table_LKN[layer, :, self._front : self._front - (-tokens // BLOCK_TOKENS)].copy()
        table_KN["count"] = np.clip(tokens - table_KN["first"], 0, BLOCK_TOKENS)
        return table_KN

    def cold_runs(self, layer: int) -> list[ColdRun]:
        """Runs that lie on NVMe in a layer, in order; `column` turns their columns into the view's."""
        cold = self._cold_L[layer]
        return [cold[start] for start in sorted(cold)]

    def has_cold(self, layer: int) -> bool:
        """Whether some run lies on NVMe in a layer."""
        return bool(self._cold_L[layer])

    def column(self, column: int) -> int:
        """A column of the table, counted in the view."""
        return column + self._lead

    def place(self, start: int, blocks: int, run: PageRun) -> None:
        """Say where blocks [start, start + blocks) lie. They were placed before, or follow the last one that was.

        The bytes stay where they are until the run is placed again. Blocks are placed again as they were cut before, or
        one by one.
        """
        assert len(run.addresses_L) == self._layout.layers
        assert run.first_block + blocks <= run.room_blocks
        assert start <= self.pages, "blocks are placed in order"
        end = start + blocks
        self._grow(end)
        self._retrievable = None
        self._indexed.pop(start, None)
        if run.clustered_blocks > blocks:
            self._place_partial(start, blocks, run)
        else:
            self._place_columns(start, blocks, run)
            is_reached = self._is_native or not run.is_device
            if run.clustered_blocks and run.index_L is not None and run.segment is not None and is_reached:
                self._indexed[start] = _Indexed(end, self._index_rows(run), run.segment)
        self.pages = max(self.pages, end)

    def truncate(self, pages: int) -> None:
        """Forget the blocks behind the first ones, and where they lay."""
        assert pages <= self.pages, f"{pages} blocks are more than the {self.pages} that were placed"
        self.pages = pages
        self._retrievable = None
        for cold in self._cold_L:
            for start in [start for start in cold if start >= pages]:
                del cold[start]
        for start in [start for start in self._indexed if start >= pages]:
            del self._indexed[start]
        for start in [start for start in self._partials if start >= pages]:
            self._drop_partial(self._partials.pop(start))
        ends = [partial.blocks.stop for partial in self._partials.values()]
        assert all(end <= pages for end in ends), "a segment that is partly used cannot be cut again"

    def count(self, end: int) -> None:
        """Make the counts say that pages hold tokens 0 to `end`."""
        assert end <= self.pages * BLOCK_TOKENS, f"{end} tokens do not fit {self.pages} pages"
        low, high = sorted((self._counted, end))
        front = self._front
        changed = slice(front + low // BLOCK_TOKENS, front - (-high // BLOCK_TOKENS))
        pages_LKN = self._table_LKN[:, :, changed]
        pages_LKN["count"] = np.clip(end - pages_LKN["first"], 0, BLOCK_TOKENS)
        for partial in self._partials.values():
            self._table_LKN["count"][:, :, front + partial.blocks.start : front + partial.blocks.stop] = 0
        self._counted = end
        if not self._views_L or self._views_L[0].shape[1] != self._width:
            start = front - self._lead
            self._views_L = list(self._table_LKN[:, :, start : start + self._width])
            self._retrievable = None

    def indexed(self, until_block: int) -> IndexedSegments:
        """Segments that end before a block and have their index in memory."""
        if self._retrievable is None or self._retrievable[0] != until_block:
            starts = [start for start in sorted(self._indexed) if self._indexed[start].end <= until_block]
            found = [self._indexed[start] for start in starts]
            others_N = np.ones(self._width, dtype=bool)
            for start, segment in zip(starts, found, strict=True):
                others_N[self.column(start) : self.column(segment.end)] = False
            rows_LS = np.zeros((self._layout.layers, len(found)), dtype=INDEXED_DTYPE)
            for place, segment in enumerate(found):
                rows_LS[:, place] = segment.rows_L
            cold_L = tuple(
                tuple(run for run in self.cold_runs(layer) if others_N[self.column(run.start)])
                for layer in range(self._layout.layers)
            )
            ids, others_M = tuple(segment.segment for segment in found), np.flatnonzero(others_N)
            self._retrievable = (until_block, IndexedSegments(rows_LS, ids, others_M, cold_L))
        return self._retrievable[1]

    @property
    def _width(self) -> int:
        """Columns of the view."""
        return self._lead - (-self._counted // BLOCK_TOKENS)

    def _place_columns(self, column: int, blocks: int, run: PageRun) -> None:
        offsets = self._offsets(blocks, run)
        at = self._front + column
        for layer, address in enumerate(run.addresses_L):
            if address is None:
                assert run.segment is not None, "only a segment can lie with a source"
                self._cold_L[layer][column] = ColdRun(column, column + blocks, run.segment, offsets)
                # Whatever lies there now is not this segment.
                for part in ("keys", "values", "nibbles", "scales", "residues"):
                    self._table_LKN[part][layer, :, at : at + blocks] = 0
            else:
                self._cold_L[layer].pop(column, None)
                write_addresses(self._table_LKN[layer], at, address, offsets, layout=self._layout.slab.page)
        self._is_device_N[at : at + blocks] = run.is_device

    def _place_partial(self, start: int, blocks: int, run: PageRun) -> None:
        """All pages of a clustered segment, of which the first blocks' tokens are the sequence's."""
        assert run.first_block == 0, "a segment is used from its beginning"
        partial = self._partials.get(start) or self._add_partial(range(start, start + blocks), run)
        assert partial.pages == run.clustered_blocks and len(partial.blocks) == blocks
        self._place_columns(partial.column, partial.pages, run)

    def _add_partial(self, blocks: range, run: PageRun) -> _Partial:
        assert run.index_L is not None, "places are read from the index"
        assert all(start < blocks.start for start in self._partials), "mounts come in order"
        positions_LKT = self._positions(run.index_L, run, blocks)
        partial = _Partial(blocks, -(self._lead + run.clustered_blocks), positions_LKT)
        self._partials[blocks.start] = partial
        self._lead += partial.pages
        self._grow(self.pages)
        at = self._front + partial.column
        pages_LKN = self._table_LKN[:, :, at : at + partial.pages]
        stride = positions_LKT.itemsize * BLOCK_TOKENS
        rows = positions_LKT.ctypes.data + np.arange(positions_LKT.size // BLOCK_TOKENS) * stride
        pages_LKN["positions"] = rows.reshape(pages_LKN.shape).astype(np.uint64)
        pages_LKN["count"] = BLOCK_TOKENS
        self._views_L = []
        return partial

    def _drop_partial(self, partial: _Partial) -> None:
        assert partial.column == -self._lead, "the last one goes first"
        for cold in self._cold_L:
            cold.pop(partial.column, None)
        self._lead -= partial.pages
        self._views_L = []
        self._counted = min(self._counted, self.pages * BLOCK_TOKENS)

    def _positions(self, index_L: Sequence[int], run: PageRun, blocks: range) -> NDArray[np.int32]:
        """Positions in the sequence of all tokens of a segment's pages, [L, K, 64 * clustered blocks]."""
        places_LKT = np.stack([self._places(address, run) for address in index_L]).astype(np.int32)
        used = len(blocks) * BLOCK_TOKENS
        return np.where(places_LKT < used, places_LKT + blocks.start * BLOCK_TOKENS, np.int32(UNSEEN))

    def _places(self, index_address: int, run: PageRun) -> NDArray[np.uint16]:
        """Which token of its segment each one is, in one layer, [K, 64 * blocks]."""
        slab, room = self._layout.slab, run.room_blocks
        skipped = slab.page.plane_bytes - 2 * BLOCK_TOKENS
        places = np.empty((slab.kv_heads, run.clustered_blocks, BLOCK_TOKENS), dtype=np.uint16)
        for head in range(slab.kv_heads):
            for block in range(run.clustered_blocks):
                offset = slab.plane_offset(block, head, blocks=room) - slab.index_offset(room)
                ctypes.memmove(places[head, block].ctypes.data, index_address + offset + skipped, 2 * BLOCK_TOKENS)
        return places.reshape(slab.kv_heads, -1)

    def _index_rows(self, run: PageRun) -> NDArray[np.void]:
        assert run.index_L is not None
        slab, room = self._layout.slab, run.room_blocks
        rows_L = np.zeros(self._layout.layers, dtype=INDEXED_DTYPE)
        rows_L["pages"] = [address or 0 for address in run.addresses_L]
        rows_L["planes"] = run.index_L
        rows_L["summary"] = rows_L["planes"] + np.uint64(slab.summary_offset(0, blocks=room) - slab.index_offset(room))
        rows_L["blocks"] = run.clustered_blocks
        return rows_L

    def _offsets(self, blocks: int, run: PageRun) -> RunOffsets:
        used = range(run.first_block, run.first_block + blocks)
        return RunOffsets.of(self._layout.slab, used, room_blocks=run.room_blocks)

    def _grow(self, pages: int) -> None:
        """Make the table hold so many pages, and the lead."""
        old_LKN, front = self._table_LKN, self._front
        room = old_LKN.shape[2] - front
        if pages <= room and self._lead <= front:
            return
        self._front = max(front, self._lead)
        self._table_LKN = _new_table(self._layout, room if pages <= room else max(pages, 2 * room), front=self._front)
        old = slice(self._front - front, self._front + room)
        self._table_LKN[:, :, old] = old_LKN
        is_device_N = np.ones(self._table_LKN.shape[2], dtype=bool)
        is_device_N[old] = self._is_device_N
        self._is_device_N = is_device_N
        self._views_L = []


def _new_table(layout: CacheLayout, pages: int, *, front: int) -> NDArray[Any]:
    table_LKN = np.zeros((layout.layers, layout.slab.kv_heads, front + pages), dtype=PAGE_DTYPE)
    table_LKN["first"] = (np.arange(front + pages) - front) * BLOCK_TOKENS
    return table_LKN
