"""Three tiers give what the device alone gives: the same tokens, and the same perplexity. fp32, `raw` pages."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from h3kv.bench.disk import DiskLimit
from h3kv.bench.results import Results
from h3kv.bench.scoring import decoder_of, window_loss
from h3kv.bench.texts import NamedText, take_tokens
from h3kv.bench.tiered import (
    TieredSetting,
    TokenCaps,
    label,
    load_reaching,
    open_resident,
    open_tiered,
    require_streaming,
    store_folder,
    tell_store,
)
from h3kv.core.types import DType
from h3kv.engine.events import PrefillProgress, TokenGenerated
from h3kv.engine.request import Request, SamplingParameters
from h3kv.models.loader import LoadedModel
from h3kv.node import Node
from h3kv.tiers.cold.place import STORE_FILE


@dataclass(frozen=True, slots=True)
class Sizes:
    """How much is compared."""

    prompt_tokens: int
    answer_tokens: int
    window_tokens: int
    """Of each scored window: as many tokens are scored as are read."""
    windows: int
    caps: TokenCaps
    """Counted in tokens of fp32: the same numbers of tokens in bf16 are half the bytes, which would not hold half of
    this KV."""


FULL: Final = Sizes(
    8192, 256, 8192, 2, TokenCaps(device_tokens=2048, window_tokens=1024, host_tokens=2048, chunk_tokens=896)
)
QUICK: Final = Sizes(
    3072, 16, 3072, 1, TokenCaps(device_tokens=1024, window_tokens=512, host_tokens=2048, chunk_tokens=448)
)


def run(results: Results, setting: TieredSetting, sizes: Sizes, *, named: NamedText) -> None:
    """Compare tokens, then perplexity.

    Args:
        results: receives `exact.*`.
        setting: model and place of the store.
        sizes: how much.
        named: text to read.

    Raises:
        ConfigError: the text is too short, or the caps are so large that the cold store is not read.
    """
    with store_folder(setting) as store:
        _tokens(results, setting, sizes, named=named, store=store)
    with store_folder(setting) as store:
        _perplexity(results, setting, sizes, named=named, store=store)


def _tokens(results: Results, setting: TieredSetting, sizes: Sizes, *, named: NamedText, store: Path) -> None:
    context_tokens = sizes.prompt_tokens + sizes.answer_tokens
    model = load_reaching(setting.model, dtype=DType.FP32, context_tokens=context_tokens)
    prompt = take_tokens(model, named, sizes.prompt_tokens)
    name = f"exact {label(sizes.prompt_tokens)}"
    with open_tiered(model, sizes.caps, store=store, store_tokens=context_tokens) as node:
        tiered = _greedy(node, prompt, sizes.answer_tokens, setting=setting, name=f"{name}, three tiers")
        require_streaming(node)
        assert node.pool.stream is not None
        setting.progress(f"{name}: {node.pool.stream.bytes_fetched_total >> 20} MiB came from the cold store")
    with DiskLimit(store / STORE_FILE) as limit:
        tell_store(store, setting.progress, is_direct=limit.is_direct)
    with open_resident(model, context_tokens=context_tokens, chunk_tokens=sizes.caps.chunk_tokens) as node:
        resident = _greedy(node, prompt, sizes.answer_tokens, setting=setting, name=f"{name}, device alone")
    results.put(f"exact.{label(sizes.prompt_tokens)}.tokens_equal", equal_prefix(tiered, resident))


def _perplexity(results: Results, setting: TieredSetting, sizes: Sizes, *, named: NamedText, store: Path) -> None:
    model = load_reaching(setting.model, dtype=DType.FP32, context_tokens=sizes.window_tokens)
    tokens = take_tokens(model, named, sizes.windows * sizes.window_tokens + 1)
    starts = range(0, len(tokens) - 1, sizes.window_tokens)
    windows = [tokens[start : start + sizes.window_tokens + 1] for start in starts]
    with open_tiered(model, sizes.caps, store=store, store_tokens=sizes.window_tokens) as node:
        tiered = _mean_loss(model, node, windows, setting=setting, chunk_tokens=sizes.caps.chunk_tokens)
        require_streaming(node)
    with open_resident(model, context_tokens=sizes.window_tokens, chunk_tokens=sizes.caps.chunk_tokens) as node:
        resident = _mean_loss(model, node, windows, setting=setting, chunk_tokens=sizes.caps.chunk_tokens)
    # Quick figures say in their name that they are of shorter windows.
    name = named.name if sizes == FULL else f"{named.name}_{label(sizes.window_tokens)}"
    results.put(f"exact.{name}.perplexity", math.exp(resident))
    results.put(f"exact.{name}.scored_tokens", len(tokens) - 1)
    results.put(f"exact.{name}.perplexity_change", abs(math.expm1(tiered - resident)))


def _greedy(node: Node, prompt: Sequence[int], count: int, *, setting: TieredSetting, name: str) -> list[int]:
    """The first tokens of the answer."""
    sampling = SamplingParameters(max_new_tokens=count, ignore_eos=True)
    tokens: list[int] = []
    for event in node.engine.generate(Request(prompt=tuple(prompt), sampling=sampling)):
        if isinstance(event, PrefillProgress):
            setting.progress(f"{name}: {event.done_tokens} of {event.prompt_tokens} tokens read")
        if isinstance(event, TokenGenerated):
            tokens.append(event.token)
    return tokens


def _mean_loss(
    model: LoadedModel, node: Node, windows: Sequence[Sequence[int]], *, setting: TieredSetting, chunk_tokens: int
) -> float:
    """Nats per scored token."""
    decoder = decoder_of(model)
    losses, scored = [], 0
    for window in windows:
        losses.append(window_loss(decoder, node.pool, window, chunk_tokens=chunk_tokens))
        scored += len(window) - 1
        setting.progress(f"perplexity: {math.exp(math.fsum(losses) / scored):.4f} over {scored} tokens")
    return math.fsum(losses) / scored


def equal_prefix(ours: Sequence[int], theirs: Sequence[int]) -> int:
    """How many tokens are equal before the first that differs."""
    assert len(ours) == len(theirs)
    return next((at for at, (a, b) in enumerate(zip(ours, theirs, strict=True)) if a != b), len(ours))
