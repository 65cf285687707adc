"""Decode at long contexts on encoded pages: exact, by retrieval, and by retrieval with most pages in the cold store.

The context is a text that was really read, over and over with the right positions; steps are real decode steps.
"""

from __future__ import annotations

import contextlib
import dataclasses
import statistics
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from h3kv.bench import codec, sealing
from h3kv.bench.contestants import Contestant, open_peers
from h3kv.bench.injected import TiledKv
from h3kv.bench.limit import ReadLimit
from h3kv.bench.long_decode import LongSequence
from h3kv.bench.measure import Rounds, turns
from h3kv.bench.results import Results
from h3kv.bench.scoring import decoder_of
from h3kv.bench.texts import NamedText, take_tokens
from h3kv.bench.tiered import (
    TieredSetting,
    TokenCaps,
    kv_bytes,
    kv_layout,
    label,
    load_reaching,
    open_resident,
    open_tiered,
    random_tokens,
    store_folder,
)
from h3kv.bench.whole_model import weight_bytes
from h3kv.core.layout import SCALES_BYTES
from h3kv.core.limits import BLOCK_TOKENS, SEGMENT_TOKENS_MAX
from h3kv.core.retrieval import RetrievalSetting
from h3kv.core.types import DType, Encoding
from h3kv.engine.page_cache import PageCacheStatistics
from h3kv.engine.pool import SETTLE_NS
from h3kv.models.export import export_folder
from h3kv.models.loader import LoadedModel
from h3kv.node import Node
from h3kv.tiers.index_store import IndexStore

PEER_STEPS: Final = 8

WARM_STEPS: Final = 8
"""Until the page cache holds what steps take again."""

PAGE_SHARE: Final = 3
"""Part of HOST that is the page cache."""


@dataclass(frozen=True, slots=True)
class Sizes:
    """How long the contexts are."""

    text_tokens: int
    """Really read, then repeated."""
    exact_tokens: int
    """Of the context that exact attention is measured at, against a peer."""
    retrieval_tokens: int
    steps: int
    """Of each contestant in each repetition."""
    caps: TokenCaps
    """Of the cold contestant."""
    retrieval: RetrievalSetting


FULL: Final = Sizes(
    text_tokens=8192,
    exact_tokens=32_768,
    retrieval_tokens=131_072,
    steps=8,
    caps=TokenCaps(device_tokens=4096, window_tokens=1024, host_tokens=16_384, chunk_tokens=1024),
    retrieval=RetrievalSetting(budget_tokens=2048),
)
QUICK: Final = dataclasses.replace(FULL, text_tokens=2048, exact_tokens=8192, retrieval_tokens=16_384, steps=4)


@dataclass(frozen=True, slots=True)
class _Shared:
    """What all measurements of one run use."""

    setting: TieredSetting
    sizes: Sizes
    model: LoadedModel
    source: TiledKv


def run(
    results: Results, setting: TieredSetting, sizes: Sizes, *, named: NamedText, peer_python: str | None, peers: bool
) -> None:
    """Fill the contexts, then let the contestants take turns.

    Args:
        results: receives `decode.*`.
        setting: model and place of the store.
        sizes: of the contexts.
        named: text of the contexts.
        peer_python: interpreter of the peer.
        peers: whether it takes part.

    Raises:
        ConfigError: the text is too short.
    """
    slack = sizes.steps * (setting.repetitions + 2) * 3 + BLOCK_TOKENS
    model = load_reaching(setting.model, dtype=DType.BF16, context_tokens=sizes.retrieval_tokens + slack)
    setting.progress(f"reading {sizes.text_tokens} tokens of {named.name}")
    source = TiledKv(model, take_tokens(model, named, sizes.text_tokens))
    shared = _Shared(setting, sizes, model, source)
    _exact(results, shared, peer_python=peer_python, peers=peers)
    _retrieval(results, shared)
    _cold(results, shared)
    sealing.run(results, model, source, repetitions=setting.repetitions, progress=setting.progress)
    with store_folder(setting) as folder:
        layout = kv_layout(model, Encoding.RAW)
        codec.run(results, codec.Setting(folder, layout, 4, setting.repetitions, setting.progress))


