"""Room on all tiers for sequences that are no requests of an engine: keys and values of other people's models.

Such a sequence shares nothing with others, its length is not known, and nobody here can compute its tokens again.

Shapes: T tokens of a chunk, Q query tokens (T or fewer), H query heads, K KV heads, D head dim, N pages.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final, Required, TypedDict

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from h3kv.attention.choice import page_kernels
from h3kv.core.errors import (
    ConfigError,
    RequestError,
    SlabCorruptError,
    SlabError,
    SlabUnavailableError,
    TierFullError,
)
from h3kv.core.hashing import Fingerprint
from h3kv.core.layout import CacheLayout
from h3kv.core.limits import BLOCK_TOKENS, LANE_TOKENS, SEGMENT_BLOCKS_MAX, SINK_BLOCKS
from h3kv.core.types import Encoding, StoreStatistics, Tier
from h3kv.core.units import parse_size
from h3kv.engine.clock import MonotonicClock
from h3kv.engine.directory import MemoryDirectory
from h3kv.engine.interrupts import interrupts_deferred
from h3kv.engine.needs import TieringConfig
from h3kv.engine.sequence_kv import SequenceKv
from h3kv.engine.tiers import ColdPlace, TierConfig, TierStores
from h3kv.policy.admission import count_blocks
from h3kv.telemetry.recorder import Recorder
from h3kv.tiers.cold import ColdStoreConfig
from h3kv.tiers.device import DeviceStoreConfig
from h3kv.tiers.host import HostStoreConfig

OUR_NAMES: Final = {
    "device.kv_bytes": "device_bytes",
    "device.window_tokens": "window_tokens",
    "host.kv_bytes": "host_bytes",
    "nvme.capacity": "store_bytes",
    "nvme.store": "store",
}
"""Settings as the engine's messages call them, and as `Caps` does."""


class Caps(TypedDict, total=False):
    """How much may lie where. Sizes are bytes or text such as "4GiB", in total for all rows."""

    device_bytes: Required[int | str]
    """Device tier. Without `host_bytes` it holds everything."""
    host_bytes: int | str | None
    """Main memory for what leaves the window, staging included."""
    store: str | Path | None
    """Folder, file or block device for what main memory does not hold. One cache at a time uses a store."""
    store_bytes: int | str | None
    """Cap of the store. May be left out where the store exists."""
    window_tokens: int
    """Newest tokens of each row that stay on the device, a multiple of 64; 1024 where left out."""


