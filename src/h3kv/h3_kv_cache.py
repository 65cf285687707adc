"""The KV cache for attention code of your own: make one here, use it through `h3kv.h3_attention`.

cache = h3_kv_cache.create(layers=32, kv_heads=8, head_dim=128, dtype=torch.bfloat16, device_bytes="2GiB")
out = h3_attention.attend(q, k, v, cache.layer(index))

One sequence of KV per row of the batch. A step takes the layers in order, each once: the first finds room for the
step's tokens, the last makes them part of the past.

Shapes: B rows of the batch, T tokens of a step, H query heads, K KV heads, D head dim.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Final, Unpack

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from h3kv.attention import native
from h3kv.core.errors import ConfigError, RequestError, TierClosedError, TierFullError
from h3kv.core.layout import CacheLayout, PageLayout, SlabLayout
from h3kv.core.limits import HEAD_DIM_MAX
from h3kv.core.types import StoreStatistics, Tier
from h3kv.engine.sequence_kv import SequenceKv
from h3kv.sequence_pool import Caps, SequencePool

_OPEN: Final[weakref.WeakSet[KvCache]] = weakref.WeakSet()

CAP_OF: Final = {Tier.DEVICE: "device_bytes", Tier.HOST: "host_bytes", Tier.NVME: "store_bytes"}
"""The cap of each tier, as `create` calls it."""


def force_evict_cold() -> int:
    """The same for every cache that is open in this process: see `KvCache.force_evict_cold`. For their thread.

    A node of processes does it when `h3 evict --cold` asks.
    """
    return sum(cache.force_evict_cold() for cache in list(_OPEN))


class KvCache:
    """The KV of a batch over all layers. Made by `create`; close it, or use it in a `with` block. Not thread-safe.

    Args:
        pool: where the KV lies. Closed with this cache.
        batch: rows, one sequence each.
    """

    def __init__(self, pool: SequencePool, *, batch: int) -> None:
        self._pool = pool
        self._rows_B: list[SequenceKv] = []
        try:
            self._open_rows(batch)
        except BaseException:
            pool.close()
            raise
        self._counts_B: tuple[int, ...] = ()
        self._due = 0
        self._staged_k_BKTD: Tensor | None = None
        self._is_closed = False
        _OPEN.add(self)

    @property
    def layout(self) -> CacheLayout:
        """Geometry of the KV."""
        return self._pool.layout

    @property
    def device(self) -> torch.device:
        """Where keys, values and queries must lie."""
        return self._pool.device

    @property
    def dtype(self) -> torch.dtype:
        """Of keys and values."""
        return native.TORCH_DTYPES[self.layout.slab.page.dtype]

    @property
    def batch(self) -> int:
        """Rows."""
        return len(self._rows_B)

    @property
    def tokens_B(self) -> tuple[int, ...]:
        """Tokens of the past, row by row."""
        return tuple(row.tokens for row in self._rows_B)

    def layer(self, index: int) -> KvLayer:
        """What one layer's attention needs. Cheap; make it whenever it is needed.

        Raises:
            RequestError: there is no such layer.
        """
        if not 0 <= index < self.layout.layers:
            raise RequestError(f"layer {index} of a cache for {self.layout.layers} layers: count from 0")
        return KvLayer(self, index)

    def begin(self, layer: int, counts_B: Sequence[int]) -> None:
        """Enter a layer with so many new tokens for each row. Entering it again before `append` changes nothing.

        Raises:
            RequestError: another layer is due, or another number of rows or tokens.
            TierFullError: the tokens do not fit the caps. The past is as it was.
            TierClosedError: after `close`.
        """
        self.check_open()
        if layer != self._due:
            raise RequestError(
                f"layer {layer} came where layer {self._due} of {self.layout.layers} was due: a step takes all layers "
                "in order, each once; after a step that failed call discard_step() first"
            )
        if len(counts_B) != self.batch:
            raise RequestError(
                f"{len(counts_B)} rows for a cache of {self.batch}: create one with batch={len(counts_B)}"
            )
        if layer > 0 and tuple(counts_B) != self._counts_B:
            raise RequestError(
                f"layer {layer} brings {list(counts_B)} tokens, the layers before {list(self._counts_B)}"
            )
        if layer == 0:
            self._prepare(counts_B)
            self._counts_B = tuple(counts_B)

    def attend_row(
        self, q_THD: Tensor, k_TKD: Tensor, v_TKD: Tensor, *, row: int, layer: int, scale: float | None = None
    ) -> Tensor:
        """Append a row's keys and values to the layer that was begun, then attend: [T, H, D] as `q_THD`.

        Args:
            q_THD: queries; fewer than T tokens are the last ones.
            k_TKD, v_TKD: in the cache's dtype. Not kept.
            row: of the batch.
            layer: the one that was begun.
            scale: of the scores; 1 / sqrt(D) where None.
        """
        return self._pool.attend(self._rows_B[row], layer, states=(q_THD, k_TKD, v_TKD), scale=scale)

    def pages(self, *, row: int, layer: int) -> Iterator[NDArray[np.void]]:
        """The past of one row and layer in token order. Each list [K, N] may be read until the next is asked for."""
        return self._pool.pages(self._rows_B[row], layer)

    def stage(self, layer: int, k_BKTD: Tensor) -> None:
        """Enter a layer and keep the step's keys until it ends. Staged again, they are replaced."""
        self.begin(layer, [k_BKTD.shape[2]] * len(k_BKTD))
        self._staged_k_BKTD = k_BKTD

    def staged_keys(self, layer: int) -> Tensor:
        """The keys that wait for their values, [B, K, T, D].

        Raises:
            RequestError: none were staged for this layer.
        """
        if layer != self._due or self._staged_k_BKTD is None:
            raise RequestError(f"pv_matmul of layer {layer} before its qk_matmul: call qk_matmul(q, k, layer) first")
        return self._staged_k_BKTD

    def append_row(self, k_TKD: Tensor, v_TKD: Tensor, *, row: int, layer: int) -> None:
        """Append a row's keys and values to the layer that was begun, for attention that was computed elsewhere."""
        self._pool.append(self._rows_B[row], layer, k_TKD, v_TKD)

    def end(self, layer: int) -> None:
        """Leave a layer whose rows were all appended. After the last one, the step's tokens are past."""
        assert layer == self._due
        self._staged_k_BKTD = None
        self._due += 1
        if self._due == self.layout.layers:
            self._due = 0
            for row, tokens in zip(self._rows_B, self._counts_B, strict=True):
                if tokens:
                    row.advance(tokens)

    def discard_step(self) -> None:
        """Forget the tokens of a step that did not reach the last layer, such as one that an error cut short."""
        self._due = 0
        self._staged_k_BKTD = None

    def reset(self, *, batch: int | None = None) -> None:
        """Forget all tokens, and go on with so many rows; as many as before where None."""
        self.check_open()
        self.discard_step()
        rows = self.batch if batch is None else batch
        self._close_rows()
        self._open_rows(rows)

    def statistics(self) -> dict[Tier, StoreStatistics]:
        """Occupancy of each tier."""
        return self._pool.statistics()

    def force_evict_cold(self) -> int:
        """Move what lies outside the windows from main memory to the store, now, between two steps.

        Returns:
            Bytes of main memory that became free: 0 without a store, and for what it cannot take. What went is read
            from the store when attention wants it; results stay the same.

        Raises:
            TierClosedError: after `close`.
        """
        self.check_open()
        return self._pool.evict_cold()

    def check_integrity(self) -> None:
        """Assert that all room belongs to rows."""
        self._pool.check_integrity()

    def close(self) -> None:
        """Give everything back. Calling it again does nothing."""
        if not self._is_closed:
            self._is_closed = True
            _OPEN.discard(self)
            self._close_rows()
            self._pool.close()

    def __enter__(self) -> KvCache:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def check_open(self) -> None:
        """Refuse to go on with a closed cache.

        Raises:
            TierClosedError: after `close`.
        """
        if self._is_closed:
            raise TierClosedError("this cache is closed: create another", tier=Tier.DEVICE)

    def _open_rows(self, batch: int) -> None:
        try:
            while len(self._rows_B) < batch:
                self._rows_B.append(self._pool.open_sequence())
        except TierFullError as error:
            self._close_rows()
            raise TierFullError(
                f"{batch} rows do not fit the {error.tier} tier ({error}): give fewer rows, or raise the cap",
                tier=error.tier,
                needed_bytes=error.needed_bytes,
                free_bytes=error.free_bytes,
            ) from error

    def _close_rows(self) -> None:
        while self._rows_B:
            self._pool.close_sequence(self._rows_B.pop())

    def _prepare(self, counts_B: Sequence[int]) -> None:
        try:
            self._pool.prepare(self._rows_B, counts_B)
        except TierFullError as error:
            raise TierFullError(
                f"the {error.tier} tier cannot take {max(counts_B)} tokens after {max(self.tokens_B)} ({error}): "
                "give fewer tokens at a time (transformers: generate(prefill_chunk_size=...)), fewer rows, or raise "
                f"{CAP_OF[error.tier]}",
                tier=error.tier,
                needed_bytes=error.needed_bytes,
                free_bytes=error.free_bytes,
            ) from error


