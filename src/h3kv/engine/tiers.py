"""The stores of one process: which tiers there are, opened and closed together."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal

from h3kv.attention.page_seams import PageKernels
from h3kv.core.layout import CacheLayout
from h3kv.core.ports import Clock, Directory, PersistentStore, Telemetry
from h3kv.engine.needs import TieringConfig
from h3kv.engine.pool import KvPool
from h3kv.engine.store_room import check_area, check_new_store, cure_for_blocks
from h3kv.policy.window import SEQUENCES_MAX
from h3kv.tiers.cold import ColdStore, ColdStoreConfig
from h3kv.tiers.cold.place import resolve
from h3kv.tiers.cold.seam import EngineFactory
from h3kv.tiers.cold.volume import Volume, open_volume
from h3kv.tiers.device import DeviceStore, DeviceStoreConfig
from h3kv.tiers.host import HostStore, HostStoreConfig, RegionStore
from h3kv.tiers.index_store import IndexStore, IndexStoreConfig
from h3kv.tiers.io import IoEngine

REGISTERED_BYTES_MAX: Final = 1 << 30
"""Registering memory with the kernel commits all of it. Of a larger HOST tier only the staging slots are registered,
which lie at its beginning; the rest is committed as it fills."""

IO_DEPTH: Final = 128
"""Reads and writes in flight: single pages need as many to keep a disk busy, `SlabStream` takes fewer whole slabs."""


@dataclass(frozen=True, slots=True)
class ColdPlace:
    """Where the cold store lies."""

    path: Path
    """Folder, file or block device."""
    config: ColdStoreConfig
    backend: Literal["auto", "io_uring", "threads"] = "auto"


@dataclass(frozen=True, slots=True)
class TierConfig:
    """The tiers behind the device."""

    host: HostStoreConfig
    tiering: TieringConfig
    cold: ColdPlace | None = None
    """None: nothing outlives the process."""


class TierStores:
    """Owns the stores; made by `open`. A pool over them is closed before.

    `io` and `volume` are those of a cold store that this process reads and writes itself; None of another process's.
    """

    def __init__(
        self,
        layout: CacheLayout,
        device: DeviceStore,
        *,
        host: RegionStore | None,
        cold: PersistentStore | None,
        index: IndexStore | None,
        io: IoEngine | None,
        volume: Volume | None,
        tiering: TieringConfig | None,
        closing: contextlib.ExitStack,
    ) -> None:
        self.layout = layout
        self.device = device
        self.host = host
        self.cold = cold
        self.index = index
        self.io = io
        self.volume = volume
        self._tiering = tiering
        self._closing = closing

    @classmethod
    def open(
        cls,
        layout: CacheLayout,
        device: DeviceStoreConfig,
        tiers: TierConfig | None,
        *,
        fingerprint: bytes,
        telemetry: Telemetry,
    ) -> TierStores:
        """Open the tiers of a model.

        Raises:
            ConfigError: a cap is too small.
            HostMemoryError: the system refuses as much memory as the caps say.
            StoreError: the cold store's place cannot serve.
        """
        with contextlib.ExitStack() as stack:
            on_device = DeviceStore(layout.slab, device)
            stack.callback(on_device.close)
            host: HostStore | None = None
            cold: ColdStore | None = None
            index: IndexStore | None = None
            io: IoEngine | None = None
            volume: Volume | None = None
            if tiers is not None:
                host = HostStore(layout.slab, tiers.host)
                stack.callback(host.close)
                if tiers.cold is not None and layout.slab.page.encoding.is_clustered:
                    # Closed after the cold store, which may still read into it.
                    index = IndexStore(layout, _index_config(tiers.tiering, layout))
                    stack.callback(index.close)
                if tiers.cold is not None:
                    cold, io, volume = _open_cold(
                        tiers.cold,
                        layout,
                        _registered(host, tiers.tiering),
                        fingerprint=fingerprint,
                        telemetry=telemetry,
                    )
                    stack.callback(cold.close)
            tiering = None if tiers is None else tiers.tiering
            return cls(
                layout,
                on_device,
                host=host,
                cold=cold,
                index=index,
                io=io,
                volume=volume,
                tiering=tiering,
                closing=stack.pop_all(),
            )

    def open_pool(
        self, *, page_kernels: PageKernels, directory: Directory, telemetry: Telemetry, clock: Clock
    ) -> KvPool:
        """The pool over these stores.

        Raises:
            ConfigError: the caps are too small for one running sequence; the message has the sum.
        """
        return KvPool(
            self.device if self.host is None else self.host,
            self.layout,
            page_kernels=page_kernels,
            directory=directory,
            telemetry=telemetry,
            clock=clock,
            device=None if self.host is None else self.device,
            cold=self.cold,
            index=self.index,
            tiering=self._tiering,
            cold_cure=None if self.volume is None else self._cure_for_blocks,
        )

    def _cure_for_blocks(self, blocks: int) -> str:
        assert self.volume is not None
        return cure_for_blocks(self.layout, blocks, path=self.volume.place.path, made=self.volume.geometry)

    def close(self) -> None:
        """Close all stores. Calling it again does nothing."""
        self._closing.close()


def _index_config(tiering: TieringConfig, layout: CacheLayout) -> IndexStoreConfig:
    """As large as was said, or with room for the segment that each sequence may use in part."""
    if tiering.index_bytes is not None:
        return IndexStoreConfig(tiering.index_bytes)
    return IndexStoreConfig(SEQUENCES_MAX * layout.layers * IndexStore.layer_bytes(layout))


def open_cold_volume(place: ColdPlace, layout: CacheLayout, make_engine: EngineFactory) -> Volume:
    """The volume of a cold store in which a segment of the model fits; made where there is none.

    Raises:
        ConfigError: its cap is missing or too small, or the model's segments do not fit an area of it.
        StoreError: it cannot serve.
    """
    path, is_there = resolve(place.path)
    capacity_bytes = place.config.capacity_bytes
    if not is_there and capacity_bytes is not None:
        check_new_store(path, layout, capacity_bytes)
    volume = open_volume(place.path, make_engine, capacity_bytes=capacity_bytes, layout=layout)
    try:
        check_area(path, layout, volume.geometry)
    except BaseException:
        volume.close()
        raise
    return volume


def _registered(host: HostStore, tiering: TieringConfig) -> list[tuple[int, int]]:
    """Address and size of the memory that the I/O engine registers."""
    return [
        (address, size_bytes if size_bytes <= REGISTERED_BYTES_MAX else tiering.staging_bytes)
        for address, size_bytes in host.buffers
    ]


def _open_cold(
    place: ColdPlace,
    layout: CacheLayout,
    buffers: Sequence[tuple[int, int]],
    *,
    fingerprint: bytes,
    telemetry: Telemetry,
) -> tuple[ColdStore, IoEngine, Volume]:
    """The store, the engine that reads and writes it, and what it lies in."""
    engines: list[IoEngine] = []

    def make_engine(files: Sequence[int]) -> IoEngine:
        engines.append(IoEngine.open(files, depth=IO_DEPTH, buffers=buffers, backend=place.backend))
        return engines[-1]

    volume = open_cold_volume(place, layout, make_engine)
    try:
        cold = ColdStore(volume, layout, fingerprint=fingerprint, config=place.config, telemetry=telemetry)
    except BaseException:
        volume.close()
        raise
    return cold, engines[-1], volume
