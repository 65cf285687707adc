"""Nodes with caps counted in tokens: with all three tiers, with HOST alone, and with everything on the device."""

from __future__ import annotations

import contextlib
import math
import random
import tempfile
from collections.abc import Iterator
from dataclasses import KW_ONLY, dataclass
from pathlib import Path
from typing import Final

from h3kv.attention.native import DTYPES
from h3kv.bench.disk import describe_folder
from h3kv.bench.measure import Progress
from h3kv.core.errors import ConfigError
from h3kv.core.layout import CacheLayout
from h3kv.core.limits import BLOCK_TOKENS, SEGMENT_TOKENS_MAX
from h3kv.core.types import DType, Encoding
from h3kv.engine.config import EngineConfig
from h3kv.engine.needs import TieringConfig
from h3kv.engine.tiers import ColdPlace, TierConfig
from h3kv.models.loader import LoadedModel, load_model
from h3kv.models.rope import RopeKind, RopeScaling
from h3kv.node import Node, cache_layout
from h3kv.tiers.cold import ColdStoreConfig
from h3kv.tiers.device import DeviceStoreConfig
from h3kv.tiers.host import HostStoreConfig

STORE_SLACK_BYTES: Final = 512 << 20
"""Of a store beyond twice its tokens: tables, and what is lost at the ends of its areas."""


@dataclass(frozen=True, slots=True)
class TokenCaps:
    """What each tier holds, in tokens of the element type that runs: the same share of a context in bf16 and fp32."""

    device_tokens: int
    window_tokens: int
    host_tokens: int
    chunk_tokens: int


@dataclass(frozen=True, slots=True)
class TieredSetting:
    """What the command line chose."""

    model: str
    folder: Path
    """Where stores are made, each in a folder of its own, and removed again."""
    _: KW_ONLY
    repetitions: int
    progress: Progress


def kv_layout(model: LoadedModel, encoding: Encoding = Encoding.RAW) -> CacheLayout:
    """Of a model's KV in the element type in which it was loaded."""
    return cache_layout(model.config, DTYPES[model.weights.embedding_VI.dtype], encoding)


def kv_bytes(layout: CacheLayout, tokens: int) -> int:
    """Bytes that so many tokens take, in whole blocks."""
    return -(-tokens // BLOCK_TOKENS) * layout.block_bytes


def open_resident(
    model: LoadedModel, *, context_tokens: int, chunk_tokens: int, encoding: Encoding = Encoding.RAW
) -> Node:
    """A node with tiering off and room for a whole context on the device."""
    capacity_bytes = kv_bytes(kv_layout(model, encoding), context_tokens + 3 * SEGMENT_TOKENS_MAX)
    device = DeviceStoreConfig(capacity_bytes)
    return Node.open(model, store=device, engine=EngineConfig(chunk_tokens), encoding=encoding)


def open_tiered(
    model: LoadedModel,
    caps: TokenCaps,
    *,
    store: Path | None,
    store_tokens: int = 0,
    encoding: Encoding = Encoding.RAW,
    index_bytes: int | None = None,
    page_cache_bytes: int = 0,
    reads_pages_ahead: bool = True,
) -> Node:
    """A node with tiering on.

    Args:
        model: to run.
        caps: of device and HOST.
        store: folder of the cold store; None: there is none.
        store_tokens: that the cold store has room for.
        encoding: of keys and values. Caps count tokens of this encoding.
        index_bytes: cap of the index region; None: the least.
        page_cache_bytes: part of HOST for single pages.
        reads_pages_ahead: whether they are read before they are asked for.
    """
    layout = kv_layout(model, encoding)
    place = None
    if store is not None:
        capacity_bytes = 2 * kv_bytes(layout, store_tokens) + STORE_SLACK_BYTES
        place = ColdPlace(store, ColdStoreConfig(capacity_bytes))
    tiers = TierConfig(
        HostStoreConfig(kv_bytes(layout, caps.host_tokens)),
        TieringConfig(
            window_tokens=caps.window_tokens,
            index_bytes=index_bytes,
            page_cache_bytes=page_cache_bytes,
            reads_pages_ahead=reads_pages_ahead,
            chunk_tokens=caps.chunk_tokens,
        ),
        place,
    )
    device = DeviceStoreConfig(kv_bytes(layout, caps.device_tokens))
    return Node.open(model, store=device, tiers=tiers, engine=EngineConfig(caps.chunk_tokens), encoding=encoding)


def require_streaming(node: Node) -> None:
    """Check that the cold store was really read: a benchmark of three tiers that used two measures nothing.

    Raises:
        ConfigError: it was not.
    """
    if node.pool.stream is None or node.pool.stream.bytes_fetched_total == 0:
        raise ConfigError(
            "the caps hold all KV: nothing was read from the cold store; lower them", field="host.kv_bytes"
        )


def load_reaching(source: str, *, dtype: DType, context_tokens: int) -> LoadedModel:
    """A model that admits so many tokens, by a static scaling where it was trained for fewer: it changes no cost."""
    model = load_model(source, dtype=dtype)
    trained_tokens = model.config.max_context
    if context_tokens <= trained_tokens:
        return model
    rope = RopeScaling(RopeKind.NTK, factor=math.ceil(context_tokens / trained_tokens))
    return load_model(source, dtype=dtype, rope=rope, max_context=context_tokens)


@contextlib.contextmanager
def store_folder(setting: TieredSetting) -> Iterator[Path]:
    """A new folder for one store, removed at the end. `progress` hears where it is no disk.

    Raises:
        ConfigError: no folder can be made there.
    """
    try:
        folder = tempfile.TemporaryDirectory(prefix="h3-bench-", dir=setting.folder)
    except OSError as error:
        message = f"cannot write to {setting.folder}: {error.strerror}; choose another --store"
        raise ConfigError(message, field="store") from error
    with folder as name:
        yield Path(name)


def tell_store(store: Path, progress: Progress, *, is_direct: bool) -> None:
    """Say what a reader must know of the file system under a store."""
    warning = describe_folder(store, is_direct=is_direct)
    if warning is not None:
        progress(warning)


def random_tokens(model: LoadedModel, count: int, *, seed: int) -> list[int]:
    """A prompt that shares nothing with those of other seeds."""
    generator = random.Random(seed)
    return [generator.randrange(model.config.vocabulary_size) for _ in range(count)]


def label(tokens: int) -> str:
    """As in metric names: `8k`."""
    return f"{tokens >> 10}k" if tokens % 1024 == 0 else str(tokens)