def _exact(results: Results, shared: _Shared, *, peer_python: str | None, peers: bool) -> None:
    """All tokens in k8v4, over the time to read weights and codes once, and against a peer."""
    setting, sizes = shared.setting, shared.sizes
    name = f"decode {label(sizes.exact_tokens)}, exact k8v4"
    rounds, limit = Rounds(), ReadLimit()
    with contextlib.ExitStack() as stack:
        node = stack.enter_context(_resident(shared, sizes.exact_tokens))
        sequence = stack.enter_context(_filled(node, shared, sizes.exact_tokens))
        peer = stack.enter_context(_peers(shared, peer_python)) if peers else []
        for contestant in peer:
            setting.progress(f"{name}: {contestant.name} reads its prompt")
            contestant.start(random_tokens(shared.model, sizes.exact_tokens, seed=0))
        for repetition in range(setting.repetitions):
            bandwidth = limit.bytes_per_second()
            step_bytes = weight_bytes(shared.model) + _exact_bytes(shared.model, sequence.kv.tokens)
            rounds.add("limit", step_bytes / bandwidth * 1e3)
            contestants: list[str | Contestant] = ["h3", *peer]
            for one in turns(contestants, repetition):
                if isinstance(one, str):
                    rounds.add("h3", _median_ms(sequence, sizes.steps))
                    setting.progress(
                        f"{name}: {rounds.values['h3'][-1]:.1f} ms, limit {rounds.values['limit'][-1]:.1f}"
                    )
                else:
                    rounds.add("peer", statistics.median(one.steps(PEER_STEPS)[0]) * 1e3)
                    setting.progress(f"{name}, {one.name}: {rounds.values['peer'][-1]:.1f} ms")
    prefix = f"decode.{label(sizes.exact_tokens)}.k8v4"
    results.put(f"{prefix}.ms", rounds.median("h3"))
    results.put(f"{prefix}.over_limit", rounds.ratio("h3", "limit"))
    if peer:
        results.put(f"{prefix}.speedup_vs_{peer[0].name}", rounds.ratio("peer", "h3"))


def _retrieval(results: Results, shared: _Shared) -> None:
    """Retrieval and exact attention in turn over one context."""
    setting, sizes = shared.setting, shared.sizes
    where = label(sizes.retrieval_tokens)
    rounds, limit = Rounds(), ReadLimit()
    with contextlib.ExitStack() as stack:
        node = stack.enter_context(_resident(shared, sizes.retrieval_tokens))
        sequence = stack.enter_context(_filled(node, shared, sizes.retrieval_tokens))
        for repetition in range(setting.repetitions):
            bandwidth = limit.bytes_per_second()
            for contestant in turns(["exact", "retrieval"], repetition):
                sequence.kv.retrieval = sizes.retrieval if contestant == "retrieval" else None
                before = sequence.kv.cache.meter.read_bytes
                rounds.add(contestant, _median_ms(sequence, sizes.steps))
                if contestant == "retrieval":
                    read_bytes = (sequence.kv.cache.meter.read_bytes - before) / sizes.steps
                    read_bytes += weight_bytes(shared.model) + _exact_bytes(shared.model, sizes.caps.window_tokens)
                    rounds.add("limit", read_bytes / bandwidth * 1e3)
                setting.progress(f"decode {where}, {contestant}: {rounds.values[contestant][-1]:.1f} ms a token")
    prefix = f"decode.retrieval.{where}"
    results.put(f"{prefix}_ms", rounds.median("retrieval"))
    results.put(f"{prefix}_exact_ms", rounds.median("exact"))
    results.put(f"{prefix}.limit_ms", rounds.median("limit"))
    results.put(f"{prefix}.over_limit", rounds.ratio("retrieval", "limit"))
    results.put(f"{prefix}_speedup", rounds.ratio("exact", "retrieval"))
    results.put(f"{prefix}.shortlist_share", sizes.retrieval.shortlist_share)


def _cold(results: Results, shared: _Shared) -> None:
    """Retrieval with most pages in the cold store, with and without reading ahead, against all of them in HOST."""
    setting, sizes = shared.setting, shared.sizes
    tokens = sizes.retrieval_tokens
    rounds = Rounds()
    with contextlib.ExitStack() as stack:
        all_host = dataclasses.replace(sizes.caps, host_tokens=tokens + 4 * SEGMENT_TOKENS_MAX)
        nodes = {"host": open_tiered(shared.model, all_host, store=None, encoding=Encoding.K8V4)}
        for name in ("cold", "cold_unread"):
            store = stack.enter_context(store_folder(setting))
            nodes[name] = _open_cold(shared, store, reads_ahead=name == "cold")
        sequences = {}
        for name, node in nodes.items():
            stack.enter_context(node)
            sequences[name] = stack.enter_context(_filled(node, shared, tokens))
            sequences[name].kv.retrieval = sizes.retrieval
            for _ in range(WARM_STEPS):
                sequences[name].step()
        before = {name: _page_statistics(node) for name, node in nodes.items() if name != "host"}
        for repetition in range(setting.repetitions):
            for name in turns(sequences, repetition):
                seconds = [sequences[name].step() for _ in range(sizes.steps)]
                rounds.add(name, statistics.median(seconds) * 1e3)
                rounds.add(f"{name} whole", sum(seconds))
                setting.progress(f"decode {label(tokens)}, pages {name}: {rounds.values[name][-1]:.1f} ms a token")
        for name, old in before.items():
            prefix = "decode.cold" if name == "cold" else "decode.cold.without_prefetch"
            whole_s = sum(rounds.values[f"{name} whole"])
            _put_pages(results, prefix, old, _page_statistics(nodes[name]), seconds=whole_s)
    results.put("decode.cold.ms", rounds.median("cold"))
    results.put("decode.cold.host_ms", rounds.median("host"))
    results.put("decode.cold.speed_fraction", rounds.ratio("host", "cold"))
    results.put("decode.cold.prefetch_speedup", rounds.ratio("cold_unread", "cold"))


