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

The other encodings keep unsigned codes of rotated numbers (`attention.codes`), number = scale * code + offset, with a
scale and an offset in fp16 for each token's keys and values. Their orders feed 16 lanes of int32 sums with four
products each (`vpdpbusd`). A nibble is a half of a byte; D = head_dim:

    page    int8   keys [4][D / 4][16 tokens][4 dims] bytes,    values [16][D / 16][16 dims][4 tokens] bytes
            k8v4   low nibbles of keys [4][D / 8][16][8] nibbles,  values [8][D / 16][16 dims][8 tokens] nibbles
            int4   values as in k8v4 alone
    plane   int8   scales
            k8v4   high nibbles of keys [4][D / 8][16 tokens][8 dims] nibbles, scales, places
            int4   keys, the same way, scales, places
    scales  fp16 [4][64 tokens]: scale of keys, offset of keys, scale of values, offset of values
    places  u16 [64 tokens]: which token of its segment each one is
    residues k8v4  of values [64 tokens][D / 16][16 dims] nibbles: what codes leave out, in sixteenths of a step

Of eight nibbles in a 32-bit lane, byte b holds number b in its low half and number 4 + b in its high half. A cluster is
16 consecutive tokens of a page. The first index of keys counts clusters, that of values groups of 4 or 8 tokens: so a
cluster's keys follow each other, and so do its values. Of 16 nibbles of a residue, byte b holds number b low and number
8 + b high. Residues are read for the few tokens that weigh much: 4 bits of a value are enough where many add up.

Tokens past a page's count are never used as numbers, but may be loaded: a page's memory is always whole.

A raw slab is `[kv_head][block]` of pages, so that one head's pages follow each other. The slab of another encoding has
an index behind its pages:

    0                       index_offset                                             residue_offset
    +-----------------------+------------------------+---------------------+---------+--------------------+---------+
    | pages                 | planes                 | summaries           | padding | residues           | padding |
    | [kv_head][block]      | [kv_head][block]       | [kv_head]           |         | [kv_head][block]   |         |
    +-----------------------+------------------------+---------------------+---------+--------------------+---------+

A summary is an int8 page of 64 tokens with its scales behind it: its keys are the mean keys of the slab's clusters and
its values their mean values, in the clusters' order. Only slabs of 16 blocks in a clustered encoding have summaries.

A slab in room for 16 blocks keeps that stride however many blocks are in use.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from h3kv.core.limits import BLOCK_TOKENS, DIRECT_IO_BYTES, SEGMENT_BLOCKS_MAX
from h3kv.core.types import DType, Encoding

LAYOUT_VERSION: Final = 1
"""Number of the orders drawn above. Another order of the bytes is another number: pages are kept by it."""

SCALES_BYTES: Final = 4 * 2 * BLOCK_TOKENS
"""Four fp16 numbers for each token of a page."""

PLACES_BYTES: Final = 2 * BLOCK_TOKENS


