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

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from h3kv.attention import native
from h3kv.attention.native import PAGE_DTYPE
from h3kv.attention.parts import Part, merge
from h3kv.core.layout import CacheLayout, PageLayout
from h3kv.core.limits import ATTEND_BATCH_PAGES, BLOCK_TOKENS
from h3kv.core.types import SegmentId, SlabKey


class PageKernels(Protocol):
    """What computes over pages. The module `attention.native` is one, `TorchPages` another."""

    def append(
        self, k_TKD: Tensor, v_TKD: Tensor, pages_KN: NDArray[np.void], *, layout: PageLayout, index: int
    ) -> None:
        """Write contiguous keys and values as tokens number `index` and up of the page lists, 64 to a page."""
        ...

    def attend(
        self,
        q_THD: Tensor,
        pages_KN: NDArray[np.void],
        *,
        layout: PageLayout,
        position: int,
        scale: float | None = ...,
        out_dtype: torch.dtype = ...,
    ) -> Part:
        """Attention of contiguous queries: row t sees the tokens whose position is <= position + t."""
        ...


class SlabSource(Protocol):
    """Gives slabs that do not lie in memory."""

    def take(self, slabs: Sequence[SlabKey]) -> list[int]:
        """Addresses of the first of these slabs: one at least, as many as are there. They stay readable, whole and
        verified, until they are given back.

        Raises:
            SlabCorruptError: the first one's bytes are damaged.
            SlabUnavailableError: the first one cannot be read, or did not come in time.
        """
        ...

    def give_back(self, slabs: Sequence[SlabKey]) -> None:
        """These slabs are no longer read."""
        ...


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


@dataclass(frozen=True, slots=True)
class _ColdRun:
    """Pages [start, end) of a segment that lies on NVMe in this layer."""

    start: int
    end: int
    segment: SegmentId
    offsets_KB: NDArray[np.uint64]


