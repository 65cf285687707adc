"""Typed, checked entry to the native attention.

Shapes: T query tokens, H query heads, K KV heads, N pages, D head dim.
"""

from __future__ import annotations

from typing import Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from h3kv import _native
from h3kv.attention.parts import Part
from h3kv.core.errors import ShapeError
from h3kv.core.layout import PageLayout
from h3kv.core.limits import ATTEND_BATCH_PAGES, BLOCK_TOKENS, HEAD_DIM_MAX, LANE_TOKENS
from h3kv.core.types import DType

PAGE_DTYPE: Final = np.dtype(
    [("keys", "<u8"), ("values", "<u8"), ("positions", "<u8"), ("first", "<i4"), ("count", "<i4")]
)
"""One entry of a page table: addresses of keys, values and int32 positions (0: consecutive from `first`), then the
position of the first token and the number of tokens in use. The same 32 bytes as `h3::Page`."""

CODES: Final = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
"""`h3::DType` of each element type that the native core reads."""

TORCH_DTYPES: Final = {DType.FP32: torch.float32, DType.BF16: torch.bfloat16, DType.FP16: torch.float16}
"""The tensor element type of each of ours."""

DTYPES: Final = {torch_dtype: dtype for dtype, torch_dtype in TORCH_DTYPES.items()}
"""The other way round."""

assert PAGE_DTYPE.itemsize == 32


def append(k_TKD: Tensor, v_TKD: Tensor, pages_KN: NDArray[np.void], *, layout: PageLayout, index: int) -> None:
    """Write tokens into the pages of a table, in the layout of `core.layout.PageLayout`.

    The table itself is not changed: counts stay as they are until the caller moves them on.

    Args:
        k_TKD, v_TKD: CPU, contiguous, in the pages' type.
        pages_KN: C-ordered rows; all addresses writable.
        layout: of the pages.
        index: place of the first token: page `index // 64`, place `index % 64`. Tokens before it are kept.

    Raises:
        ShapeError: shapes, types or strides disagree, or the table has too few pages.
    """
    tokens, kv_heads, head_dim = k_TKD.shape
    if k_TKD.shape != v_TKD.shape or k_TKD.dtype != v_TKD.dtype:
        raise ShapeError(f"keys {tuple(k_TKD.shape)} {k_TKD.dtype} and values {tuple(v_TKD.shape)} {v_TKD.dtype}")
    if k_TKD.dtype != TORCH_DTYPES[layout.dtype] or head_dim != layout.head_dim:
        raise ShapeError(f"keys of {head_dim} x {k_TKD.dtype} for pages of {layout.head_dim} x {layout.dtype}")
    _check_tensor(k_TKD)
    _check_tensor(v_TKD)
    _check_table(pages_KN, kv_heads)
    if index < 0 or index + tokens > pages_KN.shape[1] * BLOCK_TOKENS:
        raise ShapeError(f"tokens {index} to {index + tokens} do not fit {pages_KN.shape[1]} pages")
    _native.append(
        k_TKD.data_ptr(),
        v_TKD.data_ptr(),
        pages_KN.ctypes.data,
        pages_KN.strides[0] // PAGE_DTYPE.itemsize,
        index,
        tokens,
        kv_heads,
        head_dim,
        CODES[k_TKD.dtype],
        torch.get_num_threads(),
    )


def write_addresses(pages_KN: NDArray[np.void], first: int, keys_KB: NDArray[np.uint64], *, layout: PageLayout) -> None:
    """Write where B pages of each KV head begin into a table, from page number `first` on."""
    pages_KB = pages_KN[:, first : first + keys_KB.shape[1]]
    pages_KB["keys"] = keys_KB
    pages_KB["values"] = keys_KB + np.uint64(layout.keys_bytes)


def copy_pages(sources_N: NDArray[np.uint64], targets_N: NDArray[np.uint64], *, layout: PageLayout) -> None:
    """Copy whole pages between addresses in main memory. No two targets overlap.

    Args:
        sources_N: contiguous; readable.
        targets_N: as many, contiguous; writable.
        layout: of the pages.
    """
    assert sources_N.shape == targets_N.shape
    assert sources_N.flags.c_contiguous and targets_N.flags.c_contiguous
    threads = torch.get_num_threads()
    _native.copy_pages(sources_N.ctypes.data, targets_N.ctypes.data, sources_N.size, layout.size_bytes, threads)


def attend(
    q_THD: Tensor,
    pages_KN: NDArray[np.void],
    *,
    layout: PageLayout,
    position: int,
    scale: float | None = None,
    out_dtype: torch.dtype = torch.float32,
    threads: int | None = None,
) -> Part:
    """Attention of T query tokens over the tokens of all pages; head h reads KV head h // (H / K).

    Args:
        q_THD: CPU, contiguous; fp32, bf16 or fp16. Rounded to bf16 when the pages are bf16.
        pages_KN: one list of pages for each KV head, each sorted as the caller likes; ragged counts are fine.
        position: row t sees exactly the tokens whose position is <= position + t.
        scale: of the scores, above 0; None: 1 / sqrt(D).
        out_dtype: of the output. The log-sum-exp is always fp32.
        threads: None: torch's number. The result does not depend on it.

    Returns:
        A new part; rows that see no token are zero, with -inf.

    Raises:
        ShapeError: shapes, types or strides disagree.

    Cost: reads every page once for up to 32 query rows a KV head, allocates the result.
    """
    whole = Attention(
        q_THD, pages_KN, layout=layout, position=position, scale=scale, out_dtype=out_dtype, threads=threads
    )
    return whole.run(pages_KN.shape[1])


