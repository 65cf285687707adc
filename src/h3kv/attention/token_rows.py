"""The tokens of pages as plain rows, for code that works with keys and values themselves.

Shapes: S tokens, K KV heads, D head dim, N pages, P pack, E elements of a page's keys or values, B bytes.

Attention never needs this: it reads pages as they lie.
"""

from __future__ import annotations

import ctypes
import dataclasses

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from h3kv.attention import codes
from h3kv.attention.native import TORCH_DTYPES
from h3kv.core.layout import SCALES_BYTES, PageLayout
from h3kv.core.limits import BLOCK_TOKENS, PANEL_DIMS


def read_keys(pages_KN: NDArray[np.void], layout: PageLayout) -> Tensor:
    """Keys in token order, [S, K, D] in the layout's dtype, new and contiguous.

    Args:
        pages_KN: in main memory, with equal counts for all heads. Tokens of pages without positions come in the pages'
            order, those of pages with positions by their positions, at the places that the latter have in that order.
        layout: of the pages.
    """
    if not layout.is_raw:
        return _in_order(pages_KN, codes.rotate(_unpack(pages_KN, layout).keys.decode()), layout)
    elements_KNE = _copy(pages_KN["keys"], layout.keys_bytes).view(TORCH_DTYPES[layout.dtype])
    # [D / P][64][P] as drawn in core/layout.py.
    split = elements_KNE.view(*pages_KN.shape, layout.head_dim // layout.pack, BLOCK_TOKENS, layout.pack)
    return _in_order(pages_KN, split.permute(0, 1, 3, 2, 4).flatten(3), layout)


def read_values(pages_KN: NDArray[np.void], layout: PageLayout) -> Tensor:
    """Values in token order, [S, K, D] in the layout's dtype, new and contiguous. Arguments as of `read_keys`."""
    if not layout.is_raw:
        return _in_order(pages_KN, codes.rotate(_unpack(pages_KN, layout).values.decode()), layout)
    elements_KNE = _copy(pages_KN["values"], layout.values_bytes).view(TORCH_DTYPES[layout.dtype])
    panels = []
    for start in range(0, layout.head_dim, PANEL_DIMS):
        end = min(start + PANEL_DIMS, layout.head_dim)
        panel = elements_KNE[..., start * BLOCK_TOKENS : end * BLOCK_TOKENS]
        # [64 / P][width][P] as drawn there.
        split = panel.reshape(*pages_KN.shape, BLOCK_TOKENS // layout.pack, end - start, layout.pack)
        panels.append(split.transpose(-1, -2).flatten(2, 3))
    return _in_order(pages_KN, torch.cat(panels, dim=-1), layout)


def read_positions(page: np.void) -> NDArray[np.int64]:
    """Positions of the tokens in use of one page."""
    count = int(page["count"])
    if not page["positions"]:
        return int(page["first"]) + np.arange(count)
    copied = ctypes.string_at(int(page["positions"]), 4 * count)
    return np.frombuffer(copied, dtype=np.int32).astype(np.int64)


def _in_order(pages_KN: NDArray[np.void], rows_KNSD: Tensor, layout: PageLayout) -> Tensor:
    """Tokens in use of all pages, [S, K, D]."""
    heads = []
    for pages_N, rows_NSD in zip(pages_KN, rows_KNSD, strict=True):
        used_SD = torch.cat([rows_SD[:count] for rows_SD, count in zip(rows_NSD, pages_N["count"], strict=True)])
        if pages_N["positions"].any():
            positions_S = np.concatenate([read_positions(page) for page in pages_N])
            used_SD = used_SD[torch.from_numpy(np.argsort(positions_S, kind="stable"))]
        heads.append(used_SD)
    return torch.stack(heads, dim=1).to(TORCH_DTYPES[layout.dtype])


def _unpack(pages_KN: NDArray[np.void], layout: PageLayout) -> codes.CodedTokens:
    """The coded tokens of all pages, [K, N, 64, D]."""
    parts = [_copy(pages_KN["keys"], layout.keys_bytes), _copy(pages_KN["values"], layout.values_bytes)]
    planes = [_copy(pages_KN["nibbles"], layout.nibbles_bytes), _copy(pages_KN["scales"], SCALES_BYTES)]
    tokens = codes.unpack(torch.cat(parts, dim=-1), torch.cat(planes, dim=-1), layout)
    if not layout.residues_bytes or not pages_KN["residues"].all():
        return tokens
    residues_KNSD = codes.unpack_residues(_copy(pages_KN["residues"], layout.residues_bytes), layout.head_dim)
    return codes.CodedTokens(tokens.keys, dataclasses.replace(tokens.values, residues_XD=residues_KNSD))


def _copy(addresses_KN: NDArray[np.uint64], size_bytes: int) -> Tensor:
    """So many bytes from each address, [K, N, B]."""
    copied = torch.empty((*addresses_KN.shape, size_bytes), dtype=torch.uint8)
    for place, address in np.ndenumerate(addresses_KN):
        if size_bytes:
            ctypes.memmove(copied[place].data_ptr(), int(address), size_bytes)
    return copied
