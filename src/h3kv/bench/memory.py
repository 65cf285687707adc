"""Memory stays under its caps however long the context: KV bytes over the caps, and the process at two lengths."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from h3kv.bench.child import in_child, tell
from h3kv.bench.results import Results
from h3kv.bench.tiered import (
    TieredSetting,
    TokenCaps,
    kv_bytes,
    label,
    load_reaching,
    open_tiered,
    random_tokens,
    require_streaming,
    store_folder,
)
from h3kv.core.types import DType
from h3kv.engine.events import Event, Failed, PrefillProgress
from h3kv.engine.request import Request, SamplingParameters
from h3kv.machine import forget_peak, peak_rss_bytes, resident_bytes
from h3kv.memory.region import RegionKind
from h3kv.node import Node

ANSWER_TOKENS: Final = 8


@dataclass(frozen=True, slots=True)
class Sizes:
    """Which contexts, under which caps."""

    short_tokens: int
    long_tokens: int
    caps: TokenCaps


CAPS: Final = TokenCaps(device_tokens=2048, window_tokens=1024, host_tokens=4096, chunk_tokens=896)
FULL: Final = Sizes(8192, 32_768, CAPS)
QUICK: Final = Sizes(4096, 6144, dataclasses.replace(CAPS, host_tokens=2048))


@dataclass(frozen=True, slots=True)
class Job:
    """One context for one process."""

    model: str
    store: Path
    context_tokens: int
    reach_tokens: int
    """Of the model: the same for both contexts."""
    caps: TokenCaps


@dataclass(frozen=True, slots=True)
class Peak:
    """The most that one process held while it read a prompt and began to answer."""

    kv_over_cap: float
    rss_bytes: int


def run(results: Results, setting: TieredSetting, sizes: Sizes) -> None:
    """Read a short and a long context, each in a process of its own, with the same caps.

    Args:
        results: receives `memory.*`.
        setting: model and place of the stores.
        sizes: which contexts.

    Raises:
        ConfigError: the caps are so large that the cold store is not read.
    """
    peaks = {}
    for tokens in (sizes.short_tokens, sizes.long_tokens):
        setting.progress(f"memory {label(tokens)}: a process of its own")
        with store_folder(setting) as store:
            job = Job(setting.model, store, tokens, sizes.long_tokens + ANSWER_TOKENS, sizes.caps)
            peaks[tokens] = in_child(measure, job)
    short, long = label(sizes.short_tokens), label(sizes.long_tokens)
    results.put(f"memory.{long}.kv_over_cap", peaks[sizes.long_tokens].kv_over_cap)
    results.put(f"memory.rss_{short}_mib", peaks[sizes.short_tokens].rss_bytes / (1 << 20))
    results.put(f"memory.rss_{long}_mib", peaks[sizes.long_tokens].rss_bytes / (1 << 20))
    ratio = peaks[sizes.long_tokens].rss_bytes / peaks[sizes.short_tokens].rss_bytes
    results.put(f"memory.rss_{long}_over_{short}", ratio)


def measure(job: Job) -> Peak:
    """Run one context in this process, looking at the tiers after every step of prefill and decode.

    Raises:
        ConfigError: the cold store was not read.
    """
    model = load_reaching(job.model, dtype=DType.BF16, context_tokens=job.reach_tokens)
    prompt = random_tokens(model, job.context_tokens - ANSWER_TOKENS, seed=0)
    sampling = SamplingParameters(max_new_tokens=ANSWER_TOKENS, ignore_eos=True)
    forget_peak()  # Of what loading took.
    with open_tiered(model, job.caps, store=job.store, store_tokens=job.context_tokens) as node:
        node.engine.submit(Request(prompt=tuple(prompt), sampling=sampling))
        over_cap = 0.0
        while node.engine.has_work:
            for event in node.engine.step():
                _tell(event, job)
            over_cap = max(over_cap, held_over_caps(node, job.caps))
        require_streaming(node)
        return Peak(over_cap, peak_rss_bytes())


def held_over_caps(node: Node, caps: TokenCaps) -> float:
    """Main memory behind the KV of device and HOST, whatever it is used for, over the caps as they were asked for.

    The tables in front of HOST's slots are counted: what the caps bound is what the system lacks.
    """
    assert node.stores.host is not None
    arena, region = node.stores.device.arena, node.stores.host.region
    held_bytes = resident_bytes(arena.data_ptr(), arena.numel())
    # Huge pages that were set aside are taken when the region is made.
    is_whole = region.kind is RegionKind.HUGETLB
    held_bytes += region.size_bytes if is_whole else resident_bytes(region.address, region.size_bytes)
    layout = node.stores.layout
    return held_bytes / (kv_bytes(layout, caps.device_tokens) + kv_bytes(layout, caps.host_tokens))


def _tell(event: Event, job: Job) -> None:
    if isinstance(event, Failed):
        raise event.error
    if isinstance(event, PrefillProgress):
        tell(f"memory {label(job.context_tokens)}: {event.done_tokens} of {event.prompt_tokens} tokens read")