def _open_cold(shared: _Shared, store: Path, *, reads_ahead: bool) -> Node:
    sizes, layout = shared.sizes, kv_layout(shared.model, Encoding.K8V4)
    tokens = sizes.retrieval_tokens + 4 * SEGMENT_TOKENS_MAX
    # A cap in tokens means their bytes in bf16, whatever the encoding.
    host_tokens = sizes.caps.host_tokens * kv_layout(shared.model).block_bytes // layout.block_bytes
    return open_tiered(
        shared.model,
        dataclasses.replace(sizes.caps, host_tokens=host_tokens),
        store=store,
        store_tokens=tokens,
        encoding=Encoding.K8V4,
        index_bytes=tokens // SEGMENT_TOKENS_MAX * layout.layers * IndexStore.layer_bytes(layout),
        page_cache_bytes=kv_bytes(layout, host_tokens) // PAGE_SHARE,
        reads_pages_ahead=reads_ahead,
    )


def _page_statistics(node: Node) -> PageCacheStatistics:
    assert node.pool.pages is not None
    return node.pool.pages.statistics()


def _put_pages(
    results: Results, prefix: str, before: PageCacheStatistics, after: PageCacheStatistics, *, seconds: float
) -> None:
    """What taking pages cost between two moments."""
    new, old = after.units, before.units
    taken = new.hits + new.late + new.misses - old.hits - old.late - old.misses
    results.put(f"{prefix}.stall_fraction", (after.stall_ns - before.stall_ns) / 1e9 / seconds)
    results.put(f"{prefix}.selected_attended", 1 - (after.absent - before.absent) / max(taken, 1))
    results.put(f"{prefix}.demand_misses", (new.misses - old.misses) / max(taken, 1))
    results.put(f"{prefix}.late", (new.late - old.late) / max(taken, 1))
    waits = (after.waits - before.waits).statistics()
    results.put(f"{prefix}.page_wait_us_p50", waits.p50_ns / 1e3)
    results.put(f"{prefix}.page_wait_us_p99", waits.p99_ns / 1e3)
    results.put(f"{prefix}.page_wait_us_sd", waits.sd_ns / 1e3)


@contextlib.contextmanager
def _filled(node: Node, shared: _Shared, tokens: int) -> Iterator[LongSequence]:
    """A sequence that has taken its first step, closed at the end."""
    shared.setting.progress(f"filling {label(tokens)} tokens")
    sequence = LongSequence(node, decoder_of(shared.model))
    try:
        # From the beginning: indexes of what leaves HOST stay in memory.
        sequence.kv.retrieval = shared.sizes.retrieval
        sequence.fill(tokens, shared.sizes.caps.chunk_tokens, shared.source)
        node.pool.placer.settle(SETTLE_NS)
        sequence.kv.retrieval = None
        sequence.step()
        yield sequence
    finally:
        sequence.close()


def _resident(shared: _Shared, tokens: int) -> Node:
    chunk = shared.sizes.caps.chunk_tokens
    context_tokens = tokens + SEGMENT_TOKENS_MAX
    return open_resident(shared.model, context_tokens=context_tokens, chunk_tokens=chunk, encoding=Encoding.K8V4)


@contextlib.contextmanager
def _peers(shared: _Shared, peer_python: str | None) -> Iterator[Sequence[Contestant]]:
    """VLLM with the model, where it is installed."""
    context_tokens = shared.sizes.exact_tokens + PEER_STEPS * (shared.setting.repetitions + 1)
    with tempfile.TemporaryDirectory(prefix="h3-bench-") as folder:
        model = load_reaching(shared.setting.model, dtype=DType.BF16, context_tokens=context_tokens)
        export_folder(model, Path(folder) / "model", dtype=DType.BF16)
        with open_peers(
            ("vllm",),
            Path(folder) / "model",
            peer_python=peer_python,
            dtype=DType.BF16,
            context_tokens=context_tokens,
            progress=shared.setting.progress,
        ) as peers:
            yield peers


def _median_ms(sequence: LongSequence, steps: int) -> float:
    return statistics.median(sequence.step() for _ in range(steps)) * 1e3


def _exact_bytes(model: LoadedModel, tokens: int) -> int:
    """Bytes of codes and scales that exact attention reads of so many tokens."""
    layout = kv_layout(model, Encoding.K8V4)
    page = layout.slab.page
    page_bytes = page.keys_bytes + page.values_bytes + page.nibbles_bytes + SCALES_BYTES
    return tokens * layout.layers * layout.slab.kv_heads * page_bytes // BLOCK_TOKENS
