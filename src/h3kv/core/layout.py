"""Where each key and value lies inside a page, and each page inside a slab.

A raw page holds 64 tokens of one layer and one KV head:

    offset 0                            keys_bytes                         2 keys_bytes  size_bytes
    +-----------------------------------+----------------------------------+-------------+
    | keys, transposed                  | values, tokens in packs          | padding     |
    | [head_dim / P][64 tokens][P]      | [panel][64 tokens / P][width][P] |             |
    +-----------------------------------+----------------------------------+-------------+

P = pack: 2 for bf16, else 1. A panel is 64 dimensions wide, the last one what is left of the head.

Both orders let one 64-byte vector feed 16 lanes of fp32 sums with no sum across lanes: a vector of keys holds P
dimensions of 16 tokens, a vector of values holds 16 dimensions of P tokens. bf16 comes in packs of two because the
dot-product instruction (`vdpbf16ps`) adds two products per lane. A kernel that keeps four vectors of sums at a time
reads keys, then values, then the next page of the same head in a straight line, which the processor's prefetch follows:
that is worth more than any other choice here (docs/adr/0001).

Tokens past a page's count are never used as numbers, but may be loaded: a page's memory is always whole.

A slab is `[kv_head][block]` of pages, so that one head's pages follow each other. A slab in room for 16 blocks keeps
that stride however many blocks are in use.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from h3kv.core.limits import BLOCK_TOKENS, DIRECT_IO_BYTES
from h3kv.core.types import DType, Encoding

LAYOUT_VERSION: Final = 1
"""Number of the order drawn above. Another order of the bytes is another number: pages are kept by it."""


@dataclass(frozen=True, slots=True)
class PageLayout:
    """Geometry of one page."""

    dtype: DType
    head_dim: int
    encoding: Encoding = Encoding.RAW

    @property
    def pack(self) -> int:
        """Neighbouring elements that share one 32-bit lane."""
        return 2 if self.dtype is DType.BF16 else 1

    @property
    def keys_bytes(self) -> int:
        """Bytes of the keys; the values begin at this offset."""
        return BLOCK_TOKENS * self.head_dim * self.dtype.size_bytes

    @property
    def size_bytes(self) -> int:
        """Bytes from one page to the next: a multiple of 4 KiB."""
        return -(-2 * self.keys_bytes // DIRECT_IO_BYTES) * DIRECT_IO_BYTES


@dataclass(frozen=True, slots=True)
class SlabLayout:
    """Geometry of one slab: `[kv_head][block]` of pages."""

    page: PageLayout
    kv_heads: int

    @property
    def block_bytes(self) -> int:
        """Bytes of one block of one layer."""
        return self.kv_heads * self.page.size_bytes

    def page_offset(self, block: int, kv_head: int, *, blocks: int) -> int:
        """Offset of a page from the start of a slab with room for `blocks` blocks, in bytes."""
        return (kv_head * blocks + block) * self.page.size_bytes

    def size_bytes(self, blocks: int) -> int:
        """Bytes of a slab of so many blocks."""
        return blocks * self.block_bytes


@dataclass(frozen=True, slots=True)
class CacheLayout:
    """Geometry of a model's whole KV cache."""

    slab: SlabLayout
    layers: int

    @property
    def block_bytes(self) -> int:
        """Bytes of one block over all layers."""
        return self.layers * self.slab.block_bytes

    @property
    def token_bytes(self) -> int:
        """KV bytes of one token over all layers, padding excluded.

        2 (K, V) x layers x kv_heads x head_dim x bytes: 131,072 for Llama-3.1-8B, 23,040 for SmolLM2-135M in bf16.
        """
        page = self.slab.page
        return 2 * self.layers * self.slab.kv_heads * page.head_dim * page.dtype.size_bytes
