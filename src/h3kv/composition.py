"""From settings to a loaded model and the node over it: what the command line and the processes share."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import torch

from h3kv.attention.native import DTYPES
from h3kv.config import ModelSettings, RuntimeSettings, Settings
from h3kv.core.errors import ConfigError
from h3kv.core.layout import CacheLayout
from h3kv.core.ports import Clock, Telemetry
from h3kv.core.retrieval import RetrievalSetting
from h3kv.core.types import DType, Encoding
from h3kv.engine.config import EngineConfig
from h3kv.engine.tiers import TierStores, open_cold_volume
from h3kv.instruction_set import select_isa
from h3kv.machine import detect
from h3kv.models.config import ModelConfig
from h3kv.models.gguf_file import GgufFile
from h3kv.models.gguf_loader import config_from_gguf
from h3kv.models.loader import LoadedModel, load_model, resolve_source
from h3kv.models.rope import RopeKind, RopeScaling
from h3kv.models.safetensors_loader import config_from_folder
from h3kv.models.weights import Progress
from h3kv.node import Node, StoresOpener, cache_layout
from h3kv.sizing import Surroundings, cold_place, device_store, tiers_behind
from h3kv.telemetry.recorder import Recorder
from h3kv.tiers.io import IoEngine

FACTOR_STEPS: Final = 100
"""A factor that follows from a maximum context is rounded up to a hundredth, so that the same number can be given."""


@dataclass(frozen=True, slots=True)
class Context:
    """How far a model reaches, and by what."""

    rope: RopeScaling | None
    """Static scaling, for a model that brings none of its own."""
    trained_tokens: int | None
    """What the model reaches by itself; None when nothing asks for more."""


@dataclass(frozen=True, slots=True)
class Loaded:
    """A model and what was chosen for it."""

    model: LoadedModel
    dtype: DType
    context: Context
    threads: int
    isa: str
    """Instruction set of the native core."""


def load(settings: Settings, *, on_progress: Progress | None = None) -> Loaded:
    """The model that the settings name, with threads and instruction set of this process set.

    What is wrong with the cold store is found before time is spent on weights.

    Args:
        settings: in force.
        on_progress: as of `load_model`. What it raises ends the loading.

    Raises:
        ModelError, ConfigError, HostMemoryError, StoreError: the first thing that stands in the way.
    """
    threads, isa = apply_runtime(settings.runtime)
    path = resolve_source(settings.model.source)
    context = choose_context(settings.model, path)
    dtype = element_type(settings.model)
    config = model_config(path)
    retrieval_setting(settings, config)  # Refuses now what would be refused with a store made and a model loaded.
    if settings.tiering.mode != "off":
        check_store(settings, cache_layout(config, dtype, Encoding(settings.attention.encoding)))
    model = load_model(
        path, dtype=dtype, rope=context.rope, max_context=settings.model.max_context, on_progress=on_progress
    )
    return Loaded(model, dtype, context, threads, isa)


def element_type(settings: ModelSettings) -> DType:
    """What weights, activations and KV consist of."""
    return DType.BF16 if settings.dtype == "auto" else DType(settings.dtype)


def apply_runtime(settings: RuntimeSettings) -> tuple[int, str]:
    """Set the number of threads and the instruction set of this process, and give back what they are.

    Raises:
        ConfigError: this processor lacks the instruction set.
    """
    threads = detect().cores if settings.threads == "auto" else settings.threads
    torch.set_num_threads(threads)
    return threads, select_isa(settings.isa, setting="runtime.isa", field="runtime.isa")


def choose_context(settings: ModelSettings, path: Path) -> Context:
    """The static rope scaling that the settings ask for.

    A maximum context beyond what the model reaches, without a scaling, means NTK: its factor follows from that number
    alone, never from a prompt, so that cached keys stay true. A model that brings its own scaling gets no other.

    Raises:
        ModelError: the configuration cannot be read.
        ConfigError: the model brings its own scaling, and the settings ask for another or for more than it reaches.
    """
    if settings.rope_scaling is None and settings.max_context is None:
        return Context(None, None)
    config = model_config(path)
    rope = None
    if settings.rope_scaling is not None:
        rope = RopeScaling(RopeKind(settings.rope_scaling.type), settings.rope_scaling.factor)
    elif settings.max_context is not None and settings.max_context > config.max_context and not config.is_scaled:
        factor = math.ceil(FACTOR_STEPS * settings.max_context / config.max_context) / FACTOR_STEPS
        rope = RopeScaling(RopeKind.NTK, factor)
    config.with_context(rope, settings.max_context)  # Refuses now what loading would refuse.
    return Context(rope, config.max_context)


def model_config(path: Path) -> ModelConfig:
    """The configuration of a model folder or file, without its weights."""
    return config_from_folder(path) if path.is_dir() else config_from_gguf(GgufFile(path))


def check_store(settings: Settings, layout: CacheLayout) -> None:
    """Open the cold store once, before time is spent on loading a model. One that does not exist is made.

    Raises:
        ConfigError: its cap is too small, or the backend is not available here.
        StoreError: it cannot serve.
    """
    place = cold_place(settings, layout)
    if place is not None:
        open_cold_volume(place, layout, lambda files: IoEngine.open(files, depth=1, backend=place.backend)).close()


def open_node(
    model: LoadedModel,
    settings: Settings,
    clock: Clock,
    *,
    telemetry: Recorder | None = None,
    open_stores: StoresOpener | None = None,
) -> Node:
    """A node over the model with the caps and the chunk that the settings ask for.

    Args:
        model: loaded.
        settings: in force.
        clock: of the node.
        telemetry: receives its measurements; one of its own where None.
        open_stores: opens its tiers; in this process, as the settings say, where None.

    Raises:
        ConfigError, HostMemoryError, StoreError: as `Node.open`.
    """
    weights = model.weights.embedding_VI
    encoding = Encoding(settings.attention.encoding)
    if open_stores is None:
        layout = cache_layout(model.config, DTYPES[weights.dtype], encoding)
        open_stores = _embedded_tiers(settings, layout, survey(weights.device), context_tokens=model.config.max_context)
    return Node.open_over(
        model,
        open_stores,
        engine=EngineConfig(settings.engine.chunk_tokens, retrieval_setting(settings, model.config)),
        encoding=encoding,
        clock=clock,
        telemetry=telemetry or Recorder(),
    )


def _embedded_tiers(
    settings: Settings, layout: CacheLayout, surroundings: Surroundings, *, context_tokens: int
) -> StoresOpener:
    device = device_store(settings, layout, surroundings)
    tiers = tiers_behind(settings, layout, surroundings, device=device, context_tokens=context_tokens)

    def open_stores(layout: CacheLayout, fingerprint: bytes, telemetry: Telemetry) -> TierStores:
        return TierStores.open(layout, device, tiers, fingerprint=fingerprint, telemetry=telemetry)

    return open_stores


def retrieval_setting(settings: Settings, model: ModelConfig) -> RetrievalSetting | None:
    """What retrieval mode asks for; None in exact mode.

    Raises:
        ConfigError: an encoding that has no index, a store whose slabs are wrapped, or a layer that the model does not
            have.
    """
    attention = settings.attention
    if attention.mode == "exact":
        return None
    if not Encoding(attention.encoding).is_clustered:
        raise ConfigError(
            f"attention.mode = 'retrieval' with attention.encoding = {attention.encoding!r}: only k8v4 and int4 have "
            "an index; choose one of them, or the exact mode",
            field="attention.encoding",
        )
    if settings.nvme.wrap != "none":
        raise ConfigError(
            f"attention.mode = 'retrieval' with nvme.wrap = {settings.nvme.wrap!r}: retrieval reads single pages, and "
            "wrapped slabs are read whole; choose nvme.wrap none, or the exact mode",
            field="nvme.wrap",
        )
    strange = next((layer for layer in attention.dense_layers if layer >= model.layers), None)
    if strange is not None:
        raise ConfigError(
            f"attention.dense_layers names layer {strange}: the model has {model.layers}, counted from 0",
            field="attention.dense_layers",
        )
    return RetrievalSetting(
        budget_tokens=attention.budget_tokens,
        dense_layers=attention.dense_layers,
        shortlist_share=attention.shortlist_share,
        best_effort=attention.best_effort,
        recall_every=attention.recall_every,
    )


def survey(device: torch.device) -> Surroundings:
    """What is free now on a device and in main memory."""
    host_bytes = detect().memory_available_bytes
    device_bytes = torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else host_bytes
    return Surroundings(str(device), device_bytes=device_bytes, host_bytes=host_bytes)
