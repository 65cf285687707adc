"""Builds slabs of codes in plain tensor operations, for tests of what seals and reads them.

Shapes: K KV heads, N tokens, D head dim.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from h3kv.attention.retrieval import INDEXED_DTYPE
from h3kv.core.layout import PageLayout, SlabLayout
from h3kv.core.limits import BLOCK_TOKENS, SEGMENT_BLOCKS_MAX
from h3kv.core.types import DType, Encoding
from h3kv.testing.retrieval_reference import rotate


@dataclass
class Slab:
    layout: SlabLayout
    blocks: int
    bytes: Tensor
    """uint8, aligned to 64 bytes."""

    @property
    def address(self) -> int:
        return self.bytes.data_ptr()

    @property
    def row(self) -> tuple[int, int, int, int, int]:
        """As INDEXED_DTYPE."""
        planes = self.layout.plane_offset(0, 0, blocks=SEGMENT_BLOCKS_MAX)
        summary = self.layout.summary_offset(0, blocks=SEGMENT_BLOCKS_MAX)
        return (self.address, self.address + planes, self.address + summary, self.blocks, 0)


def slab_layout(encoding: Encoding, *, kv_heads: int, head_dim: int, dtype: DType = DType.FP32) -> SlabLayout:
    return SlabLayout(PageLayout(dtype, head_dim, encoding), kv_heads)


def rows_of(slabs: list[Slab]) -> NDArray[np.void]:
    return np.array([slab.row for slab in slabs], dtype=INDEXED_DTYPE)


def topical_keys(kv_heads: int, tokens: int, head_dim: int, generator: torch.Generator) -> Tensor:
    """Keys [K, N, D] that gather around topics, shuffled."""
    topics = max(2, tokens // 24)
    centres = 2 * torch.randn(kv_heads, topics, head_dim, generator=generator)
    topic = torch.randint(topics, (tokens,), generator=generator)
    return centres[:, topic] + torch.randn(kv_heads, tokens, head_dim, generator=generator)


def encode_slab(k_KND: Tensor, v_KND: Tensor, layout: SlabLayout) -> Slab:
    """A slab of whole blocks in natural order, not sealed. Room without a token is full of 0xff."""
    blocks = k_KND.shape[1] // BLOCK_TOKENS
    memory = torch.full((layout.size_bytes(SEGMENT_BLOCKS_MAX) + 64,), 255, dtype=torch.uint8)
    start = -memory.data_ptr() % 64
    slab = Slab(layout, blocks, memory[start : start + layout.size_bytes(SEGMENT_BLOCKS_MAX)])
    for head in range(layout.kv_heads):
        for block in range(blocks):
            tokens = slice(block * BLOCK_TOKENS, (block + 1) * BLOCK_TOKENS)
            _put_page(slab, head, block, rotate(k_KND[head, tokens]), rotate(v_KND[head, tokens]))
    return slab


def _put_page(slab: Slab, head: int, block: int, k_ND: Tensor, v_ND: Tensor) -> None:
    page = slab.layout.page
    key_codes, key_scale, key_offset = _code(k_ND, 255 if page.encoding is Encoding.K8V4 else 15)
    value_codes, value_scale, value_offset = _code(v_ND, 15)
    at = slab.layout.page_offset(block, head, blocks=SEGMENT_BLOCKS_MAX)
    plane = slab.layout.plane_offset(block, head, blocks=SEGMENT_BLOCKS_MAX)
    high = key_codes
    if page.encoding is Encoding.K8V4:
        high = key_codes >> 4
        _put(slab, at, _pack_keys(key_codes & 15))
    _put(slab, plane, _pack_keys(high))
    lanes = value_codes.view(BLOCK_TOKENS // 8, 2, 4, page.head_dim)
    _put(slab, at + page.keys_bytes, (lanes[:, 0] | lanes[:, 1] << 4).transpose(1, 2))
    scales = torch.stack([key_scale, key_offset, value_scale, value_offset])
    _put(slab, plane + page.nibbles_bytes, scales.view(torch.uint8))


def _code(x_ND: Tensor, levels: int) -> tuple[Tensor, Tensor, Tensor]:
    x_ND = x_ND.float()
    low, high = x_ND.amin(dim=1), x_ND.amax(dim=1)
    scale, offset = ((high - low) / levels).half(), low.half()
    codes = ((x_ND - offset[:, None].float()) / scale[:, None].float()).nan_to_num(0.0).round().clamp(0, levels)
    return codes.to(torch.uint8), scale, offset


def _pack_keys(codes_ND: Tensor) -> Tensor:
    lanes = codes_ND.view(4, 16, codes_ND.shape[1] // 8, 2, 4)
    return (lanes[:, :, :, 0] | lanes[:, :, :, 1] << 4).transpose(1, 2)


def _put(slab: Slab, offset: int, content: Tensor) -> None:
    flat = content.reshape(-1)
    slab.bytes[offset : offset + len(flat)] = flat