def _whole(size: int) -> int:
    """Up to a multiple of 4 KiB."""
    return -(-size // DIRECT_IO_BYTES) * DIRECT_IO_BYTES


@dataclass(frozen=True, slots=True)
class PageLayout:
    """Geometry of one page and of what the slab's index holds for it."""

    dtype: DType
    """Of keys and values outside the cache, and inside `raw` pages."""
    head_dim: int
    encoding: Encoding = Encoding.RAW

    @property
    def is_raw(self) -> bool:
        """Whether pages hold plain numbers and there is no index."""
        return self.encoding is Encoding.RAW

    @property
    def pack(self) -> int:
        """Neighbouring elements of a raw page that share one 32-bit lane."""
        return 2 if self.dtype is DType.BF16 else 1

    @property
    def keys_bytes(self) -> int:
        """Bytes of the keys in a page; the values begin at this offset."""
        bits = {Encoding.RAW: 8 * self.dtype.size_bytes, Encoding.INT8: 8, Encoding.K8V4: 4, Encoding.INT4: 0}
        return BLOCK_TOKENS * self.head_dim * bits[self.encoding] // 8

    @property
    def values_bytes(self) -> int:
        """Bytes of the values in a page."""
        bits = {Encoding.RAW: 8 * self.dtype.size_bytes, Encoding.INT8: 8, Encoding.K8V4: 4, Encoding.INT4: 4}
        return BLOCK_TOKENS * self.head_dim * bits[self.encoding] // 8

    @property
    def size_bytes(self) -> int:
        """Bytes from one page to the next: a multiple of 4 KiB, or for small pages of codes a power of two below."""
        size = self.keys_bytes + self.values_bytes
        if self.is_raw or size >= DIRECT_IO_BYTES:
            return _whole(size)
        return 1 << (size - 1).bit_length()

    @property
    def nibbles_bytes(self) -> int:
        """Bytes of the plane of nibbles that a page has in the index; its scales begin at this offset."""
        return BLOCK_TOKENS * self.head_dim // 2 if self.encoding.is_clustered else 0

    @property
    def plane_bytes(self) -> int:
        """Bytes of the index for one page: nibbles, scales, places."""
        if self.is_raw:
            return 0
        return self.nibbles_bytes + SCALES_BYTES + (PLACES_BYTES if self.encoding.is_clustered else 0)

    @property
    def residues_bytes(self) -> int:
        """Bytes of one page's residues of values."""
        return BLOCK_TOKENS * self.head_dim // 2 if self.encoding is Encoding.K8V4 else 0

    @property
    def summary_bytes(self) -> int:
        """Bytes of one KV head's summary in a slab of 16 blocks."""
        return 2 * BLOCK_TOKENS * self.head_dim + SCALES_BYTES if self.encoding.is_clustered else 0


@dataclass(frozen=True, slots=True)
class SlabLayout:
    """Geometry of one slab: pages `[kv_head][block]`, then the index."""

    page: PageLayout
    kv_heads: int

    @property
    def block_bytes(self) -> int:
        """Bytes of one block of one layer, with its share of the index: a multiple of 4 KiB."""
        page = self.page
        if page.is_raw:
            return self.kv_heads * page.size_bytes
        share = page.summary_bytes // SEGMENT_BLOCKS_MAX
        return _whole(self.kv_heads * (page.size_bytes + page.plane_bytes + share + page.residues_bytes))

    @property
    def check_bytes(self) -> int:
        """The unit that has a checksum of its own in the cold store. A slab is a whole number of them."""
        return self.page.size_bytes if self.page.is_raw else DIRECT_IO_BYTES

    def page_offset(self, block: int, kv_head: int, *, blocks: int) -> int:
        """Offset of a page from the start of a slab with room for `blocks` blocks, in bytes."""
        return (kv_head * blocks + block) * self.page.size_bytes

    def plane_offset(self, block: int, kv_head: int, *, blocks: int) -> int:
        """The same of the plane that belongs to a page."""
        return self.index_offset(blocks) + (kv_head * blocks + block) * self.page.plane_bytes

    def summary_offset(self, kv_head: int, *, blocks: int) -> int:
        """The same of a KV head's summary."""
        planes = self.kv_heads * blocks * self.page.plane_bytes
        return self.index_offset(blocks) + planes + kv_head * self.page.summary_bytes

    def residue_offset(self, block: int, kv_head: int, *, blocks: int) -> int:
        """The same of a page's residues. In a slab with summaries they begin at a checked unit."""
        return self._index_end(blocks) + (kv_head * blocks + block) * self.page.residues_bytes

    def index_offset(self, blocks: int) -> int:
        """Offset of the index: what lies before it are pages."""
        return self.kv_heads * blocks * self.page.size_bytes

    def index_bytes(self, blocks: int) -> int:
        """Bytes of the index: whole checked units in a slab of 16 blocks, where it begins and ends with one."""
        return self._index_end(blocks) - self.index_offset(blocks)

    def content_bytes(self, blocks: int) -> int:
        """Bytes of a slab with room for so many blocks, without the padding at its end: whole checked units."""
        end = self.residue_offset(0, self.kv_heads, blocks=blocks)
        return -(-end // self.check_bytes) * self.check_bytes

    def size_bytes(self, blocks: int) -> int:
        """Bytes of a slab of so many blocks."""
        return blocks * self.block_bytes

    def _index_end(self, blocks: int) -> int:
        if blocks < SEGMENT_BLOCKS_MAX:
            return self.summary_offset(0, blocks=blocks)
        return -(-self.summary_offset(self.kv_heads, blocks=blocks) // self.check_bytes) * self.check_bytes


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
        """KV bytes of one token over all layers before it is encoded.

        2 (K, V) x layers x kv_heads x head_dim x bytes: 131,072 for Llama-3.1-8B, 23,040 for SmolLM2-135M in bf16.
        """
        page = self.slab.page
        return 2 * self.layers * self.slab.kv_heads * page.head_dim * page.dtype.size_bytes