class PagedCache:
    """Satisfies `models.decoder.KvCache` for one sequence. Not thread-safe.

    Args:
        kernels: of the device; must reach the addresses of device runs. Runs that are not on the device are attended by
            the native kernels.
        layout: geometry of all slots.
        pages: room of the page table to begin with, in blocks.
        source: gives what lies on NVMe; None where nothing ever does.
    """

    def __init__(
        self, kernels: PageKernels, layout: CacheLayout, *, pages: int, source: SlabSource | None = None
    ) -> None:
        self._kernels = kernels
        self._is_native = kernels is native
        self._layout = layout
        self._source = source
        self._table_LKN: NDArray[Any] = _new_table(layout, max(pages, 1))
        self._is_device_N = np.ones(max(pages, 1), dtype=bool)
        self._pages = 0
        self._tokens = 0
        # Tokens that the counts in the table speak of: `tokens`, plus the chunk that is being computed.
        self._counted = 0
        # Layer by layer, the part of the table that holds those tokens: what attention reads.
        self._used_LKN: list[NDArray[Any]] = []
        self._cold_L: list[dict[int, _ColdRun]] = [{} for _ in range(layout.layers)]

    @property
    def tokens(self) -> int:
        """Tokens in the cache: the position of the next chunk's first token."""
        return self._tokens

    @property
    def room_tokens(self) -> int:
        """Tokens that fit behind those in the cache."""
        return self._pages * BLOCK_TOKENS - self._tokens

    @property
    def placed_blocks(self) -> int:
        """Blocks that were placed, filled or not."""
        return self._pages

    def cold_slabs(self) -> list[SlabKey]:
        """Slabs that the next chunk takes from the source, in the order in which it does."""
        runs_L = [(layer, self._cold_runs(layer)) for layer in range(self._layout.layers)]
        return [SlabKey(run.segment, layer) for layer, runs in runs_L for run in runs]

    def place(self, start: int, blocks: int, run: PageRun) -> None:
        """Say where blocks [start, start + blocks) lie. They were placed before, or follow the last one that was.

        The bytes stay where they are until the run is placed again. Blocks are placed again as they were cut before, or
        one by one.
        """
        assert len(run.addresses_L) == self._layout.layers
        assert run.first_block + blocks <= run.room_blocks
        assert start <= self._pages, "blocks are placed in order"
        end = start + blocks
        self._grow(end)
        offsets_KB = self._offsets(blocks, run)
        for layer, address in enumerate(run.addresses_L):
            if address is None:
                assert run.segment is not None, "only a segment can lie with a source"
                self._cold_L[layer][start] = _ColdRun(start, end, run.segment, offsets_KB)
            else:
                self._cold_L[layer].pop(start, None)
                self._set_addresses(layer, start, address + offsets_KB)
        self._is_device_N[start:end] = run.is_device
        self._pages = max(self._pages, end)

    def extend(self, addresses_L: Sequence[int], room_blocks: int) -> None:
        """Add empty device slots of so many blocks, one per layer, to be written by later chunks."""
        self.place(self._pages, room_blocks, PageRun(None, tuple(addresses_L), room_blocks))

    def set_tokens(self, tokens: int) -> None:
        """Make the cache hold exactly the first tokens of what is placed, after a mount or before a recomputation.

        Blocks behind them are forgotten, and with them where they lay.
        """
        pages = -(-tokens // BLOCK_TOKENS)
        assert pages <= self._pages, f"{tokens} tokens are more than {self._pages} placed blocks hold"
        self._pages = pages
        self._tokens = tokens
        for cold in self._cold_L:
            for start in [start for start in cold if start >= pages]:
                del cold[start]
        self._count(tokens)

    def attend(self, layer: int, q_QHD: Tensor, k_TKD: Tensor, v_TKD: Tensor, *, scale: float | None = None) -> Tensor:
        """Append the chunk's keys and values, then attend causally to everything.

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
        pages_KN, page = self._used_LKN[layer], self._layout.slab.page
        q_QHD, position = q_QHD.contiguous(), self._tokens + len(k_TKD) - len(q_QHD)
        is_device_N = self._is_device_N[: pages_KN.shape[1]]
        cold = self._cold_runs(layer)
        if not cold and (self._is_native or is_device_N.all()):
            part = self._kernels.attend(
                q_QHD, pages_KN, layout=page, position=position, scale=scale, out_dtype=q_QHD.dtype
            )
            return part.out_THD
        if self._is_native:
            attention = native.Attention(
                q_QHD, pages_KN, layout=page, position=position, scale=scale, out_dtype=q_QHD.dtype
            )
            return self._attend_runs(attention, layer, cold, np.arange(pages_KN.shape[1] + 1)).out_THD
        return self._attend_apart(layer, q_QHD, position, cold=cold, scale=scale)

    def append(self, layer: int, k_TKD: Tensor, v_TKD: Tensor) -> None:
        """Append a chunk's keys and values as `attend` does, without attending."""
        end = self._tokens + len(k_TKD)
        if self._counted != end:
            self._count(end)
        pages_KN, page = self._used_LKN[layer], self._layout.slab.page
        self._kernels.append(k_TKD.contiguous(), v_TKD.contiguous(), pages_KN, layout=page, index=self._tokens)

    def past_pages(self, layer: int) -> Iterator[NDArray[np.void]]:
        """Page lists [K, N] of the tokens before the chunk, in token order, cut where pages lie on NVMe.

        Each list may be read until the next is asked for.

        Raises:
            SlabCorruptError, SlabUnavailableError: as `SlabSource.take`.
        """
        pages = -(-self._tokens // BLOCK_TOKENS)
        table_KN = self._table_LKN[layer, :, :pages].copy()
        table_KN["count"] = np.clip(self._tokens - table_KN["first"], 0, BLOCK_TOKENS)
        start = 0
        for run in self._cold_runs(layer):
            assert self._source is not None, "there is no source for what is not in memory"
            if run.start > start:
                yield table_KN[:, start : run.start]
            slab = SlabKey(run.segment, layer)
            keys_KB = self._source.take([slab])[0] + run.offsets_KB
            native.write_addresses(table_KN, run.start, keys_KB, layout=self._layout.slab.page)
            try:
                yield table_KN[:, run.start : run.end]
            finally:
                self._source.give_back([slab])
            start = run.end
        if start < pages:
            yield table_KN[:, start:]

    def advance(self, tokens: int) -> None:
        """End a chunk of so many tokens, after all layers saw it. A chunk that is not ended never was."""
        assert self._counted == self._tokens + tokens, "the chunk that ends is not the one that was attended"
        self._tokens += tokens

    def _attend_apart(
        self, layer: int, q_QHD: Tensor, position: int, *, cold: Sequence[_ColdRun], scale: float | None
    ) -> Tensor:
        """The device attends to its pages and the processor to all others; both parts merge."""
        pages_KN, page = self._used_LKN[layer], self._layout.slab.page
        is_device_N = self._is_device_N[: pages_KN.shape[1]]
        device_KN = np.ascontiguousarray(pages_KN[:, is_device_N])
        on_device = self._kernels.attend(q_QHD, device_KN, layout=page, position=position, scale=scale)
        rest_KN = np.ascontiguousarray(pages_KN[:, ~is_device_N])
        attention = native.Attention(q_QHD.cpu(), rest_KN, layout=page, position=position, scale=scale)
        # Index in `rest_KN` of each page, and of the end.
        index_N = np.concatenate([[0], np.cumsum(~is_device_N)])
        rest = self._attend_runs(attention, layer, cold, index_N)
        device = q_QHD.device
        merged = merge([Part(rest.out_THD.to(device), rest.lse_TH.to(device)), on_device])
        return merged.out_THD.to(q_QHD.dtype).contiguous()

    def _attend_runs(
        self, attention: native.Attention, layer: int, cold: Sequence[_ColdRun], index_N: NDArray[np.int64]
    ) -> Part:
        """Attend in position order: up to the first run that lies elsewhere, then on with as many as have come."""
        if not cold:
            return attention.run(int(index_N[-1]))
        assert self._source is not None, "there is no source for what is not in memory"
        slabs = [SlabKey(run.segment, layer) for run in cold]
        taken = given = 0
        try:
            while taken < len(cold):
                attention.run(int(index_N[cold[taken].start]) // ATTEND_BATCH_PAGES * ATTEND_BATCH_PAGES)
                read = given
                while read < taken and int(index_N[cold[read].end]) <= attention.done:
                    read += 1
                given, back = read, slabs[given:read]
                if back:
                    self._source.give_back(back)
                addresses = self._source.take(slabs[taken:])
                for run, address in zip(cold[taken:], addresses, strict=False):
                    attention.place(int(index_N[run.start]), address + run.offsets_KB)
                taken += len(addresses)
            return attention.run(int(index_N[-1]))
        finally:
            self._source.give_back(slabs[given:taken])

    def _cold_runs(self, layer: int) -> list[_ColdRun]:
        cold = self._cold_L[layer]
        return [cold[start] for start in sorted(cold)]

    def _offsets(self, blocks: int, run: PageRun) -> NDArray[np.uint64]:
        """Bytes from the start of a slot to each page of a run."""
        slab, first = self._layout.slab, run.first_block
        return np.array(
            [
                [slab.page_offset(first + block, head, blocks=run.room_blocks) for block in range(blocks)]
                for head in range(slab.kv_heads)
            ],
            dtype=np.uint64,
        )

    def _set_addresses(self, layer: int, start: int, keys_KB: NDArray[np.uint64]) -> None:
        native.write_addresses(self._table_LKN[layer], start, keys_KB, layout=self._layout.slab.page)

    def _grow(self, pages: int) -> None:
        """Make the table hold so many pages."""
        old_LKN, room = self._table_LKN, self._table_LKN.shape[2]
        if pages <= room:
            return
        self._table_LKN = _new_table(self._layout, max(pages, 2 * room))
        self._table_LKN[:, :, :room] = old_LKN
        self._is_device_N = np.resize(self._is_device_N, self._table_LKN.shape[2])
        self._used_LKN = []

    def _count(self, end: int) -> None:
        """Make the counts say that pages hold tokens 0 to `end`."""
        assert end <= self._pages * BLOCK_TOKENS, f"{end} tokens do not fit {self._pages} pages"
        low, high = sorted((self._counted, end))
        changed = slice(low // BLOCK_TOKENS, -(-high // BLOCK_TOKENS))
        pages_LKN = self._table_LKN[:, :, changed]
        pages_LKN["count"] = np.clip(end - pages_LKN["first"], 0, BLOCK_TOKENS)
        self._counted = end
        pages = -(-end // BLOCK_TOKENS)
        if not self._used_LKN or self._used_LKN[0].shape[1] != pages:
            self._used_LKN = list(self._table_LKN[:, :, :pages])


def _new_table(layout: CacheLayout, pages: int) -> NDArray[Any]:
    table_LKN = np.zeros((layout.layers, layout.slab.kv_heads, pages), dtype=PAGE_DTYPE)
    table_LKN["first"] = np.arange(pages) * BLOCK_TOKENS
    return table_LKN