class SequencePool:
    """Owns the tiers of one model's sequences. Not thread-safe.

    Args:
        layout: geometry of the KV.
        device: where the device tier lies.
        caps: of the tiers.

    Raises:
        ConfigError: a cap is out of range or too small; the message has the sum.
        HostMemoryError: the system refuses as much memory.
        StoreError: the store's place cannot serve.
    """

    def __init__(self, layout: CacheLayout, *, device: torch.device, caps: Caps) -> None:
        self.layout = layout
        self.device = device
        tiers = _tier_config(caps)
        if tiers is not None and layout.slab.page.head_dim % LANE_TOKENS:
            raise ConfigError(
                f"head_dim = {layout.slab.page.head_dim}: must be a multiple of {LANE_TOKENS} with host_bytes; leave "
                "host_bytes out and keep everything on the device",
                field="host_bytes",
            )
        device_config = DeviceStoreConfig(capacity_bytes=_size(caps, "device_bytes") or 0, device=str(device))
        telemetry = Recorder()
        with contextlib.ExitStack() as stack, _our_words():
            stores = TierStores.open(
                layout, device_config, tiers, fingerprint=_fingerprint(layout), telemetry=telemetry
            )
            stack.callback(stores.close)
            self._pool = stores.open_pool(
                page_kernels=stack.enter_context(page_kernels(stores.device.arena, layout.slab.page)),
                directory=MemoryDirectory(),
                telemetry=telemetry,
                clock=MonotonicClock(),
            )
            stack.callback(self._pool.close)
            # Also when nobody closes it: the store stays locked otherwise.
            self._close = weakref.finalize(self, stack.pop_all().close)
        self._is_tiered = tiers is not None

    def open_sequence(self) -> SequenceKv:
        """A new sequence without tokens.

        Raises:
            TierFullError: no more sequences fit the device tier.
        """
        with _our_words():
            return self._pool.open_private()

    def close_sequence(self, sequence: SequenceKv) -> None:
        """Give all room of a sequence back."""
        self._pool.close_sequence(sequence, ())

    def prepare(self, sequences: Sequence[SequenceKv], counts: Sequence[int]) -> None:
        """Find room for the next chunk of each sequence, and begin to read what attention will want.

        Args:
            sequences: that take the layers together.
            counts: tokens of their chunks, 0 where there are none.

        Raises:
            TierFullError: a tier is full; no sequence lost anything.
            SlabUnavailableError: a part of a sequence was lost.
        """
        with _our_words(), interrupts_deferred():
            self._pool.tick()
            for sequence in sequences:
                sequence.settle(())
            self._check_room(sequences, counts)
            for sequence, tokens in zip(sequences, counts, strict=True):
                if tokens:
                    sequence.prepare(tokens, reads_ahead=False)
            attending = [sequence for sequence, tokens in zip(sequences, counts, strict=True) if tokens]
            if len(attending) > 1:
                self._pool.read_ahead(attending, repeats=True)

    def attend(
        self, sequence: SequenceKv, layer: int, *, states: tuple[Tensor, Tensor, Tensor], scale: float | None = None
    ) -> Tensor:
        """Append keys and values [T, K, D] of a chunk, then attend causally: [Q, H, D] for the queries, its last ones.

        Args:
            sequence: prepared for the chunk.
            layer: index; each sees the same chunk.
            states: queries, keys, values.
            scale: of the scores; 1 / sqrt(D) where None.

        Raises:
            SlabCorruptError, SlabUnavailableError: a part of the past cannot be read.
        """
        with self._noting_losses():
            return sequence.attend(layer, *states, scale=scale)

    def append(self, sequence: SequenceKv, layer: int, k_TKD: Tensor, v_TKD: Tensor) -> None:
        """Append keys and values of a chunk without attending. As `attend` otherwise."""
        with self._noting_losses():
            sequence.cache.append(layer, k_TKD, v_TKD)

    def pages(self, sequence: SequenceKv, layer: int) -> Iterator[NDArray[np.void]]:
        """Page lists [K, N] of a sequence's past in one layer, in token order. Each stays until the next is asked for.

        Raises:
            RequestError: pages lie where the processor does not reach them.
            SlabCorruptError, SlabUnavailableError: a part of the past cannot be read.
        """
        if self.device.type != "cpu":
            raise RequestError(
                f"scores over a cache on {self.device}: use h3_attention.attend, which needs none of them"
            )
        with self._noting_losses():
            yield from sequence.cache.past_pages(layer)

    def statistics(self) -> dict[Tier, StoreStatistics]:
        """Occupancy of each tier."""
        return self._pool.statistics()

    def evict_cold(self) -> int:
        """Give up room in main memory that segments take which the store has, or takes now. Returns the bytes."""
        if not self._is_tiered:
            return 0
        before = self.statistics()[Tier.HOST].used_bytes
        while self._pool.placer.make_room(self._pool.segments.free_blocks() + 1, waits=True):
            pass
        return max(0, before - self.statistics()[Tier.HOST].used_bytes)

    def check_integrity(self) -> None:
        """Assert that all room belongs to open sequences or to segments."""
        self._pool.check_integrity()

    def close(self) -> None:
        """Give everything back. Sequences are closed before. Calling it again does nothing."""
        self._close()

    def _check_room(self, sequences: Sequence[SequenceKv], counts: Sequence[int]) -> None:
        """Refuse a step before the first sequence takes room that the last one does not find."""
        needed = 0
        for sequence, tokens in zip(sequences, counts, strict=True):
            placed = sequence.cache.placed_blocks
            blocks = max(count_blocks(sequence.tokens + tokens) - placed, 0)
            if blocks and not self._is_tiered:
                # Segments come whole: the sinks first, then the largest.
                sinks = SINK_BLOCKS if placed == 0 else 0
                blocks = sinks - (sinks - blocks) // SEGMENT_BLOCKS_MAX * SEGMENT_BLOCKS_MAX
            needed += blocks
        free_bytes = self.statistics()[Tier.DEVICE].free_bytes
        needed_bytes = needed * self.layout.block_bytes
        if needed_bytes > free_bytes:
            raise TierFullError(
                f"{needed} blocks of {BLOCK_TOKENS} tokens are needed on the device, {needed_bytes} bytes; free are "
                f"{free_bytes}",
                tier=Tier.DEVICE,
                needed_bytes=needed_bytes,
                free_bytes=free_bytes,
            )

    @contextlib.contextmanager
    def _noting_losses(self) -> Iterator[None]:
        try:
            yield
        except SlabError as error:
            self._pool.lose(error.key)
            kind = SlabCorruptError if isinstance(error, SlabCorruptError) else SlabUnavailableError
            message = (
                f"slab {error.key} of the past cannot be read any more: reset() the cache and run its tokens again"
            )
            raise kind(message, key=error.key) from error