@dataclass(frozen=True, slots=True)
class KvLayer:
    """One layer of a cache: what `h3kv.h3_attention` takes."""

    cache: KvCache
    index: int


def create(
    *,
    layers: int,
    kv_heads: int,
    head_dim: int,
    dtype: torch.dtype = torch.float32,
    batch: int = 1,
    device: str | torch.device = "cpu",
    **caps: Unpack[Caps],
) -> KvCache:
    """An empty cache for a batch of sequences.

    Args:
        layers: attention layers of the model.
        kv_heads: heads of keys and values; query heads are a multiple of them.
        head_dim: dimensions of a head.
        dtype: of keys and values: fp32, bf16 or fp16.
        batch: rows; they grow together.
        device: where the device tier lies: the device of the model.
        caps: `device_bytes`, and the tiers behind it: see `Caps`.

    Raises:
        ConfigError: a value is out of range; the message names it and the rule.
        TierFullError: the device tier does not hold the windows of so many rows.
        HostMemoryError: the system refuses as much memory.
        StoreError: the store's place cannot serve.
    """
    if batch < 1:
        raise ConfigError(f"batch = {batch}: must be at least 1", field="batch")
    layout = cache_layout(layers=layers, kv_heads=kv_heads, head_dim=head_dim, dtype=dtype)
    return KvCache(SequencePool(layout, device=torch.device(device), caps=caps), batch=batch)


def cache_layout(*, layers: int, kv_heads: int, head_dim: int, dtype: torch.dtype) -> CacheLayout:
    """Geometry of a cache. Raises ConfigError where a value is out of range."""
    for field, value in (("layers", layers), ("kv_heads", kv_heads)):
        if value < 1:
            raise ConfigError(f"{field} = {value}: must be at least 1", field=field)
    if not 2 <= head_dim <= HEAD_DIM_MAX or head_dim % 2:
        raise ConfigError(f"head_dim = {head_dim}: must be even, from 2 to {HEAD_DIM_MAX}", field="head_dim")
    if dtype not in native.DTYPES:
        raise ConfigError(f"dtype = {dtype}: must be one of {', '.join(map(str, native.DTYPES))}", field="dtype")
    page = PageLayout(dtype=native.DTYPES[dtype], head_dim=head_dim)
    return CacheLayout(SlabLayout(page, kv_heads), layers)
