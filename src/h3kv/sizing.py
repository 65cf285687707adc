"""What the caps of the settings come to, for one model on one machine."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from h3kv.config import Settings
from h3kv.core.layout import CacheLayout
from h3kv.core.limits import BLOCK_TOKENS, SEGMENT_TOKENS_MAX
from h3kv.core.types import DType
from h3kv.core.units import TokenCount
from h3kv.engine.needs import TieringConfig
from h3kv.engine.tiers import ColdPlace, TierConfig
from h3kv.policy.window import CHUNK_BLOCKS_MAX, SEQUENCES_MAX, window_room
from h3kv.tiers.cold import ColdStoreConfig
from h3kv.tiers.cold.place import resolve
from h3kv.tiers.device import DeviceStoreConfig
from h3kv.tiers.host import HostStoreConfig
from h3kv.tiers.index_store import IndexStore

KV_SHARE_AUTO: Final = 0.5
"""Share of the available memory that `auto` takes once the model is loaded. The rest is for prefill's scratch, other
processes and the cache of files."""

PAGE_SHARE: Final = 3
"""In retrieval mode, the part of the HOST cap that keeps single pages of the cold store."""

NEW_STORE_BYTES: Final = 8 << 30
"""Cap of a store that is made without one: 370,000 tokens of SmolLM2-135M in bf16, 65,000 of a Llama of 8B."""


@dataclass(frozen=True, slots=True)
class Surroundings:
    """Where the model lies, and what is free there after it was loaded."""

    device: str
    """As torch names it."""
    device_bytes: int
    host_bytes: int
    """Of main memory: with the device `cpu`, the same bytes once more."""

    @property
    def is_main_memory(self) -> bool:
        """Whether the device's KV comes out of main memory."""
        return self.device == "cpu"


def cap_bytes(cap: int | TokenCount, layout: CacheLayout) -> int:
    """Bytes of a cap. Tokens count as bf16 bytes of the model, whatever its element type."""
    if isinstance(cap, TokenCount):
        return cap.count * layout.token_bytes // layout.slab.page.dtype.size_bytes * DType.BF16.size_bytes
    return cap


def is_tiered(settings: Settings, surroundings: Surroundings) -> bool:
    """Whether KV may leave the device: see `tiering.mode`."""
    if settings.tiering.mode != "auto":
        return settings.tiering.mode == "on"
    return not surroundings.is_main_memory or asks_for_tiers(settings)


def asks_for_tiers(settings: Settings) -> bool:
    """Whether a tier behind the device has a size or a place."""
    return settings.host.kv_bytes != "auto" or settings.nvme.store is not None


def device_store(settings: Settings, layout: CacheLayout, surroundings: Surroundings) -> DeviceStoreConfig:
    """Cap and place of the device tier."""
    cap = settings.device.kv_bytes
    if cap != "auto":
        return DeviceStoreConfig(cap_bytes(cap, layout), surroundings.device)
    share_bytes = int(KV_SHARE_AUTO * surroundings.device_bytes)
    if is_tiered(settings, surroundings):
        windows = SEQUENCES_MAX * window_room(settings.device.window_tokens // BLOCK_TOKENS)
        share_bytes = min(share_bytes, (windows + CHUNK_BLOCKS_MAX) * layout.block_bytes)
    return DeviceStoreConfig(share_bytes, surroundings.device)


def tiers_behind(
    settings: Settings,
    layout: CacheLayout,
    surroundings: Surroundings,
    *,
    device: DeviceStoreConfig,
    context_tokens: int,
) -> TierConfig | None:
    """The tiers behind the device; None where all KV stays on it. Requests have so many tokens at most."""
    if not is_tiered(settings, surroundings):
        return None
    cap = settings.host.kv_bytes
    if cap == "auto":
        free_bytes = surroundings.host_bytes - (device.capacity_bytes if surroundings.is_main_memory else 0)
        cap = int(KV_SHARE_AUTO * max(free_bytes, 0))
    host_bytes = cap_bytes(cap, layout)
    index_bytes = _index_bytes(settings, layout, context_tokens=context_tokens)
    tiering = tiering_of(settings, host_bytes=host_bytes, index_bytes=index_bytes)
    return TierConfig(HostStoreConfig(host_bytes), tiering, cold_place(settings, layout))


def tiering_of(settings: Settings, *, host_bytes: int, index_bytes: int | None) -> TieringConfig:
    """How HOST of so many bytes and the device share the work."""
    return TieringConfig(
        window_tokens=settings.device.window_tokens,
        staging_bytes=settings.host.staging_bytes,
        page_cache_bytes=host_bytes // PAGE_SHARE if settings.attention.mode == "retrieval" else 0,
        index_bytes=index_bytes,
        recomputes=settings.tiering.recompute == "auto",
        chunk_tokens=settings.engine.chunk_tokens,
    )


def _index_bytes(settings: Settings, layout: CacheLayout, *, context_tokens: int) -> int | None:
    """Cap of the index region; None for the least."""
    cap = settings.host.index_bytes
    if cap != "auto":
        return cap_bytes(cap, layout)
    if settings.attention.mode == "exact" or not layout.slab.page.encoding.is_clustered:
        return None
    segments = context_tokens // SEGMENT_TOKENS_MAX + 1
    return segments * layout.layers * IndexStore.layer_bytes(layout)


def cold_place(settings: Settings, layout: CacheLayout) -> ColdPlace | None:
    """Where the cold store lies, and its cap; None without one.

    Raises:
        StoreError: this user may not look there.
    """
    nvme = settings.nvme
    if nvme.store is None:
        return None
    capacity_bytes = None if nvme.capacity is None else cap_bytes(nvme.capacity, layout)
    if capacity_bytes is None:
        _, is_there = resolve(nvme.store)
        capacity_bytes = None if is_there else NEW_STORE_BYTES
    config = ColdStoreConfig(
        capacity_bytes=capacity_bytes,
        backend=nvme.backend,
        wrap=nvme.wrap,
        write_bytes_per_day=nvme.write_bytes_per_day,
    )
    return ColdPlace(nvme.store, config, nvme.backend)
