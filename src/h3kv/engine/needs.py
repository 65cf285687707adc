"""What sequences need of a pool, and how a pool lays itself out for them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from h3kv.core.types import BlockKey
from h3kv.policy.admission import plan_rooms


@dataclass(frozen=True, slots=True)
class KvNeed:
    """What a sequence needs to start."""

    keys: list[BlockKey]
    """The root key, then those of the prompt's whole blocks."""
    reusable_blocks: int
    """Blocks of the prompt that may be taken from others."""
    prompt_blocks: int
    """Blocks that the prompt fills."""
    blocks: int
    """Blocks of the whole sequence at its longest."""
    reserved_blocks: int
    """Of these, those that it is sure of when it starts: for more it asks as it grows."""
    retrieves: bool = False
    """Whether it decodes under retrieval, so that its indexes stay in memory."""

    @property
    def lookup_keys(self) -> list[BlockKey]:
        """The root key, then those of the blocks that may be taken from others."""
        return self.keys[: self.reusable_blocks + 1]

    def rooms(self, first_block: int) -> Iterator[int]:
        """Sizes of the segments for the blocks from this one on."""
        return iter(plan_rooms(first_block, self.prompt_blocks, self.blocks))


@dataclass(frozen=True, slots=True)
class TieringConfig:
    """How HOST and the device share the work."""

    window_tokens: int = 1024
    """Newest tokens of a sequence that stay on the device: a multiple of 64."""
    staging_bytes: int = 32 << 20
    """Part of the HOST cap that slabs are read into on their way from NVMe; no more than a third of it, but for four
    slabs of full segments. Enough to keep the disk busy while a layer is computed."""
    index_bytes: int | None = None
    """Cap on indexes of segments whose slabs lie in the cold store alone. None: one for each sequence that may run."""
    page_cache_bytes: int = 0
    """Part of the HOST cap that keeps single pages of the cold store for retrieval; 0: none, where nobody retrieves."""
    reads_pages_ahead: bool = True
    """Whether pages are read into it before they are asked for."""
    recomputes: bool = False
    """Whether what lies in the cold store alone is computed again where that is measured to be faster."""
    chunk_tokens: int = 1024
    """Chunk that a sequence begins with: what the device plan leaves room for."""