class Attention:
    """The same attention, over pages that become readable run by run. Equal to `attend`, bit for bit.

    Arguments and errors as of `attend`; the addresses of a run's pages are read when it is taken.
    """

    def __init__(
        self,
        q_THD: Tensor,
        pages_KN: NDArray[np.void],
        *,
        layout: PageLayout,
        position: int,
        scale: float | None = None,
        out_dtype: torch.dtype = torch.float32,
        threads: int | None = None,
    ) -> None:
        kv_heads = pages_KN.shape[0]
        heads, head_dim = q_THD.shape[1:]
        _check_tensor(q_THD)
        _check_table(pages_KN, kv_heads)
        if out_dtype not in CODES:
            raise ShapeError(f"the output can be fp32, bf16 or fp16, not {out_dtype}")
        if scale is not None and scale <= 0:
            raise ShapeError(f"scale = {scale}: must be above 0")
        if head_dim != layout.head_dim or min(q_THD.shape[0], heads, kv_heads) == 0 or heads % kv_heads != 0:
            raise ShapeError(
                f"{q_THD.shape[0]} tokens of {heads} query heads of {head_dim} over {kv_heads} KV heads of "
                f"{layout.head_dim}"
            )
        self._q_THD = q_THD
        self._pages_KN = pages_KN
        self._layout = layout
        self._page_code = CODES[TORCH_DTYPES[layout.dtype]]
        self._position = position
        self._scale = head_dim**-0.5 if scale is None else scale
        self._threads = torch.get_num_threads() if threads is None else threads
        self._part = Part(torch.empty(q_THD.shape, dtype=out_dtype), torch.empty(q_THD.shape[:2], dtype=torch.float32))
        self._state: Tensor | None = None
        self._done = 0

    @property
    def done(self) -> int:
        """Pages that were read: those before this one."""
        return self._done

    def place(self, first: int, keys_KB: NDArray[np.uint64]) -> None:
        """Write the addresses of pages that became readable, the page number `first` and up, into the table."""
        write_addresses(self._pages_KN, first, keys_KB, layout=self._layout)

    def run(self, end: int) -> Part:
        """Attend to the pages from the end of the last run to `end`.

        Args:
            end: a multiple of `limits.ATTEND_BATCH_PAGES`, or the number of all pages.

        Returns:
            The part, whose numbers are there after the run that takes the last page.
        """
        tokens, heads, head_dim = self._q_THD.shape
        kv_heads, pages = self._pages_KN.shape
        assert self._done <= end <= pages and (end == pages or end % ATTEND_BATCH_PAGES == 0)
        if end == self._done and end < pages:
            return self._part
        if self._state is None and end < pages:
            floats = _native.attend_state_floats(tokens, heads, kv_heads, head_dim, pages)
            self._state = torch.empty(floats, dtype=torch.float32)
        part = self._part
        _native.attend(
            self._q_THD.data_ptr(),
            part.out_THD.data_ptr(),
            part.lse_TH.data_ptr(),
            self._pages_KN.ctypes.data,
            self._pages_KN.strides[0] // PAGE_DTYPE.itemsize,
            CODES[self._q_THD.dtype],
            CODES[part.out_THD.dtype],
            self._page_code,
            tokens,
            heads,
            kv_heads,
            head_dim,
            pages,
            self._position,
            self._scale,
            self._threads,
            self._done,
            end,
            0 if self._state is None else self._state.data_ptr(),
        )
        self._done = end
        return part


def _check_tensor(x_TXD: Tensor) -> None:
    if x_TXD.dtype not in CODES or x_TXD.device.type != "cpu" or not x_TXD.is_contiguous():
        raise ShapeError(f"expected a contiguous fp32, bf16 or fp16 CPU tensor, got {x_TXD.dtype} on {x_TXD.device}")
    head_dim = x_TXD.shape[-1]
    if head_dim % LANE_TOKENS != 0 or not 0 < head_dim <= HEAD_DIM_MAX:
        raise ShapeError(f"head_dim must be a multiple of {LANE_TOKENS} up to {HEAD_DIM_MAX}, got {head_dim}")


def _check_table(pages_KN: NDArray[np.void], kv_heads: int) -> None:
    if pages_KN.dtype != PAGE_DTYPE or pages_KN.ndim != 2 or pages_KN.shape[0] != kv_heads:
        raise ShapeError(f"expected a page table of {kv_heads} rows, got {pages_KN.dtype} {pages_KN.shape}")
    if pages_KN.shape[1] > 1 and pages_KN.strides[1] != PAGE_DTYPE.itemsize:
        raise ShapeError("the entries of a page list must be adjacent in memory")
