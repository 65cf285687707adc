"""The engine of `testing.engines` over three tiers, so small that a prompt of a few hundred tokens uses all of them.

Caps in blocks of 64 tokens: 16 on the device, with a window of 2; 48 in HOST, of them 32 for four staging slots of
one layer each and 16 for one open segment; the cold store holds what its units say.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final

import torch

from h3kv.attention import native
from h3kv.attention.page_seams import PageKernels
from h3kv.attention.torch_pages import TorchPages
from h3kv.core.layout import CacheLayout
from h3kv.core.ports import Clock, PersistentStore
from h3kv.core.retrieval import RetrievalSetting
from h3kv.engine.clock import MonotonicClock
from h3kv.engine.config import EngineConfig
from h3kv.engine.directory import MemoryDirectory
from h3kv.engine.engine import Engine
from h3kv.engine.needs import TieringConfig
from h3kv.engine.pool import KvPool
from h3kv.engine.sequence import LanguageModel
from h3kv.telemetry.recorder import Recorder
from h3kv.testing.cold_segments import open_store
from h3kv.testing.engines import FINGERPRINT, LAYOUT, ByteVocabulary, Rig, tiny_decoder
from h3kv.tiers.cold.config import Wrap
from h3kv.tiers.cold.geometry import capacity_for
from h3kv.tiers.cold.seam import EngineFactory
from h3kv.tiers.device import DeviceStore, DeviceStoreConfig
from h3kv.tiers.host import HostStore, HostStoreConfig
from h3kv.tiers.index_store import IndexStore, IndexStoreConfig

DEVICE_BLOCKS: Final = 16
HOST_BLOCKS: Final = 48
WINDOW_TOKENS: Final = 128
CHUNK_TOKENS: Final = 128


@contextlib.contextmanager
def tiered_rig(
    folder: Path | None,
    *,
    units: int = 8,
    device_blocks: int = DEVICE_BLOCKS,
    host_blocks: int = HOST_BLOCKS,
    io: EngineFactory | None = None,
    model: LanguageModel | None = None,
    fingerprint: bytes = FINGERPRINT,
    layout: CacheLayout = LAYOUT,
    retrieval: RetrievalSetting | None = None,
    index_segments: int = 8,
    page_cache_bytes: int = 0,
    wrap: Wrap = "none",
    on_torch: bool = False,
    clock: Clock | None = None,
    around: Callable[[PersistentStore], PersistentStore] | None = None,
    recomputes: bool = False,
    window_tokens: int = WINDOW_TOKENS,
) -> Iterator[Rig]:
    """A rig whose stores are closed at the end; the pool first, as a node does.

    Args:
        folder, units: of the cold store, with room for so many times 16 blocks; None: there is none.
        device_blocks, host_blocks: caps of the tiers in memory.
        io: makes the cold store's I/O engine; the shipped one where None.
        model: the tiny decoder of seed 0 where None.
        fingerprint, layout: of the tiny model's KV and of the store.
        retrieval: of the answers.
        index_segments: room of the index region, where the encoding has indexes.
        page_cache_bytes: part of HOST for single pages.
        wrap: of what is written to the cold store.
        on_torch: attend to the device's pages in torch, as a device without native kernels does.
        clock, around, recomputes, window_tokens: of the pool, and what it gets for its cold store.
    """
    telemetry, directory, clock = Recorder(), MemoryDirectory(), clock or MonotonicClock()
    with contextlib.ExitStack() as stack:
        device, host = _open_memory(stack, layout, device_blocks, host_blocks)
        cold = index = None
        if folder is not None:
            made = functools.partial(open_store, folder, fingerprint=fingerprint, layout=layout, telemetry=telemetry)
            cold = made(capacity_bytes=capacity_for(layout, units=units), engine=io, wrap=wrap)
            stack.callback(cold.close)
            index = _open_index(stack, layout, index_segments)
        pool = KvPool(
            host,
            layout,
            page_kernels=_kernels(stack, device, layout) if on_torch else native,
            directory=directory,
            telemetry=telemetry,
            clock=clock,
            device=device,
            cold=around(cold) if around is not None and cold is not None else cold,
            index=index,
            tiering=_tiering(page_cache_bytes, window_tokens, recomputes=recomputes),
        )
        stack.callback(pool.close)
        engine = _engine(pool, model or tiny_decoder(), retrieval, fingerprint=fingerprint, telemetry=telemetry)
        stack.callback(engine.close)
        yield Rig(engine, pool, directory, host, telemetry, clock)


def _open_memory(
    stack: contextlib.ExitStack, layout: CacheLayout, device_blocks: int, host_blocks: int
) -> tuple[DeviceStore, HostStore]:
    """The tiers in memory, of so many blocks."""
    device = DeviceStore(layout.slab, DeviceStoreConfig(capacity_bytes=device_blocks * layout.block_bytes))
    stack.callback(device.close)
    host = HostStore(layout.slab, HostStoreConfig(capacity_bytes=host_blocks * layout.block_bytes))
    stack.callback(host.close)
    return device, host


def _open_index(stack: contextlib.ExitStack, layout: CacheLayout, segments: int) -> IndexStore | None:
    """Room for so many indexes, where the encoding has any."""
    if not layout.slab.page.encoding.is_clustered:
        return None
    index = IndexStore(layout, IndexStoreConfig(segments * layout.layers * IndexStore.layer_bytes(layout)))
    stack.callback(index.close)
    return index


def _kernels(stack: contextlib.ExitStack, device: DeviceStore, layout: CacheLayout) -> PageKernels:
    """Those of a device without native ones."""
    torch_pages = TorchPages(device.arena, layout.slab.page)
    stack.callback(torch_pages.close)
    return torch_pages


def _engine(
    pool: KvPool,
    model: LanguageModel,
    retrieval: RetrievalSetting | None,
    *,
    fingerprint: bytes,
    telemetry: Recorder,
) -> Engine:
    return Engine(
        model,
        pool,
        vocabulary=ByteVocabulary(),
        fingerprint=fingerprint,
        device=torch.device("cpu"),
        config=EngineConfig(CHUNK_TOKENS, retrieval),
        clock=MonotonicClock(),
        telemetry=telemetry,
    )


def _tiering(page_cache_bytes: int, window_tokens: int, *, recomputes: bool) -> TieringConfig:
    return TieringConfig(
        window_tokens=window_tokens,
        page_cache_bytes=page_cache_bytes,
        recomputes=recomputes,
        chunk_tokens=CHUNK_TOKENS,
    )
