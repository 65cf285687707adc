"""Builds page tables over real memory, for tests of everything that reads pages."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from h3kv.attention.native import PAGE_DTYPE, TORCH_DTYPES
from h3kv.attention.reference import TokenRun, pack_page
from h3kv.core.layout import PageLayout
from h3kv.core.limits import BLOCK_TOKENS
from h3kv.core.types import DType


@dataclass
class Pages:
    """Pages of random tokens, and the same tokens in natural order."""

    layout: PageLayout
    table_KN: NDArray[np.void]
    tokens: TokenRun
    memory: list[Tensor] = field(repr=False)


def random_pages(
    counts: list[int],
    *,
    dtype: DType,
    kv_heads: int,
    head_dim: int,
    generator: torch.Generator,
    shuffled: bool = False,
) -> Pages:
    """Pages with so many tokens each, packed by the plain reference; positions explicit when shuffled.

    Room behind a page's last token holds NaN, which no kernel may let through.
    """
    layout = PageLayout(dtype, head_dim)
    total = sum(counts)
    shape = (total, kv_heads, head_dim)
    k_SKD = torch.randn(shape, generator=generator).to(TORCH_DTYPES[dtype])
    v_SKD = torch.randn(shape, generator=generator).to(TORCH_DTYPES[dtype])
    positions_S = torch.randperm(total, generator=generator) if shuffled else torch.arange(total)
    positions_S = positions_S.to(torch.int32)
    table_KN = np.zeros((kv_heads, len(counts)), dtype=PAGE_DTYPE)
    memory: list[Tensor] = [positions_S]
    for head in range(kv_heads):
        start = 0
        for index, count in enumerate(counts):
            chosen = slice(start, start + count)
            page = pack_page(k_SKD[chosen, head], v_SKD[chosen, head], layout)
            _poison(page, layout, count)
            table_KN[head, index] = (
                page.data_ptr(),
                page.data_ptr() + layout.keys_bytes,
                positions_S[start:].data_ptr() if shuffled and count else 0,
                0,
                0,
                start,
                count,
                0,
            )
            memory.append(page)
            start += count
    return Pages(layout, table_KN, TokenRun(k_SKD, v_SKD, positions_S), memory)


def _poison(page: Tensor, layout: PageLayout, count: int) -> None:
    """Fill the room behind `count` tokens with NaN, but for the other half of a begun pack of values."""
    elements = page[: 2 * layout.keys_bytes].view(TORCH_DTYPES[layout.dtype])
    keys = elements[: layout.keys_bytes // layout.dtype.size_bytes]
    keys.view(layout.head_dim // layout.pack, BLOCK_TOKENS, layout.pack)[:, count:] = torch.nan
    values = elements[layout.keys_bytes // layout.dtype.size_bytes :]
    begun = -(-count // layout.pack)
    start = 0
    for panel in range(0, layout.head_dim, 64):
        width = min(64, layout.head_dim - panel)
        rows = values[start : start + BLOCK_TOKENS * width].view(BLOCK_TOKENS // layout.pack, width * layout.pack)
        rows[begun:] = torch.nan
        start += BLOCK_TOKENS * width
