"""Sequences that begin alike and are read in different ways, over one node for each encoding.

    tokens    0 ........ prefix | rest    | scored, or question
    lane A    mounted           | exact   | exact
    lane B    mounted           | exact   | retrieval, budget 128

A prefix ends where a full segment does, so that it is sealed, clustered and indexed as a whole, and every lane mounts
the same bytes. What follows is computed by each lane for itself, in the same cuts. Which tokens are in the window is a
matter of their positions, not of who computed them.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final, Literal

import torch
from torch import Tensor

from h3kv.attention.native import DTYPES
from h3kv.bench.scoring import decoder_of
from h3kv.core.hashing import extend_keys, root_key
from h3kv.core.limits import BLOCK_TOKENS, SEGMENT_BLOCKS_MAX, SEGMENT_TOKENS_MAX, SINK_BLOCKS
from h3kv.core.retrieval import RetrievalSetting
from h3kv.core.types import Encoding
from h3kv.engine.needs import KvNeed, TieringConfig
from h3kv.engine.pool import KvPool
from h3kv.engine.sequence_kv import SequenceKv
from h3kv.engine.tiers import TierConfig
from h3kv.models.decoder import Decoder
from h3kv.models.loader import LoadedModel
from h3kv.node import Node, cache_layout
from h3kv.policy.admission import count_blocks
from h3kv.quality.reading import SINK_TOKENS, Reading, read_by_chunk, snapshot
from h3kv.quality.variants import Variant
from h3kv.tiers.device import DeviceStoreConfig
from h3kv.tiers.host import HostStoreConfig

SCORED_CHUNK: Final = 64
"""Rows of a chunk that is read by retrieval, each for itself as in a decode step."""

LANES_MAX: Final = 8
"""Lanes of one node at a time, each with a window on the device."""

ROOT: Final = root_key(b"quality", b"")
"""Pools of one run are their own; their keys meet no others."""


@dataclass(frozen=True, slots=True)
class LaneCaps:
    """Sizes that all nodes of a run share."""

    window_tokens: int
    """Newest tokens that are always read exactly: a multiple of 64."""
    chunk_tokens: int
    """Prompt tokens read at a time."""
    context_tokens: int
    """Longest sequence."""


def whole_segments(tokens: int) -> int:
    """Tokens of the longest prefix of so many that ends where a full segment does; 0 if that is less than one."""
    segments = (tokens - SINK_TOKENS) // SEGMENT_TOKENS_MAX
    return SINK_TOKENS + segments * SEGMENT_TOKENS_MAX if segments > 0 else 0


class Lane:
    """One sequence of a node, read in chunks.

    Args:
        decoder: of the model.
        pool: of the node.
        kv: of the sequence; `close` gives it back.
        tokens: that it holds already.
        window_tokens: newest ones that no reading counts.
    """

    def __init__(
        self, decoder: Decoder, pool: KvPool, kv: SequenceKv, tokens: Sequence[int], *, window_tokens: int
    ) -> None:
        self.kv = kv
        self.reading = Reading()
        """Of the chunks since `use`."""
        self._decoder = decoder
        self._pool = pool
        self._tokens = list(tokens)
        self._window_tokens = window_tokens

    @property
    def tokens(self) -> int:
        """Tokens read so far."""
        return self.kv.tokens

    def read(self, tokens: Sequence[int], *, logits: Literal["all", "none"]) -> Tensor:
        """Read one chunk behind what was read. Returns fp32 [T, V] for `all`, else [0, V]."""
        self._pool.tick()
        self.kv.prepare(len(tokens))
        before = snapshot(self.kv.cache.meter)
        logits_TV = self._decoder.forward(torch.tensor(tokens), self.kv, logits=logits)
        self.reading += read_by_chunk(
            self._pool.layout,
            before,
            self.kv.cache.meter,
            rows=len(tokens),
            tokens=self.kv.tokens,
            window_tokens=self._window_tokens,
        )
        self._tokens += tokens
        self.kv.settle(self._tokens)
        return logits_TV

    def use(self, setting: RetrievalSetting | None) -> None:
        """How the chunks from the next one on are read: each token as one of an answer is."""
        self.kv.retrieval = setting
        self.kv.cache.are_rows_apart = not self._pool.layout.slab.page.is_raw
        self.reading = Reading()

    def close(self) -> None:
        """Give its room back. What it read behind the prefix is not shared: it may have been read by retrieval."""
        self._pool.close_sequence(self.kv, ())


class Bank:
    """The node of one encoding. Owns nothing but the node, which its caller closes."""

    def __init__(self, node: Node, decoder: Decoder, caps: LaneCaps) -> None:
        self.node = node
        self._decoder = decoder
        self._caps = caps

    def seal_prefix(self, tokens: Sequence[int]) -> None:
        """Read a prefix exactly, unless it is known, and leave it to the lanes.

        Args:
            tokens: of whole segments.
        """
        assert len(tokens) == whole_segments(len(tokens))
        lane = self._open(tokens, len(tokens))
        try:
            self._read_up_to(lane, tokens)
        except BaseException:
            lane.close()
            raise
        self.node.pool.close_sequence(lane.kv, tokens)

    @contextlib.contextmanager
    def lane(self, tokens: Sequence[int], *, prefix: int, room: int) -> Iterator[Lane]:
        """A sequence that has read these tokens exactly.

        Args:
            tokens: its first ones.
            prefix: how many of them are mounted; whole segments that were sealed before.
            room: tokens that follow them at most.
        """
        lane = self._open(tokens, prefix, room=room)
        try:
            self._read_up_to(lane, tokens)
            yield lane
        finally:
            lane.close()

    def forget(self) -> None:
        """Drop all prefixes."""
        self.node.engine.evict_cached()

    def _open(self, tokens: Sequence[int], prefix: int, *, room: int = 0) -> Lane:
        blocks = count_blocks(len(tokens) + room)
        need = KvNeed(
            keys=[ROOT, *extend_keys(ROOT, tokens[:prefix])],
            reusable_blocks=prefix // BLOCK_TOKENS,
            # Whatever follows is filled, so its segments are as large as a prompt's.
            prompt_blocks=blocks,
            blocks=blocks,
            reserved_blocks=blocks,
        )
        kv = self.node.pool.open_sequence(need, is_alone=False)
        window_tokens = self._caps.window_tokens
        return Lane(self._decoder, self.node.pool, kv, tokens[: kv.tokens], window_tokens=window_tokens)

    def _read_up_to(self, lane: Lane, tokens: Sequence[int]) -> None:
        chunk = self._caps.chunk_tokens
        while lane.tokens < len(tokens):
            # Cuts lie at multiples of a chunk behind the sinks: the same ones whatever was mounted.
            end = min(lane.tokens + chunk - (lane.tokens - SINK_TOKENS) % chunk, len(tokens))
            lane.read(tokens[lane.tokens : end], logits="none")


@contextlib.contextmanager
def open_banks(model: LoadedModel, variants: Sequence[Variant], caps: LaneCaps) -> Iterator[dict[Encoding, Bank]]:
    """One node for each encoding of these variants, over one copy of the weights."""
    decoder = decoder_of(model)
    with contextlib.ExitStack() as stack:
        banks = {}
        for encoding in dict.fromkeys(variant.encoding for variant in variants):
            lanes = sum(variant.encoding is encoding for variant in variants)
            node = stack.enter_context(_open_node(model, encoding, caps, lanes=lanes))
            banks[encoding] = Bank(node, decoder, caps)
        yield banks


def _open_node(model: LoadedModel, encoding: Encoding, caps: LaneCaps, *, lanes: int) -> Node:
    """HOST holds the prefixes of one context, and what every lane writes behind its own."""
    layout = cache_layout(model.config, DTYPES[model.weights.embedding_VI.dtype], encoding)
    segment_bytes = SEGMENT_BLOCKS_MAX * layout.block_bytes
    segments = count_blocks(caps.context_tokens) // SEGMENT_BLOCKS_MAX + 2
    window_bytes = (caps.window_tokens // BLOCK_TOKENS + 2 + SINK_BLOCKS) * layout.block_bytes
    chunk_bytes = count_blocks(caps.chunk_tokens) * layout.block_bytes
    return Node.open(
        model,
        store=DeviceStoreConfig(LANES_MAX * (window_bytes + chunk_bytes)),
        tiers=TierConfig(
            HostStoreConfig((segments * (lanes + 2)) * segment_bytes),
            TieringConfig(window_tokens=caps.window_tokens, chunk_tokens=caps.chunk_tokens),
        ),
        encoding=encoding,
    )
