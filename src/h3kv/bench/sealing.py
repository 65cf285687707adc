"""What sealing costs, over reading the same tokens.

Shapes: L layers, K KV heads, N pages.
"""

from __future__ import annotations

import time
from typing import Final

import numpy as np
import torch

from h3kv.attention import native, sealing
from h3kv.attention.native import PAGE_DTYPE, RunOffsets
from h3kv.bench.injected import CHUNK_TOKENS, KvSource
from h3kv.bench.limit import huge_buffer
from h3kv.bench.measure import Progress, Rounds, seconds_of
from h3kv.bench.results import Results
from h3kv.bench.scoring import decoder_of
from h3kv.bench.tiered import kv_layout, open_resident, random_tokens
from h3kv.core.layout import CacheLayout
from h3kv.core.limits import BLOCK_TOKENS, SEGMENT_BLOCKS_MAX, SEGMENT_TOKENS_MAX, SINK_BLOCKS
from h3kv.core.types import Encoding
from h3kv.engine.needs import TieringConfig
from h3kv.models.loader import LoadedModel

PREFILL_TOKENS: Final = 4 * CHUNK_TOKENS


def run(results: Results, model: LoadedModel, source: KvSource, *, repetitions: int, progress: Progress) -> None:
    """Seal one segment in all layers, and read as many tokens of a prompt of 4K, in turn.

    Args:
        results: receives `seal.*`.
        model: reads the prompt.
        source: of the keys and values that are sealed.
        repetitions: of both.
        progress: hears the times.
    """
    layout = kv_layout(model, Encoding.K8V4)
    slab_bytes = layout.slab.size_bytes(SEGMENT_BLOCKS_MAX)
    filled = _filled_slabs(layout, source)
    work = huge_buffer(filled.numel())
    slabs_L = work.data_ptr() + np.arange(layout.layers, dtype=np.uint64) * np.uint64(slab_bytes)
    rounds = Rounds()
    for repetition in range(repetitions):
        work.copy_(filled)
        rounds.add("seal", seconds_of(lambda: sealing.seal(slabs_L, layout=layout.slab, blocks=SEGMENT_BLOCKS_MAX)))
        # What the prompt's own segments take is no part of reading it.
        whole_s = _prefill_s(model, seed=repetition)
        sealed = (PREFILL_TOKENS - TieringConfig().window_tokens - SINK_BLOCKS * BLOCK_TOKENS) // SEGMENT_TOKENS_MAX
        rounds.add("prefill", (whole_s - sealed * rounds.values["seal"][-1]) * SEGMENT_TOKENS_MAX / PREFILL_TOKENS)
        progress(
            f"sealing 1,024 tokens: {rounds.values['seal'][-1] * 1e3:.0f} ms; reading them "
            f"{rounds.values['prefill'][-1] * 1e3:.0f} ms"
        )
    results.put("seal.ms", rounds.median("seal") * 1e3)
    results.put("seal.prefill_ms", rounds.median("prefill") * 1e3)
    results.put("seal.over_prefill", rounds.ratio("seal", "prefill"))


def _filled_slabs(layout: CacheLayout, source: KvSource) -> torch.Tensor:
    """One segment's slabs before they are sealed, all layers behind each other."""
    slab = layout.slab
    slab_bytes = slab.size_bytes(SEGMENT_BLOCKS_MAX)
    memory = huge_buffer(layout.layers * slab_bytes)
    offsets = RunOffsets.of(slab, range(SEGMENT_BLOCKS_MAX), room_blocks=SEGMENT_BLOCKS_MAX)
    table_KN = np.zeros((slab.kv_heads, SEGMENT_BLOCKS_MAX), dtype=PAGE_DTYPE)
    for layer in range(layout.layers):
        address = memory.data_ptr() + layer * slab_bytes
        native.write_addresses(table_KN, 0, address, offsets, layout=slab.page)
        k_TKD, v_TKD = source.chunk(layer, 0, SEGMENT_TOKENS_MAX)
        native.append(k_TKD.contiguous(), v_TKD.contiguous(), table_KN, layout=slab.page, index=0)
    return memory


def _prefill_s(model: LoadedModel, *, seed: int) -> float:
    """Seconds to read a prompt in k8v4."""
    tokens = random_tokens(model, PREFILL_TOKENS, seed=seed)
    decoder = decoder_of(model)
    with open_resident(model, context_tokens=PREFILL_TOKENS, chunk_tokens=CHUNK_TOKENS, encoding=Encoding.K8V4) as node:
        kv = node.pool.open_private()
        start_ns = time.perf_counter_ns()
        for start in range(0, PREFILL_TOKENS, CHUNK_TOKENS):
            kv.prepare(CHUNK_TOKENS)
            decoder.forward(torch.tensor(tokens[start : start + CHUNK_TOKENS]), kv, logits="none")
            kv.settle(())
        seconds = (time.perf_counter_ns() - start_ns) / 1e9
        node.pool.close_sequence(kv, ())
    return seconds
