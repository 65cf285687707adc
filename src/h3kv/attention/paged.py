"""The KV of one sequence as lists of pages that lie where the tiers keep them.

Shapes: T tokens of a chunk, Q query rows (T or fewer), L layers, H query heads, K KV heads, D head dim, N pages.

    blocks       0 | 1           16 | 17     20 | 21      36 | 37     38
    lies in   device |  HOST slot   |  NVMe     |  HOST slot | device, filled by the next chunks
    tokens         |                |           |            |   ^ tokens

The cache owns no memory. Its owner places runs of blocks, and places them again when they have moved. A run that lies
on NVMe in some layer is taken from a `SlabSource` when that layer attends, in position order and in whole slabs;
attention reads it where the source put it. With native kernels the same numbers are added in the same order however
the pages lie.
"""

from __future__ import annotations

import itertools
from collections.abc import Generator, Iterator, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from h3kv.attention import native
from h3kv.attention.page_seams import PageKernels, SlabSource
from h3kv.attention.page_table import ColdRun, IndexedSegments, PageRun, PageTable
from h3kv.attention.parts import Part, merge
from h3kv.attention.recall import RecallSample
from h3kv.attention.retrieval import RetrievalMeter
from h3kv.attention.retriever import PageSource, Query, retrieve
from h3kv.attention.touches import TouchSample
from h3kv.core.layout import CacheLayout
from h3kv.core.limits import ATTEND_BATCH_PAGES, BLOCK_TOKENS
from h3kv.core.ports import Offload
from h3kv.core.retrieval import RetrievalSetting
from h3kv.core.types import SlabKey


