"""Decode at a long context: everything in HOST against everything on the device, and most of it in the cold store.

Shapes: T tokens of a chunk, H query heads, K KV heads, D head dim.
"""

from __future__ import annotations

import contextlib
import dataclasses
import statistics
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import torch

from h3kv.bench.disk import DiskLimit
from h3kv.bench.injected import KvSource, RandomKv
from h3kv.bench.measure import Rounds, turns
from h3kv.bench.results import Results
from h3kv.bench.scoring import decoder_of
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
from h3kv.core.limits import SEGMENT_TOKENS_MAX
from h3kv.core.types import DType
from h3kv.engine.pool import SETTLE_NS
from h3kv.engine.sequence_kv import SequenceKv
from h3kv.models.decoder import Decoder
from h3kv.models.loader import LoadedModel
from h3kv.node import Node
from h3kv.tiers.cold.place import STORE_FILE

DISK_SHARE: Final = 0.25
"""Seconds of measuring the device for each second of cold decode."""


@dataclass(frozen=True, slots=True)
class Sizes:
    """How long the context is, and what of it memory holds."""

    context_tokens: int
    steps: int
    """Of each contestant in each repetition."""
    caps: TokenCaps


CAPS: Final = TokenCaps(device_tokens=2048, window_tokens=1024, host_tokens=4096, chunk_tokens=896)
FULL: Final = Sizes(32_768, 6, CAPS)
QUICK: Final = Sizes(8192, 3, CAPS)


class LongSequence:
    """A context of given keys and values in a node's pool, and steps of decode behind it.

    They take seconds where a prefill takes minutes; they go the way of a prefill's, but for its attention.
    """

    def __init__(self, node: Node, decoder: Decoder) -> None:
        self._node = node
        self._decoder = decoder
        self.kv: SequenceKv = node.pool.open_private()
        self._token = 0

    def fill(self, tokens: int, chunk_tokens: int, source: KvSource) -> None:
        """Grow by so many tokens."""
        for start in range(0, tokens, chunk_tokens):
            count = min(chunk_tokens, tokens - start)
            self._node.pool.tick()
            self.kv.prepare(count, reads_ahead=False)
            for layer in range(self._decoder.config.layers):
                self.kv.cache.append(layer, *source.chunk(layer, start, count))
            self.kv.advance(count)
            self.kv.settle(())

    def step(self) -> float:
        """Decode one token, as the engine does. Returns its seconds."""
        begin_ns = time.perf_counter_ns()
        self._node.pool.tick()
        self.kv.prepare(1)
        logits_TV = self._decoder.forward(torch.tensor([self._token]), self.kv, logits="last")
        self._token = int(logits_TV[-1].argmax())
        self.kv.settle(())
        return (time.perf_counter_ns() - begin_ns) / 1e9

    def cold_bytes(self) -> int:
        """What a step must read from the cold store: slabs whose segments are nowhere else."""
        segments = self._node.pool.segments
        blocks = sum(segment.room_blocks for segment in segments.sealed() if segment.home_L is None)
        return blocks * segments.layout.block_bytes

    def close(self) -> None:
        """Give the KV back."""
        self._node.pool.close_sequence(self.kv, ())


def run(results: Results, setting: TieredSetting, sizes: Sizes) -> None:
    """Fill the contexts, then let the contestants take turns.

    Args:
        results: receives `decode.*`.
        setting: model and place of the store.
        sizes: of the contexts.

    Raises:
        ConfigError: nothing was read from the cold store.
    """
    reach_tokens = sizes.context_tokens + sizes.steps * (setting.repetitions + 1) + 1
    model = load_reaching(setting.model, dtype=DType.BF16, context_tokens=reach_tokens)
    _host(results, setting, sizes, model)
    with store_folder(setting) as store:
        _cold(results, setting, sizes, model=model, store=store)


