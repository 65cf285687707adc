"""Attention over pages in plain torch operations: the path of devices without a native kernel, and the test oracle.

Shapes: T query tokens, H query heads, K KV heads, G = H / K heads of one group, D head dim, N pages, S tokens of a run,
B bytes.

Pages are gathered in runs of at most 64 and each run's result is merged into the sum so far, so that memory stays
bounded at any context length. A run's length depends on shapes only: results do not depend on placement.
"""

from __future__ import annotations

import dataclasses
from typing import Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from h3kv.attention import codes
from h3kv.attention.native import TORCH_DTYPES
from h3kv.attention.parts import Part, merge
from h3kv.attention.token_rows import read_positions
from h3kv.core.layout import SCALES_BYTES, PageLayout
from h3kv.core.limits import BLOCK_TOKENS, PANEL_DIMS

SCORES_MAX: Final = 1 << 24
"""Scores of one run over all heads: 64 MiB in fp32."""

RUN_PAGES_MAX: Final = 64


class TorchPages:
    """Appends to and attends over the pages of one store.

    Args:
        arena: the store's memory, uint8. Pages and planes lie in it, raw pages at whole multiples of their size.
        layout: geometry of every page.
    """

    def __init__(self, arena: Tensor, layout: PageLayout) -> None:
        self._layout = layout
        self._store: _RawStore | _CodeStore = _RawStore(arena, layout) if layout.is_raw else _CodeStore(arena, layout)

    def close(self) -> None:
        """Let go of the store's memory. Nothing else may be called afterwards."""
        self._store.close()

    def append(
        self, k_TKD: Tensor, v_TKD: Tensor, pages_KN: NDArray[np.void], *, layout: PageLayout, index: int
    ) -> None:
        """See `PageKernels.append`."""
        assert layout == self._layout, "these pages have another layout"
        self._store.append(k_TKD, v_TKD, pages_KN, index)

    def attend(
        self,
        q_THD: Tensor,
        pages_KN: NDArray[np.void],
        *,
        layout: PageLayout,
        position: int,
        scale: float | None = None,
        out_dtype: torch.dtype = torch.float32,
    ) -> Part:
        """See `PageKernels.attend`. Computes in fp32. Positions lie in main memory."""
        assert layout == self._layout, "these pages have another layout"
        tokens, heads, head_dim = q_THD.shape
        kv_heads, pages = pages_KN.shape
        scale = head_dim**-0.5 if scale is None else scale
        q_KGTD = q_THD.float().view(tokens, kv_heads, -1, head_dim).permute(1, 2, 0, 3) * scale
        limit_T1 = torch.arange(position, position + tokens, device=q_THD.device)[:, None]
        run = max(1, min(RUN_PAGES_MAX, SCORES_MAX // (heads * tokens * BLOCK_TOKENS)))
        merged = Part(torch.zeros_like(q_THD, dtype=torch.float32), q_THD.new_full((tokens, heads), -torch.inf).float())
        for start in range(0, pages, run):
            merged = merge([merged, self._attend_run(q_KGTD, pages_KN[:, start : start + run], limit_T1)])
        return Part(merged.out_THD.to(out_dtype).contiguous(), merged.lse_TH)

    def _attend_run(self, q_KGTD: Tensor, pages_KN: NDArray[np.void], limit_T1: Tensor) -> Part:
        k_KSD, v_KSD = self._store.read(pages_KN)
        seen_KTS, filled_KS = self._masks(pages_KN, limit_T1)
        scores_KGTS = (q_KGTD @ k_KSD[:, None].transpose(-1, -2)).masked_fill(~seen_KTS[:, None], -torch.inf)
        lse_KGT = scores_KGTS.logsumexp(-1)
        # A row without a token: subtract 0 instead of -inf, so that its weights are 0 and not NaN.
        weights_KGTS = (scores_KGTS - lse_KGT.nan_to_num(neginf=0.0)[..., None]).exp()
        # Room past a page's count holds anything, also NaN, which a weight of 0 would not silence.
        out_KGTD = weights_KGTS @ v_KSD.masked_fill(~filled_KS[..., None], 0.0)[:, None]
        tokens, head_dim = q_KGTD.shape[2:]
        return Part(
            out_KGTD.permute(2, 0, 1, 3).reshape(tokens, -1, head_dim), lse_KGT.permute(2, 0, 1).reshape(tokens, -1)
        )

    def _masks(self, pages_KN: NDArray[np.void], limit_T1: Tensor) -> tuple[Tensor, Tensor]:
        """Which tokens each row sees [K, T, S], and which exist [K, S]."""
        lane_B = np.arange(BLOCK_TOKENS)
        filled = lane_B < pages_KN["count"][..., None]
        position = pages_KN["first"][..., None].astype(np.int64) + lane_B
        for place in zip(*pages_KN["positions"].nonzero(), strict=True):
            page = pages_KN[place]
            position[place][: page["count"]] = read_positions(page)
        filled_KS = torch.from_numpy(filled.reshape(len(filled), -1)).to(limit_T1.device)
        position_KS = torch.from_numpy(position.reshape(len(position), -1)).to(limit_T1.device)
        return filled_KS[:, None] & (position_KS[:, None] <= limit_T1), filled_KS


class _RawStore:
    """Raw pages of an arena."""

    def __init__(self, arena: Tensor, layout: PageLayout) -> None:
        self._base = arena.data_ptr()
        self._layout = layout
        pages = arena[: arena.numel() // layout.size_bytes * layout.size_bytes].view(-1, layout.size_bytes)
        keys, values = pages[:, : layout.keys_bytes], pages[:, layout.keys_bytes : 2 * layout.keys_bytes]
        dtype, count, pack, head_dim = TORCH_DTYPES[layout.dtype], len(pages), layout.pack, layout.head_dim
        # [page, D / pack, 64, pack], and [page, 64 / pack, width, pack] for each panel, as drawn in core/layout.py.
        self._keys = keys.view(dtype).view(count, head_dim // pack, BLOCK_TOKENS, pack)
        self._panels = [slice(start, min(start + PANEL_DIMS, head_dim)) for start in range(0, head_dim, PANEL_DIMS)]
        elements = values.view(dtype)
        self._values = [
            elements[:, panel.start * BLOCK_TOKENS : panel.stop * BLOCK_TOKENS].view(
                count, BLOCK_TOKENS // pack, panel.stop - panel.start, pack
            )
            for panel in self._panels
        ]

    def close(self) -> None:
        self._keys = self._keys.new_empty(0)
        self._values.clear()

    def append(self, k_TKD: Tensor, v_TKD: Tensor, pages_KN: NDArray[np.void], index: int) -> None:
        tokens, kv_heads, head_dim = k_TKD.shape
        pack = self._layout.pack
        place_T = torch.arange(index, index + tokens, device=k_TKD.device)
        ids_TK = self._page_ids(pages_KN)[:, place_T // BLOCK_TOKENS].T
        token_T1 = (place_T % BLOCK_TOKENS)[:, None]
        self._keys[ids_TK, :, token_T1] = k_TKD.view(tokens, kv_heads, head_dim // pack, pack)
        for panel, values in zip(self._panels, self._values, strict=True):
            values[ids_TK, token_T1 // pack, :, token_T1 % pack] = v_TKD[..., panel]

    def read(self, pages_KN: NDArray[np.void]) -> tuple[Tensor, Tensor]:
        """All rows of the pages in fp32, keys and values [K, S, D]."""
        ids_KN = self._page_ids(pages_KN)
        kv_heads, pages = ids_KN.shape
        span = pages * BLOCK_TOKENS
        k_KSD = self._keys[ids_KN].permute(0, 1, 3, 2, 4).reshape(kv_heads, span, -1).float()
        panels = [values[ids_KN].permute(0, 1, 2, 4, 3).reshape(kv_heads, span, -1) for values in self._values]
        return k_KSD, torch.cat(panels, dim=2).float()

    def _page_ids(self, pages_KN: NDArray[np.void]) -> Tensor:
        """Numbers of the pages in the arena, int64 on its device."""
        offsets = pages_KN["keys"].astype(np.int64) - self._base
        return torch.from_numpy(offsets // self._layout.size_bytes).to(self._keys.device)


class _CodeStore:
    """Pages of codes of an arena, with their planes."""

    def __init__(self, arena: Tensor, layout: PageLayout) -> None:
        self._arena = arena
        self._base = arena.data_ptr()
        self._layout = layout

    def close(self) -> None:
        self._arena = self._arena.new_empty(0)

    def append(self, k_TKD: Tensor, v_TKD: Tensor, pages_KN: NDArray[np.void], index: int) -> None:
        tokens = len(k_TKD)
        first, end = index // BLOCK_TOKENS, -(-(index + tokens) // BLOCK_TOKENS)
        changed_KN = pages_KN[:, first:end]
        at_KNB = self._bytes_of(changed_KN)
        held = self._unpack(at_KNB)
        new = codes.CodedTokens.of(k_TKD.transpose(0, 1), v_TKD.transpose(0, 1), self._layout.encoding)
        chosen = slice(index - first * BLOCK_TOKENS, index - first * BLOCK_TOKENS + tokens)
        for old_rows, new_rows in ((held.keys, new.keys), (held.values, new.values)):
            old_rows.codes_XD.flatten(1, 2)[:, chosen] = new_rows.codes_XD
            old_rows.scale_X.flatten(1, 2)[:, chosen] = new_rows.scale_X
            old_rows.offset_X.flatten(1, 2)[:, chosen] = new_rows.offset_X
        if held.values.residues_XD is not None and new.values.residues_XD is not None:
            held.values.residues_XD.flatten(1, 2)[:, chosen] = new.values.residues_XD
        pieces = [*codes.pack(held, self._layout), codes.pack_residues(held).to(at_KNB.device)]
        self._arena[at_KNB] = torch.cat(pieces, dim=-1)

    def read(self, pages_KN: NDArray[np.void]) -> tuple[Tensor, Tensor]:
        """All rows of the pages in fp32, as they were before the rotation, keys and values [K, S, D]."""
        k_KNSD, v_KNSD = self._unpack(self._bytes_of(pages_KN)).decode()
        return k_KNSD.flatten(1, 2), v_KNSD.flatten(1, 2)

    def _bytes_of(self, pages_KN: NDArray[np.void]) -> Tensor:
        """Where the bytes of pages, planes and residues lie in the arena, in the order of `codes.pack`: [K, N, B]."""
        layout = self._layout
        sizes = {
            "keys": layout.keys_bytes,
            "values": layout.values_bytes,
            "nibbles": layout.nibbles_bytes,
            "scales": SCALES_BYTES,
            "residues": layout.residues_bytes,
        }
        offsets = [
            pages_KN[part].astype(np.int64)[..., None] - self._base + np.arange(size_bytes)
            for part, size_bytes in sizes.items()
        ]
        return torch.from_numpy(np.concatenate(offsets, axis=-1)).to(self._arena.device)

    def _unpack(self, at_KNB: Tensor) -> codes.CodedTokens:
        layout = self._layout
        split = layout.keys_bytes + layout.values_bytes
        end = split + layout.nibbles_bytes + SCALES_BYTES
        bytes_KNB = self._arena[at_KNB]
        held = codes.unpack(bytes_KNB[..., :split], bytes_KNB[..., split:end], layout)
        keys, values = (
            codes.CodedRows(each.codes_XD.contiguous(), each.scale_X.contiguous(), each.offset_X.contiguous())
            for each in (held.keys, held.values)
        )
        if layout.residues_bytes:
            residues = codes.unpack_residues(bytes_KNB[..., end:], layout.head_dim).contiguous()
            values = dataclasses.replace(values, residues_XD=residues)
        return codes.CodedTokens(keys, values)
