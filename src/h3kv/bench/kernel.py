"""Decode attention over 16K tokens, cycling over 1 GiB of pages: share of the read bandwidth, and torch's sdpa.

Shapes: T query tokens (one), H query heads, K KV heads, G query heads per KV head, S tokens, D head dim, N pages.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from h3kv.attention import native
from h3kv.attention.native import PAGE_DTYPE, TORCH_DTYPES, RunOffsets
from h3kv.bench.limit import GIB, ReadLimit, huge_buffer
from h3kv.bench.measure import Progress, Rounds, seconds_of
from h3kv.bench.results import Results
from h3kv.core.layout import SCALES_BYTES, PageLayout, SlabLayout
from h3kv.core.limits import BLOCK_TOKENS, SEGMENT_BLOCKS_MAX
from h3kv.core.types import DType, Encoding

TOKENS: Final = 16_384
BLOCKS: Final = TOKENS // BLOCK_TOKENS


@dataclass(frozen=True, slots=True)
class Geometry:
    """Heads of one model."""

    heads: int
    kv_heads: int
    head_dim: int

    @property
    def label(self) -> str:
        """As in metric names."""
        return f"{self.heads}_{self.kv_heads}_{self.head_dim}"


GEOMETRIES: Final = (Geometry(9, 3, 64), Geometry(32, 8, 128))
DTYPES: Final = (DType.BF16, DType.FP32)
CODES: Final = (Encoding.INT8, Encoding.K8V4, Encoding.INT4)
"""Measured with the queries of a model in bf16."""


def run(results: Results, *, repetitions: int, progress: Progress, cycle_bytes: int = GIB) -> None:
    """Measure every type, encoding and geometry.

    Args:
        results: receives `attend.*`.
        repetitions: of every contestant.
        progress: told what is being measured.
        cycle_bytes: slabs that one repetition reads; a smaller number than the default measures the cache. Twice as
            much memory is needed.
    """
    pages = huge_buffer(cycle_bytes)
    plain = huge_buffer(cycle_bytes)
    limit = ReadLimit(pages)
    for dtype in DTYPES:
        for geometry in GEOMETRIES:
            progress(f"attend {dtype} {geometry.label}: {repetitions} repetitions")
            _measure(results, dtype, geometry, pages=pages, plain=plain, limit=limit, repetitions=repetitions)
    for encoding in CODES:
        for geometry in GEOMETRIES:
            progress(f"attend {encoding} {geometry.label}: {repetitions} repetitions")
            layout = SlabLayout(PageLayout(DType.BF16, geometry.head_dim, encoding), geometry.kv_heads)
            _measure_codes(results, geometry, layout, pages=pages, limit=limit, repetitions=repetitions)


def _measure(
    results: Results,
    dtype: DType,
    geometry: Geometry,
    *,
    pages: Tensor,
    plain: Tensor,
    limit: ReadLimit,
    repetitions: int,
) -> None:
    layout = SlabLayout(PageLayout(dtype, geometry.head_dim), geometry.kv_heads)
    _fill(pages, TORCH_DTYPES[dtype])
    _fill(plain, TORCH_DTYPES[dtype])
    tables = _tables(pages, layout)
    kv_bytes = 2 * layout.kv_heads * TOKENS * layout.page.head_dim * dtype.size_bytes
    q_THD = torch.randn(1, geometry.heads, geometry.head_dim).to(TORCH_DTYPES[dtype])
    sequences = _sequences(plain, geometry, TORCH_DTYPES[dtype])

    def attend() -> float:
        work = seconds_of(lambda: [native.attend(q_THD, t, layout=layout.page, position=TOKENS) for t in tables])
        return len(tables) * kv_bytes / work

    def sdpa() -> float:
        work = seconds_of(lambda: [_sdpa(q_THD, k_KSD, v_KSD) for k_KSD, v_KSD in sequences])
        return len(sequences) * kv_bytes / work

    contestants = {"limit": limit.bytes_per_second, "attend": attend, "sdpa": sdpa}
    attend()
    rounds = Rounds.run(contestants, repetitions=repetitions)
    name = f"attend.{dtype}.{geometry.label}"
    results.put(f"{name}.gb_per_s", rounds.median("attend") / 1e9)
    results.put(f"{name}.read_limit_gb_per_s", rounds.median("limit") / 1e9)
    results.put(f"{name}.bandwidth_fraction", rounds.ratio("attend", "limit"))
    results.put(f"{name}.vs_sdpa", rounds.ratio("attend", "sdpa"))


def _measure_codes(
    results: Results, geometry: Geometry, layout: SlabLayout, *, pages: Tensor, limit: ReadLimit, repetitions: int
) -> None:
    tables = _tables(pages, layout)
    _fill_codes(tables, layout)
    page = layout.page
    read_bytes = page.keys_bytes + page.values_bytes + page.nibbles_bytes + SCALES_BYTES
    table_bytes = layout.kv_heads * BLOCKS * read_bytes
    q_THD = torch.randn(1, geometry.heads, geometry.head_dim).bfloat16()

    def attend() -> float:
        work = seconds_of(lambda: [native.attend(q_THD, t, layout=page, position=TOKENS) for t in tables])
        return len(tables) * table_bytes / work

    attend()
    rounds = Rounds.run({"limit": limit.bytes_per_second, "attend": attend}, repetitions=repetitions)
    name = f"attend.{page.encoding}.{geometry.label}"
    results.put(f"{name}.gb_per_s", rounds.median("attend") / 1e9)
    results.put(f"{name}.read_limit_gb_per_s", rounds.median("limit") / 1e9)
    results.put(f"{name}.bandwidth_fraction", rounds.ratio("attend", "limit"))


def _fill(buffer: Tensor, dtype: torch.dtype) -> None:
    """Normal numbers everywhere; 16 MiB of them, repeated."""
    sample = torch.randn((16 << 20) // dtype.itemsize).to(dtype).view(torch.uint8)
    buffer.view(-1, sample.numel()).copy_(sample.expand(buffer.numel() // sample.numel(), -1))


def _fill_codes(tables: list[NDArray[Any]], layout: SlabLayout) -> None:
    """Normal numbers, coded; the same tokens in every sequence."""
    k_TKD, v_TKD = (torch.randn(TOKENS, layout.kv_heads, layout.page.head_dim).bfloat16() for _ in range(2))
    for table_KN in tables:
        native.append(k_TKD, v_TKD, table_KN, layout=layout.page, index=0)


def _tables(pages: Tensor, layout: SlabLayout) -> list[NDArray[Any]]:
    """Page tables of as many sequences as fit the buffer, slab after slab as a store lays them."""
    slab_bytes = layout.size_bytes(SEGMENT_BLOCKS_MAX)
    slabs = BLOCKS // SEGMENT_BLOCKS_MAX
    offsets = RunOffsets.of(layout, range(SEGMENT_BLOCKS_MAX), room_blocks=SEGMENT_BLOCKS_MAX)
    tables = []
    for sequence in range(pages.numel() // (slabs * slab_bytes)):
        table_KN = np.zeros((layout.kv_heads, BLOCKS), dtype=PAGE_DTYPE)
        for slab in range(slabs):
            address = pages.data_ptr() + (sequence * slabs + slab) * slab_bytes
            native.write_addresses(table_KN, slab * SEGMENT_BLOCKS_MAX, address, offsets, layout=layout.page)
        table_KN["first"] = np.arange(BLOCKS) * BLOCK_TOKENS
        table_KN["count"] = BLOCK_TOKENS
        tables.append(table_KN)
    return tables


def _sequences(plain: Tensor, geometry: Geometry, dtype: torch.dtype) -> list[tuple[Tensor, Tensor]]:
    shape = (geometry.kv_heads, TOKENS, geometry.head_dim)
    each = geometry.kv_heads * TOKENS * geometry.head_dim
    whole = plain.view(dtype)
    count = whole.numel() // (2 * each)
    tensors = [whole[i * each : (i + 1) * each].view(shape) for i in range(2 * count)]
    return list(zip(tensors[::2], tensors[1::2], strict=True))


def _sdpa(q_THD: Tensor, k_KSD: Tensor, v_KSD: Tensor) -> Tensor:
    """The fastest way that sdpa has for one token: a KV head's query group as so many query rows."""
    q_KGD = q_THD.view(k_KSD.shape[0], -1, q_THD.shape[-1])
    return torch.nn.functional.scaled_dot_product_attention(q_KGD[None], k_KSD[None], v_KSD[None])