def _host(results: Results, setting: TieredSetting, sizes: Sizes, model: LoadedModel) -> None:
    """All in HOST but the window, over all on the device."""
    name = f"decode {label(sizes.context_tokens)}"
    caps = dataclasses.replace(sizes.caps, host_tokens=sizes.context_tokens + 3 * SEGMENT_TOKENS_MAX)
    rounds = Rounds()
    with contextlib.ExitStack() as stack:
        contestants = {}
        for contestant in ("resident", "host"):
            setting.progress(f"{name}, {contestant}: filling it with random keys and values")
            node = (
                open_tiered(model, caps, store=None)
                if contestant == "host"
                else open_resident(
                    model, context_tokens=sizes.context_tokens + SEGMENT_TOKENS_MAX, chunk_tokens=caps.chunk_tokens
                )
            )
            stack.enter_context(node)
            contestants[contestant] = stack.enter_context(_filled(node, model, sizes))
        for _ in range(setting.repetitions):
            # Step by step in turn, so that both see the same disturbances.
            seconds: dict[str, list[float]] = {}
            for step in range(sizes.steps):
                for contestant, sequence in turns(contestants.items(), step):
                    seconds.setdefault(contestant, []).append(sequence.step())
            for contestant, values in seconds.items():
                rounds.add(contestant, statistics.median(values) * 1e3)
                setting.progress(f"{name}, {contestant}: {rounds.values[contestant][-1]:.1f} ms a token")
    prefix = f"decode.{label(sizes.context_tokens)}"
    results.put(f"{prefix}.resident_ms", rounds.median("resident"))
    results.put(f"{prefix}.host_ms", rounds.median("host"))
    results.put(f"{prefix}.host_over_resident", rounds.ratio("host", "resident"))


def _cold(results: Results, setting: TieredSetting, sizes: Sizes, *, model: LoadedModel, store: Path) -> None:
    """Most of it in the cold store, over the time that the device takes to read that."""
    name = f"decode {label(sizes.context_tokens)}, cold"
    rounds = Rounds()
    with contextlib.ExitStack() as stack:
        node = stack.enter_context(open_tiered(model, sizes.caps, store=store, store_tokens=sizes.context_tokens))
        setting.progress(f"{name}: filling it with random keys and values")
        sequence = stack.enter_context(_filled(node, model, sizes))
        limit = stack.enter_context(DiskLimit(store / STORE_FILE))
        tell_store(store, setting.progress, is_direct=limit.is_direct)
        assert node.pool.stream is not None
        for _ in range(setting.repetitions):
            # The staging slots were filled while the device was measured: the first step reads less and does not count.
            sequence.step()
            before_bytes = node.pool.stream.bytes_fetched_total
            seconds = [sequence.step() for _ in range(sizes.steps)]
            read_bytes = (node.pool.stream.bytes_fetched_total - before_bytes) / sizes.steps
            bandwidth = limit.bytes_per_second(DISK_SHARE * sum(seconds))
            rounds.add("cold", statistics.median(seconds) * 1e3)
            rounds.add("limit", sequence.cold_bytes() / bandwidth * 1e3)
            rounds.add("read_over_cold", read_bytes / max(sequence.cold_bytes(), 1))
            rounds.add("bandwidth", bandwidth)
            setting.progress(
                f"{name}: {rounds.values['cold'][-1]:.0f} ms a token; reading {sequence.cold_bytes() >> 20} MiB at "
                f"{bandwidth / 1e9:.2f} GB/s takes {rounds.values['limit'][-1]:.0f}"
            )
        require_streaming(node)
    prefix = f"decode.{label(sizes.context_tokens)}"
    results.put(f"{prefix}.cold_ms", rounds.median("cold"))
    results.put(f"{prefix}.cold_disk_gb_per_s", rounds.median("bandwidth") / 1e9)
    results.put(f"{prefix}.cold_bytes_read_over_needed", rounds.median("read_over_cold"))
    results.put(f"{prefix}.cold_over_limit", rounds.ratio("cold", "limit"))


@contextlib.contextmanager
def _filled(node: Node, model: LoadedModel, sizes: Sizes) -> Iterator[LongSequence]:
    """A sequence that has taken its first step, closed at the end."""
    sequence = LongSequence(node, decoder_of(model))
    try:
        sequence.fill(sizes.context_tokens, sizes.caps.chunk_tokens, RandomKv(model))
        node.pool.placer.settle(SETTLE_NS)
        sequence.step()
        yield sequence
    finally:
        sequence.close()
