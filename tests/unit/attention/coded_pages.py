"""Page tables over coded tokens, for tests of everything that reads pages of codes.

Shapes: S tokens, K KV heads, D head dim, N pages, B bytes.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from h3kv.attention import native
from h3kv.attention.codes import CodedTokens
from h3kv.attention.native import PAGE_DTYPE, TORCH_DTYPES, RunOffsets
from h3kv.attention.reference import TokenRun
from h3kv.core.layout import PageLayout
from h3kv.core.limits import BLOCK_TOKENS


@dataclass
class CodedPages:
    """Coded pages of random tokens; what they decode to, in token order; the tokens themselves."""

    layout: PageLayout
    table_KN: NDArray[np.void]
    decoded: TokenRun
    k_SKD: Tensor
    v_SKD: Tensor
    pages_KNB: Tensor
    planes_KNB: Tensor
    residues_KNB: Tensor
    positions_S: Tensor


def coded_pages(
    tokens: int, layout: PageLayout, *, kv_heads: int, generator: torch.Generator, fine: bool = False
) -> CodedPages:
    """Pages whose free room holds bytes that are NaN as scales, written by the native append.

    They are read without residues, unless those are asked for.
    """
    shape = (tokens, kv_heads, layout.head_dim)
    k_SKD, v_SKD = (torch.randn(shape, generator=generator).to(TORCH_DTYPES[layout.dtype]) for _ in range(2))
    pages = -(-tokens // BLOCK_TOKENS)
    sizes = (layout.size_bytes, layout.plane_bytes, layout.residues_bytes)
    memory = torch.full((kv_heads * pages * sum(sizes),), 0xFF, dtype=torch.uint8)
    pieces = memory.split([kv_heads * pages * size for size in sizes])
    index_KN = np.arange(kv_heads * pages, dtype=np.uint64).reshape(kv_heads, pages)
    starts = (piece.data_ptr() - memory.data_ptr() if piece.numel() else 0 for piece in pieces)
    offsets = RunOffsets(*(start + index_KN * np.uint64(size) for start, size in zip(starts, sizes, strict=True)))
    table_KN = np.zeros((kv_heads, pages), dtype=PAGE_DTYPE)
    native.write_addresses(table_KN, 0, memory.data_ptr(), offsets, layout=layout)
    table_KN["first"] = np.arange(pages) * BLOCK_TOKENS
    table_KN["count"] = np.clip(tokens - table_KN["first"], 0, BLOCK_TOKENS)
    native.append(k_SKD, v_SKD, table_KN, layout=layout, index=0)
    coded = CodedTokens.of(k_SKD, v_SKD, layout.encoding)
    if not fine:
        table_KN["residues"] = 0
        coded = coded.without_residues()
    k_decoded, v_decoded = coded.decode()
    positions_S = torch.arange(tokens, dtype=torch.int32)
    return CodedPages(
        layout,
        table_KN,
        TokenRun(k_decoded, v_decoded, positions_S),
        k_SKD,
        v_SKD,
        *(piece.view(kv_heads, pages, size) for piece, size in zip(pieces, sizes, strict=True)),
        positions_S,
    )
