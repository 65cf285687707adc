"""Typed, checked entry to the native attention.

Shapes: T query tokens, H query heads, K KV heads, N pages, B pages of a run, D head dim.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from h3kv import _native
from h3kv.attention.parts import Part
from h3kv.core.errors import ShapeError
from h3kv.core.layout import PageLayout, SlabLayout
from h3kv.core.limits import ATTEND_BATCH_PAGES, BLOCK_TOKENS, HEAD_DIM_MAX, LANE_TOKENS
from h3kv.core.ports import AttendCall, BatchCall, Offload
from h3kv.core.types import DType, Encoding

PAGE_DTYPE: Final = np.dtype(
    [
        ("keys", "<u8"),
        ("values", "<u8"),
        ("positions", "<u8"),
        ("nibbles", "<u8"),
        ("scales", "<u8"),
        ("first", "<i4"),
        ("count", "<i4"),
        ("residues", "<u8"),
    ]
)
"""One entry of a page table: addresses of keys, values and int32 positions (0: consecutive from `first`), of nibbles
and scales in the plane (0 where the encoding has none), then the position of the first token and the number of tokens
in use, and the address of the residues of values. The same 56 bytes as `h3::Page`."""

BATCH_DTYPE: Final = np.dtype(
    [("pages", "<u8"), ("append_page", "<u8"), ("pages_stride", "<i8"), ("page_count", "<i4"), ("position", "<i4")]
)
"""One sequence of a batch: addresses of its page lists and of the entry that the token goes to, entries from one KV
head to the next, pages that are read, position of the token. The same 32 bytes as `h3::BatchRow`."""

LINEAR_ROWS_MAX: Final = _native.LINEAR_ROWS_MAX
"""Rows whose products are the same, bit for bit, whichever of them come together."""

STEP_BLOCKS: Final = 2
"""Blocks of query rows in a step of a long attention: as many units for each KV head, so that all cores have work."""

CODES: Final = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
"""`h3::DType` of each element type that the native core reads."""

TORCH_DTYPES: Final = {DType.FP32: torch.float32, DType.BF16: torch.bfloat16, DType.FP16: torch.float16}
"""The tensor element type of each of ours."""

DTYPES: Final = {torch_dtype: dtype for dtype, torch_dtype in TORCH_DTYPES.items()}
"""The other way round."""

ENCODINGS: Final = {Encoding.RAW: 0, Encoding.INT8: 1, Encoding.K8V4: 2, Encoding.INT4: 3}
"""`h3::Encoding` of each of ours."""

assert PAGE_DTYPE.itemsize == 56 and BATCH_DTYPE.itemsize == 32


@dataclass(frozen=True, slots=True)
class RunOffsets:
    """Where some pages of each KV head lie in a slab: bytes from its start."""

    pages_KB: NDArray[np.uint64]
    planes_KB: NDArray[np.uint64]
    """Of the planes in the index. Raw pages have none: not read."""
    residues_KB: NDArray[np.uint64]
    """Of the residues of values. Read where the encoding has them."""

    @classmethod
    def of(cls, slab: SlabLayout, blocks: range, *, room_blocks: int) -> RunOffsets:
        """Those of some blocks of a slab with room for so many."""

        def each(offset: Callable[..., int]) -> NDArray[np.uint64]:
            heads = range(slab.kv_heads)
            rows = [[offset(block, head, blocks=room_blocks) for block in blocks] for head in heads]
            return np.array(rows, dtype=np.uint64).reshape(slab.kv_heads, len(blocks))

        return cls(each(slab.page_offset), each(slab.plane_offset), each(slab.residue_offset))


class LocalThreads:
    """Satisfies `core.ports.Offload` by the threads of this process alone."""

    def attend(self, call: AttendCall) -> None:
        """See `Offload.attend`."""
        _native.attend(*call)

    def attend_batch(self, call: BatchCall) -> None:
        """See `Offload.attend_batch`."""
        _native.attend_batch(call)

    def scanner(self) -> None:
        """See `Offload.scanner`."""
        return


LOCAL: Final = LocalThreads()
"""Who computes where nobody else is named."""


def append(k_TKD: Tensor, v_TKD: Tensor, pages_KN: NDArray[np.void], *, layout: PageLayout, index: int) -> None:
    """Write tokens into the pages of a table, in the layout of `core.layout.PageLayout`.

    The table itself is not changed: counts stay as they are until the caller moves them on.

    Args:
        k_TKD, v_TKD: CPU, contiguous, in the pages' type. Pages of codes get them rotated and coded.
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
        ENCODINGS[layout.encoding],
        torch.get_num_threads(),
    )


