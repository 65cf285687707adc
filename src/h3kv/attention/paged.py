"""The KV cache of one sequence: a page table over slots that someone else owns.

Shapes: T tokens of a chunk, Q query rows (T or fewer), L layers, H query heads, K KV heads, D head dim, N pages.

    blocks       0 | 1      5 | 6             21 | 22
    slots     sink |  reused  |    own segment   | own segment
    tokens         | mounted  | filled | chunk   |   room
                                       ^ tokens  ^ tokens + T

Addresses are written once, when a slot is added. A chunk only moves the counts of the pages that it fills.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from h3kv.attention.native import PAGE_DTYPE
from h3kv.attention.parts import Part
from h3kv.core.layout import CacheLayout, PageLayout
from h3kv.core.limits import BLOCK_TOKENS


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
        out_dtype: torch.dtype = ...,
    ) -> Part:
        """Attention of contiguous queries: row t sees the tokens whose position is <= position + t."""
        ...


class PagedCache:
    """Satisfies `models.decoder.KvCache` for one sequence. Not thread-safe.

    Args:
        kernels: must be able to reach the addresses that are added.
        layout: geometry of all slots.
        pages: room of the page table, in blocks.
    """

    def __init__(self, kernels: PageKernels, layout: CacheLayout, *, pages: int) -> None:
        self._kernels = kernels
        self._layout = layout
        self._table_LKN: NDArray[Any] = np.zeros((layout.layers, layout.slab.kv_heads, pages), dtype=PAGE_DTYPE)
        self._table_LKN["first"] = np.arange(pages) * BLOCK_TOKENS
        self._pages = 0
        self._tokens = 0
        # Tokens that the counts in the table speak of: `tokens`, plus the chunk that is being computed.
        self._counted = 0
        # Layer by layer, the part of the table that holds those tokens: what attention reads.
        self._used_LKN: list[NDArray[Any]] = []

    @property
    def tokens(self) -> int:
        """Tokens in the cache: the position of the next chunk's first token."""
        return self._tokens

    @property
    def room_tokens(self) -> int:
        """Tokens that fit behind those in the cache."""
        return self._pages * BLOCK_TOKENS - self._tokens

    def mount(self, addresses_L: Sequence[int], blocks: int, *, room_blocks: int) -> None:
        """Add the first `blocks` blocks of a sealed segment, one slot per layer. Only while no page has room left.

        The slots must stay where they are as long as this cache is used; their bytes are never written.

        Args:
            addresses_L: of the slots.
            blocks: to be read.
            room_blocks: size of each slot.
        """
        assert self.room_tokens == 0, "tokens are mounted in order, before room is added"
        self._add_pages(addresses_L, blocks, room_blocks)
        self._tokens += blocks * BLOCK_TOKENS
        self._count(self._tokens)

    def extend(self, addresses_L: Sequence[int], room_blocks: int) -> None:
        """Add empty slots of so many blocks, one per layer, to be written by later chunks."""
        self._add_pages(addresses_L, room_blocks, room_blocks)

    def attend(self, layer: int, q_QHD: Tensor, k_TKD: Tensor, v_TKD: Tensor) -> Tensor:
        """Append the chunk's keys and values, then attend causally to everything.

        Args:
            layer: index of the layer; every layer sees the same chunk before `advance`.
            q_QHD: queries of the chunk's last Q tokens.
            k_TKD: keys of the whole chunk, in the pages' dtype. Not kept.
            v_TKD: values, the same.

        Returns:
            [Q, H, D] in the dtype of the queries, new and contiguous.
        """
        end = self._tokens + len(k_TKD)
        if self._counted != end:
            self._count(end)
        pages_KN = self._used_LKN[layer]
        page = self._layout.slab.page
        self._kernels.append(k_TKD.contiguous(), v_TKD.contiguous(), pages_KN, layout=page, index=self._tokens)
        part = self._kernels.attend(
            q_QHD.contiguous(),
            pages_KN,
            layout=page,
            position=end - len(q_QHD),
            out_dtype=q_QHD.dtype,
        )
        return part.out_THD

    def advance(self, tokens: int) -> None:
        """End a chunk of so many tokens, after all layers saw it. A chunk that is not ended never was."""
        assert self._counted == self._tokens + tokens, "the chunk that ends is not the one that was attended"
        self._tokens += tokens

    def _add_pages(self, addresses_L: Sequence[int], blocks: int, room_blocks: int) -> None:
        slab = self._layout.slab
        assert len(addresses_L) == self._layout.layers
        assert blocks <= room_blocks
        assert self._pages + blocks <= self._table_LKN.shape[2], "the page table is full"
        offsets_KB = np.array(
            [
                [slab.page_offset(block, head, blocks=room_blocks) for block in range(blocks)]
                for head in range(slab.kv_heads)
            ],
            dtype=np.uint64,
        )
        keys_LKB = np.array(addresses_L, dtype=np.uint64)[:, None, None] + offsets_KB
        new_LKB = self._table_LKN[:, :, self._pages : self._pages + blocks]
        new_LKB["keys"] = keys_LKB
        new_LKB["values"] = keys_LKB + np.uint64(slab.page.keys_bytes)
        self._pages += blocks

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
