"""The engine of `testing.tiered_rig` over the regions and the cold store of another process."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from h3kv.attention import native
from h3kv.core.layout import CacheLayout
from h3kv.core.retrieval import RetrievalSetting
from h3kv.engine.clock import MonotonicClock
from h3kv.engine.config import EngineConfig
from h3kv.engine.directory import MemoryDirectory
from h3kv.engine.engine import Engine
from h3kv.engine.needs import TieringConfig
from h3kv.engine.remote_tiers import RemoteTiers, open_remote_tiers
from h3kv.telemetry.recorder import Recorder
from h3kv.testing.engines import FINGERPRINT, LAYOUT, ByteVocabulary, Rig, tiny_decoder
from h3kv.testing.tiered_rig import CHUNK_TOKENS, DEVICE_BLOCKS, WINDOW_TOKENS
from h3kv.tiers.device import DeviceStoreConfig
from h3kv.tiers.remote.link import NodeLink


@dataclass(frozen=True, slots=True)
class RemoteRig:
    """A rig and the tiers under it."""

    rig: Rig
    tiers: RemoteTiers


@contextlib.contextmanager
def remote_rig(
    link: NodeLink,
    *,
    layout: CacheLayout = LAYOUT,
    fingerprint: bytes = FINGERPRINT,
    retrieval: RetrievalSetting | None = None,
    page_cache_bytes: int = 0,
) -> Iterator[RemoteRig]:
    """A rig whose stores are closed at the end; the link stays open.

    Args:
        link: open, for the layout and fingerprint.
        layout: of the tiny model's KV.
        fingerprint: of the block keys.
        retrieval: of the answers.
        page_cache_bytes: part of HOST for single pages.
    """
    telemetry, directory, clock = Recorder(), MemoryDirectory(), MonotonicClock()
    tiering = TieringConfig(window_tokens=WINDOW_TOKENS, page_cache_bytes=page_cache_bytes, chunk_tokens=CHUNK_TOKENS)
    with contextlib.ExitStack() as stack:
        device = DeviceStoreConfig(DEVICE_BLOCKS * layout.block_bytes)
        tiers = open_remote_tiers(layout, device, tiering, link)
        stack.callback(tiers.stores.close)
        pool = tiers.stores.open_pool(page_kernels=native, directory=directory, telemetry=telemetry, clock=clock)
        stack.callback(pool.close)
        engine = Engine(
            tiny_decoder(),
            pool,
            vocabulary=ByteVocabulary(),
            fingerprint=fingerprint,
            device=torch.device("cpu"),
            config=EngineConfig(chunk_tokens=CHUNK_TOKENS, retrieval=retrieval),
            clock=clock,
            telemetry=telemetry,
        )
        stack.callback(engine.close)
        assert tiers.stores.host is not None
        yield RemoteRig(Rig(engine, pool, directory, tiers.stores.host, telemetry, clock), tiers)
