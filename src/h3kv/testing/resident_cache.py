"""A paged cache with memory of its own: the pages that a store would lend, without the store."""

from __future__ import annotations

import torch

from h3kv.attention import native
from h3kv.attention.paged import PagedCache
from h3kv.core.layout import CacheLayout
from h3kv.core.limits import BLOCK_TOKENS
from h3kv.memory.arena import allocate_arena


class ResidentCache(PagedCache):
    """Satisfies `models.decoder.KvCache` with the native attention, for at most so many tokens."""

    def __init__(self, layout: CacheLayout, *, tokens: int) -> None:
        blocks = -(-tokens // BLOCK_TOKENS)
        super().__init__(native, layout, pages=blocks)
        slab_bytes = layout.slab.size_bytes(blocks)
        self._arena = allocate_arena(layout.layers * slab_bytes, torch.device("cpu"))
        self.extend([self._arena.data_ptr() + layer * slab_bytes for layer in range(layout.layers)], blocks)
