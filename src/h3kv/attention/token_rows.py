"""The tokens of pages as plain rows, for code that works with keys and values themselves.

Shapes: S tokens, K KV heads, D head dim, N pages, P pack, E elements of a page's keys or values.

Attention never needs this: it reads pages as they lie.
"""

from __future__ import annotations

import ctypes

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from h3kv.attention.native import TORCH_DTYPES
from h3kv.core.layout import PageLayout
from h3kv.core.limits import BLOCK_TOKENS, PANEL_DIMS


def read_keys(pages_KN: NDArray[np.void], layout: PageLayout) -> Tensor:
    """Keys in token order, [S, K, D] in the pages' dtype, new and contiguous.

    Args:
        pages_KN: in main memory, with equal counts for all heads; all pages but the last are full.
        layout: of the pages.
    """
    elements_KNE = _copy(pages_KN, "keys", layout)
    # [D / P][64][P] as drawn in core/layout.py.
    split = elements_KNE.view(*pages_KN.shape, layout.head_dim // layout.pack, BLOCK_TOKENS, layout.pack)
    return split.permute(1, 3, 0, 2, 4).flatten(3).flatten(0, 1)[: _tokens(pages_KN)].contiguous()


def read_values(pages_KN: NDArray[np.void], layout: PageLayout) -> Tensor:
    """Values in token order, [S, K, D] in the pages' dtype, new and contiguous. Arguments as of `read_keys`."""
    elements_KNE = _copy(pages_KN, "values", layout)
    panels_SKD = []
    for start in range(0, layout.head_dim, PANEL_DIMS):
        end = min(start + PANEL_DIMS, layout.head_dim)
        panel = elements_KNE[..., start * BLOCK_TOKENS : end * BLOCK_TOKENS]
        # [64 / P][width][P] as drawn there.
        split = panel.reshape(*pages_KN.shape, BLOCK_TOKENS // layout.pack, end - start, layout.pack)
        panels_SKD.append(split.permute(1, 2, 4, 0, 3).flatten(0, 2)[: _tokens(pages_KN)])
    return torch.cat(panels_SKD, dim=-1)


def _tokens(pages_KN: NDArray[np.void]) -> int:
    return int(pages_KN["count"][0].sum())


def _copy(pages_KN: NDArray[np.void], part: str, layout: PageLayout) -> Tensor:
    """The keys or values of all pages, [K, N, E]."""
    copied = torch.empty((*pages_KN.shape, layout.keys_bytes), dtype=torch.uint8)
    for place, address in np.ndenumerate(pages_KN[part]):
        ctypes.memmove(copied[place].data_ptr(), int(address), layout.keys_bytes)
    return copied.view(TORCH_DTYPES[layout.dtype])