def write_addresses(
    pages_KN: NDArray[np.void], first: int, slab_address: int, offsets: RunOffsets, *, layout: PageLayout
) -> None:
    """Write where pages of a slab at this address lie into a table, from page number `first` on."""
    pages_KB = pages_KN[:, first : first + offsets.pages_KB.shape[1]]
    keys_KB = offsets.pages_KB + np.uint64(slab_address)
    pages_KB["keys"] = keys_KB
    pages_KB["values"] = keys_KB + np.uint64(layout.keys_bytes)
    pages_KB["residues"] = offsets.residues_KB + np.uint64(slab_address) if layout.residues_bytes else 0
    if layout.is_raw:
        pages_KB["nibbles"] = pages_KB["scales"] = 0
        return
    planes_KB = offsets.planes_KB + np.uint64(slab_address)
    pages_KB["nibbles"] = planes_KB if layout.nibbles_bytes else 0
    pages_KB["scales"] = planes_KB + np.uint64(layout.nibbles_bytes)


def copy_pages(sources_X: NDArray[np.uint64], targets_X: NDArray[np.uint64], *, size_bytes: int) -> None:
    """Copy pieces of equal size between addresses in main memory. No two targets overlap.

    Args:
        sources_X: contiguous; readable.
        targets_X: as many, contiguous; writable.
        size_bytes: of each.
    """
    assert sources_X.shape == targets_X.shape
    assert sources_X.flags.c_contiguous and targets_X.flags.c_contiguous
    threads = torch.get_num_threads()
    _native.copy_pages(sources_X.ctypes.data, targets_X.ctypes.data, sources_X.size, size_bytes, threads)


def attend(
    q_THD: Tensor,
    pages_KN: NDArray[np.void],
    *,
    layout: PageLayout,
    position: int,
    scale: float | None = None,
    out_dtype: torch.dtype = torch.float32,
    threads: int | None = None,
    offload: Offload = LOCAL,
) -> Part:
    """Attention of T query tokens over the tokens of all pages; head h reads KV head h // (H / K).

    Args:
        q_THD: CPU, contiguous; fp32, bf16 or fp16. Rounded to bf16 when the pages are bf16, once rotated over codes.
        pages_KN: one list of pages for each KV head, each sorted as the caller likes; ragged counts are fine.
        position: row t sees exactly the tokens whose position is <= position + t.
        scale: of the scores, above 0; None: 1 / sqrt(D).
        out_dtype: of the output. The log-sum-exp is always fp32.
        threads: None: torch's number. The result does not depend on it.
        offload: who computes. The result does not depend on it.

    Returns:
        A new part; rows that see no token are zero, with -inf.

    Raises:
        ShapeError: shapes, types or strides disagree.

    Cost: reads every page once for up to 32 query rows a KV head, allocates the result.
    """
    whole = Attention(
        q_THD,
        pages_KN,
        layout=layout,
        position=position,
        scale=scale,
        out_dtype=out_dtype,
        threads=threads,
        offload=offload,
    )
    return whole.run(pages_KN.shape[1])