def _tier_config(caps: Caps) -> TierConfig | None:
    host_bytes, store_bytes, store = _size(caps, "host_bytes"), _size(caps, "store_bytes"), caps.get("store")
    window_tokens = caps.get("window_tokens", 1024)
    if window_tokens < BLOCK_TOKENS or window_tokens % BLOCK_TOKENS:
        raise ConfigError(
            f"window_tokens = {window_tokens}: must be a multiple of {BLOCK_TOKENS}", field="window_tokens"
        )
    if store is None and store_bytes is not None:
        raise ConfigError("store_bytes without a place: name the store too", field="store")
    if host_bytes is None:
        if store is not None:
            raise ConfigError("a store without main memory before it: give host_bytes too", field="host_bytes")
        return None
    cold = None if store is None else ColdPlace(Path(store), ColdStoreConfig(capacity_bytes=store_bytes))
    # All rows take a chunk at the same time: how long it may be shows then, so that the plan keeps room for the least.
    tiering = TieringConfig(window_tokens=window_tokens, chunk_tokens=BLOCK_TOKENS)
    return TierConfig(HostStoreConfig(capacity_bytes=host_bytes), tiering, cold)


def _size(caps: Caps, field: str) -> int | None:
    """Bytes of a cap, None where it is left out."""
    value: int | str | None = caps.get(field)  # type: ignore[assignment]  # the callers name sizes only
    if value is None:
        return None
    try:
        return parse_size(value)
    except ValueError as error:
        raise ConfigError(f"{field} = {value!r}: {error}", field=field) from error


def _fingerprint(layout: CacheLayout) -> bytes:
    """Of the store's area: nothing in it is ever found again, so that one for each element type is enough."""
    return Fingerprint(
        weights="none: private sequences",
        dtype=layout.slab.page.dtype,
        rope="",
        tokenizer="",
        encoding=Encoding.RAW,
        fidelity="exact",
    ).digest()


@contextlib.contextmanager
def _our_words() -> Iterator[None]:
    """Errors name the settings as `Caps` does."""
    try:
        yield
    except ConfigError as error:
        raise ConfigError(_renamed(str(error)), field=_renamed(error.field)) from error
    except TierFullError as error:
        raise TierFullError(
            _renamed(str(error)), tier=error.tier, needed_bytes=error.needed_bytes, free_bytes=error.free_bytes
        ) from error


def _renamed(text: str) -> str:
    for theirs, ours in OUR_NAMES.items():
        text = text.replace(theirs, ours)
    return text