class PagedCache:
    """Satisfies `models.decoder.KvCache` for one sequence. Not thread-safe.

    Args:
        kernels: of the device; must reach the addresses of device runs. Runs that are not on the device are attended by
            the native kernels.
        layout: geometry of all slots.
        pages: room of the page table to begin with, in blocks.
        source: gives what lies on NVMe; None where nothing ever does.
        window_tokens: newest tokens that are always attended to exactly.
        recall_sample, touch_sample: receive what retrieval caught; shared with other sequences. Its own where None.
        offload: who attends to what is not on the device, and searches indexes.
    """

    def __init__(
        self,
        kernels: PageKernels,
        layout: CacheLayout,
        *,
        pages: int,
        source: SlabSource | None = None,
        window_tokens: int = 0,
        recall_sample: RecallSample | None = None,
        touch_sample: TouchSample | None = None,
        offload: Offload = native.LOCAL,
    ) -> None:
        self._kernels = kernels
        self._is_native = kernels is native
        self._layout = layout
        self._source = source
        self._window_tokens = window_tokens
        self._offload = offload
        self._table = PageTable(layout, pages=pages, is_native=self._is_native)
        self._tokens = 0
        self._steps = 0
        self._recall_sample = RecallSample() if recall_sample is None else recall_sample
        self._recall_turn = self._recall_sample.open_turn()
        self._touch_turn = (TouchSample() if touch_sample is None else touch_sample).open_turn()
        # The step whose recall is measured, and in which layer.
        self._recalled: tuple[int, int | None] | None = None
        self.are_rows_apart = False
        """Whether each row of a chunk is attended for itself, with the numbers that it has as a token of an answer.
        For measuring: rows that share the codes of a page read all bits of the values, and cost less."""
        self.retrieval: RetrievalSetting | None = None
        """How the next chunks choose what they read, each of their rows for itself; None: they read everything."""
        self.page_source: PageSource | None = None
        """Gives the pages on NVMe that retrieval chose; None where there are none."""
        self.meter = RetrievalMeter()
        """What retrieval has read."""

    @property
    def tokens(self) -> int:
        """Tokens in the cache: the position of the next chunk's first token."""
        return self._tokens

    @property
    def room_tokens(self) -> int:
        """Tokens that fit behind those in the cache."""
        return self._table.pages * BLOCK_TOKENS - self._tokens

    @property
    def placed_blocks(self) -> int:
        """Blocks that were placed, filled or not."""
        return self._table.pages

    def cold_slabs(self) -> list[SlabKey]:
        """Slabs that the next chunk takes from the source, in the order in which it does."""
        slabs = []
        for layer in range(self._layout.layers):
            indexed = self._indexed(layer)
            runs = self._table.cold_runs(layer) if indexed is None else indexed.cold_L[layer]
            slabs += [SlabKey(run.segment, layer) for run in runs]
        return slabs

    def place(self, start: int, blocks: int, run: PageRun) -> None:
        """See `PageTable.place`."""
        self._table.place(start, blocks, run)

    def extend(self, addresses_L: Sequence[int], room_blocks: int) -> None:
        """Add empty device slots of so many blocks, one per layer, to be written by later chunks."""
        self.place(self._table.pages, room_blocks, PageRun(None, tuple(addresses_L), room_blocks))

    def set_tokens(self, tokens: int) -> None:
        """Make the cache hold exactly the first tokens of what is placed, after a mount or before a recomputation.

        Blocks behind them are forgotten, and with them where they lay.
        """
        self._table.truncate(-(-tokens // BLOCK_TOKENS))
        self._tokens = tokens
        self._table.count(tokens)

    def attend(self, layer: int, q_QHD: Tensor, k_TKD: Tensor, v_TKD: Tensor, *, scale: float | None = None) -> Tensor:
        """Append the chunk's keys and values, then attend causally to everything, or to what retrieval chooses.

        Args:
            layer: index of the layer; every layer sees the same chunk before `advance`.
            q_QHD: queries of the chunk's last Q tokens.
            k_TKD: keys of the whole chunk, in the pages' dtype. Not kept.
            v_TKD: values, the same.
            scale: of the scores; None: 1 / sqrt(D).

        Returns:
            [Q, H, D] in the dtype of the queries, new and contiguous.

        Raises:
            SlabCorruptError, SlabUnavailableError: as `SlabSource.take`. The chunk may be computed again.
        """
        self.append(layer, k_TKD, v_TKD)
        query = Query(q_QHD.contiguous(), self._tokens + len(k_TKD) - len(q_QHD), scale)
        indexed = self._indexed(layer)
        if not indexed or self.retrieval is None:
            return self._attend_rows(layer, query, indexed=None, dtype=q_QHD.dtype).out_THD
        exact = self._attend_rows(layer, query, indexed=indexed, dtype=torch.float32)
        self.meter.exact_tokens += self._exact_tokens(layer, indexed, len(q_QHD))
        measures_touches = self._touch_turn.measures(
            layer, self._steps, layers=self._layout.layers, dense_layers=self.retrieval.dense_layers
        )
        retrieved = retrieve(
            query,
            indexed,
            exact,
            layer=layer,
            layout=self._layout.slab,
            setting=self.retrieval,
            source=self.page_source,
            meter=self.meter,
            touches=self._touch_turn if measures_touches else None,
            offload=self._offload,
        )
        if self._measures_recall(layer, self.retrieval):
            # Of all attention, what is in the tokens that were read.
            whole = self._attend_rows(layer, query, indexed=None, dtype=torch.float32)
            share_QH = (retrieved.read_lse_QH - whole.lse_TH.cpu()).exp().clamp(max=1.0)
            # What attends to numbers that are none has no share, and would leave no mean of the others'.
            if bool(share_QH.isfinite().all()):
                self.meter.add_recall(share_QH)
                self._recall_sample.record(layer, float(share_QH.mean()))
        return retrieved.part.out_THD.to(q_QHD.dtype)

    def attend_steps(self, layer: int, q_QHD: Tensor, k_TKD: Tensor, v_TKD: Tensor) -> Generator[None, None, Tensor]:
        """As `attend`, with the same numbers; in steps of some rows where a long chunk reads no cold page.

        Between two steps pages may have been placed again.
        """
        step = native.rows_per_step(q_QHD.shape[1], k_TKD.shape[1])
        if self.retrieval is not None or not self._is_native or len(q_QHD) < 2 * step or self._table.has_cold(layer):
            return self.attend(layer, q_QHD, k_TKD, v_TKD)
        self.append(layer, k_TKD, v_TKD)
        position = self._tokens + len(k_TKD) - len(q_QHD)
        attended_QHD = torch.empty_like(q_QHD)
        # The last step has the rest besides: blocks of rows are cut as in one call then.
        ends = [*range(step, len(q_QHD) - step + 1, step), len(q_QHD)]
        for first, end in itertools.pairwise([0, *ends]):
            query = Query(q_QHD[first:end].contiguous(), position + first, None)
            attended_QHD[first:end] = self._attend_rows(layer, query, indexed=None, dtype=q_QHD.dtype).out_THD
            if end < len(q_QHD):
                yield
        return attended_QHD

    def begin_token(self) -> tuple[NDArray[np.void], NDArray[np.bool_]]:
        """Count the next token in, whose keys and values `native.attend_batch` writes.

        Returns:
            Rows [L] for that, and in which layers it may attend: those in which all is read, and all lies in memory. In
            the others `attend` takes the token.
        """
        if self._table.counted != self._tokens + 1:
            self._table.count(self._tokens + 1)
        layers = range(self._layout.layers)
        is_plain_L = np.array([self._is_plain(layer) for layer in layers], dtype=bool)
        return self._table.batch_rows(self._tokens), is_plain_L

    def append(self, layer: int, k_TKD: Tensor, v_TKD: Tensor) -> None:
        """Append a chunk's keys and values as `attend` does, without attending."""
        end = self._tokens + len(k_TKD)
        if self._table.counted != end:
            self._table.count(end)
        pages_KN, page = self._table.appending(layer), self._layout.slab.page
        self._kernels.append(k_TKD.contiguous(), v_TKD.contiguous(), pages_KN, layout=page, index=self._tokens)

    def past_pages(self, layer: int) -> Iterator[NDArray[np.void]]:
        """Page lists [K, N] of the tokens before the chunk, in token order, cut where pages lie on NVMe.

        Each list may be read until the next is asked for. No segment may be clustered.

        Raises:
            SlabCorruptError, SlabUnavailableError: as `SlabSource.take`.
        """
        table_KN = self._table.copy(layer, self._tokens)
        start = 0
        for run in self._table.cold_runs(layer):
            assert self._source is not None, "there is no source for what is not in memory"
            if run.start > start:
                yield table_KN[:, start : run.start]
            slab = SlabKey(run.segment, layer)
            address = self._source.take([slab])[0]
            native.write_addresses(table_KN, run.start, address, run.offsets, layout=self._layout.slab.page)
            try:
                yield table_KN[:, run.start : run.end]
            finally:
                self._source.give_back([slab])
            start = run.end
        if start < table_KN.shape[1]:
            yield table_KN[:, start:]

    def advance(self, tokens: int) -> None:
        """End a chunk of so many tokens, after all layers saw it. A chunk that is not ended never was."""
        assert self._table.counted == self._tokens + tokens, "the chunk that ends is not the one that was attended"
        self._tokens += tokens
        self._steps += 1

    def _is_plain(self, layer: int) -> bool:
        return self._is_native and not self._table.has_cold(layer) and self._indexed(layer) is None

    def _indexed(self, layer: int) -> IndexedSegments | None:
        """What this layer retrieves from in the next chunk; None where it reads everything."""
        if self.retrieval is None or layer in self.retrieval.dense_layers:
            return None
        return self._table.indexed(max(self._tokens - self._window_tokens, 0) // BLOCK_TOKENS) or None

    def _attend_rows(self, layer: int, query: Query, *, indexed: IndexedSegments | None, dtype: torch.dtype) -> Part:
        """Attention to all tokens, or to those outside these segments; the part in the given dtype."""
        rows = len(query.q_QHD)
        if rows == 1 or not self.are_rows_apart:
            return self._attend_pages(layer, query, indexed, dtype=dtype)
        parts = []
        for row in range(rows):
            # The newest tokens are found at the end of the pages: a row must not see those of later ones.
            self._table.count(query.position + row + 1)
            of_row = Query(query.q_QHD[row : row + 1], query.position + row, query.scale)
            parts.append(self._attend_pages(layer, of_row, indexed, dtype=dtype))
        return Part(torch.cat([part.out_THD for part in parts]), torch.cat([part.lse_TH for part in parts]))

    def _attend_pages(self, layer: int, query: Query, indexed: IndexedSegments | None, *, dtype: torch.dtype) -> Part:
        """Attention to the view, or to what of it is outside these segments; the part in the given dtype."""
        columns_M, cold = None, self._table.cold_runs(layer) if indexed is None else indexed.cold_L[layer]
        width = self._table.view(layer).shape[1]
        if indexed is not None:
            columns_M = indexed.others_M[: np.searchsorted(indexed.others_M, width)]
        if self._is_native:
            return self._attend_native(layer, query, columns_M, cold, dtype=dtype)
        columns_M = np.arange(width) if columns_M is None else columns_M
        is_device_M = self._table.is_device_N[columns_M]
        if not is_device_M.any():
            return self._attend_native(layer, query, columns_M, cold, dtype=dtype)
        device_KM, page = self._table.view(layer).take(columns_M[is_device_M], axis=1), self._layout.slab.page
        if is_device_M.all():
            return self._kernels.attend(
                query.q_QHD, device_KM, layout=page, position=query.position, scale=query.scale, out_dtype=dtype
            )
        # The device attends to its pages and the processor to all others; both parts merge.
        on_device = self._kernels.attend(
            query.q_QHD, device_KM, layout=page, position=query.position, scale=query.scale
        )
        rest = self._attend_native(layer, query, columns_M[~is_device_M], cold, dtype=torch.float32)
        device = query.q_QHD.device
        merged = merge([Part(rest.out_THD.to(device), rest.lse_TH.to(device)), on_device])
        return Part(merged.out_THD.to(dtype).contiguous(), merged.lse_TH)

    def _attend_native(
        self,
        layer: int,
        query: Query,
        columns_M: NDArray[np.intp] | None,
        cold: Sequence[ColdRun],
        *,
        dtype: torch.dtype,
    ) -> Part:
        """Attention by the processor to some columns of the view, or to all."""
        pages_KN, page = self._table.view(layer), self._layout.slab.page
        if columns_M is not None:
            pages_KN = pages_KN.take(columns_M, axis=1)
        q_QHD = query.q_QHD.cpu()
        if not cold:
            return native.attend(
                q_QHD,
                pages_KN,
                layout=page,
                position=query.position,
                scale=query.scale,
                out_dtype=dtype,
                offload=self._offload,
            )
        attention = native.Attention(
            q_QHD,
            pages_KN,
            layout=page,
            position=query.position,
            scale=query.scale,
            out_dtype=dtype,
            offload=self._offload,
        )
        return self._attend_runs(attention, layer, cold, columns_M)

    def _attend_runs(
        self, attention: native.Attention, layer: int, cold: Sequence[ColdRun], columns_M: NDArray[np.intp] | None
    ) -> Part:
        """Attend in the order of columns: up to the first run that lies elsewhere, then on with as many as came."""
        assert self._source is not None, "there is no source for what is not in memory"
        slabs = [SlabKey(run.segment, layer) for run in cold]
        starts = [self._table.column(run.start) for run in cold]
        ends = [self._table.column(run.end) for run in cold]
        last = self._table.view(layer).shape[1] if columns_M is None else len(columns_M)
        if columns_M is not None:
            starts, ends = (np.searchsorted(columns_M, columns).tolist() for columns in (starts, ends))
        taken = given = 0
        try:
            while taken < len(cold):
                attention.run(starts[taken] // ATTEND_BATCH_PAGES * ATTEND_BATCH_PAGES)
                read = given
                while read < taken and ends[read] <= attention.done:
                    read += 1
                given, back = read, slabs[given:read]
                if back:
                    self._source.give_back(back)
                addresses = self._source.take(slabs[taken:])
                first, taken = taken, taken + len(addresses)
                for place, address in enumerate(addresses, first):
                    attention.place(starts[place], address, cold[place].offsets)
            return attention.run(last)
        finally:
            self._source.give_back(slabs[given:taken])

    def _measures_recall(self, layer: int, setting: RetrievalSetting) -> bool:
        """Whether this step and layer are in the sample: one layer in turn, every so many chunks."""
        if setting.recall_every == 0 or self._steps % setting.recall_every:
            return False
        if self._recalled is None or self._recalled[0] != self._steps:
            retrieving = [layer for layer in range(self._layout.layers) if layer not in setting.dense_layers]
            self._recalled = (self._steps, self._recall_turn.take(retrieving))
        return self._recalled[1] == layer

    def _exact_tokens(self, layer: int, indexed: IndexedSegments, rows: int) -> int:
        """Tokens outside the window that each of the rows reads exactly though they are in no index, over all rows."""
        counts_N = self._table.view(layer)["count"][0]
        outside = int(counts_N[indexed.others_M].sum()) - self._table.strangers - self._window_tokens
        return rows * max(outside, 0)