def attend_batch(
    states: tuple[Tensor, Tensor, Tensor],
    rows_B: NDArray[np.void],
    *,
    layout: PageLayout,
    scale: float | None = None,
    offload: Offload = LOCAL,
) -> Tensor:
    """Write the newest token of each of several sequences into its pages, and attend to all of them.

    Args:
        states: queries [B, H, D], keys and values [B, K, D] of one token a sequence, in the pages' type.
        rows_B: BATCH_DTYPE, contiguous: where each sequence's pages lie in this layer.
        layout: of the pages.
        scale: of the scores, above 0; None: 1 / sqrt(D).
        offload: who computes. The result does not depend on it.

    Returns:
        [B, H, D] in the type of the queries, new. Each row has the numbers of `append` and `attend` alone, bit for bit.

    Raises:
        ShapeError: shapes or types disagree.
    """
    q_BHD, k_BKD, v_BKD = states
    count, heads, head_dim = q_BHD.shape
    if k_BKD.shape != v_BKD.shape or k_BKD.shape[0] != count or k_BKD.shape[2] != head_dim or len(rows_B) != count:
        raise ShapeError(f"{tuple(q_BHD.shape)}, {tuple(k_BKD.shape)} and {tuple(v_BKD.shape)} over {len(rows_B)} rows")
    if any(state.dtype != TORCH_DTYPES[layout.dtype] for state in states) or head_dim != layout.head_dim:
        raise ShapeError(f"{head_dim} x {q_BHD.dtype} for pages of {layout.head_dim} x {layout.dtype}")
    assert rows_B.dtype == BATCH_DTYPE and rows_B.flags.c_contiguous
    for state in states:
        _check_tensor(state)
    out_BHD = torch.empty_like(q_BHD)
    call = BatchCall(
        q=q_BHD.data_ptr(),
        k=k_BKD.data_ptr(),
        v=v_BKD.data_ptr(),
        out=out_BHD.data_ptr(),
        rows=rows_B.ctypes.data,
        sequences=count,
        heads=heads,
        kv_heads=k_BKD.shape[1],
        head_dim=head_dim,
        dtype=CODES[q_BHD.dtype],
        encoding=ENCODINGS[layout.encoding],
        scale=head_dim**-0.5 if scale is None else scale,
        threads=torch.get_num_threads(),
    )
    offload.attend_batch(call)
    return out_BHD


def rows_per_step(heads: int, kv_heads: int) -> int:
    """Query tokens after which a long attention can be cut in two: each part, of so many or more, has the numbers that
    the whole has, bit for bit.
    """
    return _native.BLOCK_ROWS // (heads // kv_heads) * STEP_BLOCKS


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
        offload: Offload = LOCAL,
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
        self._page_codes = (CODES[TORCH_DTYPES[layout.dtype]], ENCODINGS[layout.encoding])
        self._position = position
        self._scale = head_dim**-0.5 if scale is None else scale
        self._threads = torch.get_num_threads() if threads is None else threads
        self._offload = offload
        self._part = Part(torch.empty(q_THD.shape, dtype=out_dtype), torch.empty(q_THD.shape[:2], dtype=torch.float32))
        self._state: Tensor | None = None
        self._done = 0

    @property
    def done(self) -> int:
        """Pages that were read: those before this one."""
        return self._done

    def place(self, first: int, slab_address: int, offsets: RunOffsets) -> None:
        """Write the addresses of pages that became readable, the page number `first` and up, into the table."""
        write_addresses(self._pages_KN, first, slab_address, offsets, layout=self._layout)

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
        call = AttendCall(
            q=self._q_THD.data_ptr(),
            out=part.out_THD.data_ptr(),
            lse=part.lse_TH.data_ptr(),
            pages=self._pages_KN.ctypes.data,
            pages_stride=self._pages_KN.strides[0] // PAGE_DTYPE.itemsize,
            q_dtype=CODES[self._q_THD.dtype],
            out_dtype=CODES[part.out_THD.dtype],
            page_dtype=self._page_codes[0],
            encoding=self._page_codes[1],
            tokens=tokens,
            heads=heads,
            kv_heads=kv_heads,
            head_dim=head_dim,
            page_count=pages,
            position=self._position,
            scale=self._scale,
            threads=self._threads,
            page_first=self._done,
            page_last=end,
            state=0 if self._state is None else self._state.data_ptr(),
        )
        self._offload.attend(call)
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
