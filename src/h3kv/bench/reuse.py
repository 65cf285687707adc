"""A prefix that an earlier process left in the cold store: how soon the first token comes after a restart."""

from __future__ import annotations

import statistics
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from h3kv.bench.child import in_child, tell
from h3kv.bench.disk import DiskLimit
from h3kv.bench.measure import Rounds
from h3kv.bench.results import Results
from h3kv.bench.tiered import (
    TieredSetting,
    TokenCaps,
    kv_bytes,
    kv_layout,
    label,
    load_reaching,
    open_tiered,
    random_tokens,
    store_folder,
    tell_store,
)
from h3kv.core.errors import ConfigError
from h3kv.core.types import DType, Tier
from h3kv.engine.events import Finished, PrefillProgress
from h3kv.engine.request import Request, SamplingParameters
from h3kv.models.loader import LoadedModel
from h3kv.node import Node
from h3kv.tiers.cold.place import STORE_FILE

QUESTION_TOKENS: Final = 8
"""Of a request behind the prefix; they are computed in any case."""

STEPS: Final = 16
"""Tokens of the answer, whose median step is the decode step."""


@dataclass(frozen=True, slots=True)
class Sizes:
    """How long the prefix is. HOST holds all of it, but is empty at the start."""

    prefix_tokens: int
    caps: TokenCaps


FULL: Final = Sizes(8192, TokenCaps(device_tokens=2048, window_tokens=1024, host_tokens=16_384, chunk_tokens=896))
QUICK: Final = Sizes(2048, FULL.caps)


@dataclass(frozen=True, slots=True)
class Job:
    """What a process does with a store."""

    model: str
    store: Path
    sizes: Sizes
    repetitions: int


@dataclass(frozen=True, slots=True)
class Answered:
    """One request. Times are seconds."""

    first_token_s: float
    step_s: float
    cached_tokens: int


def run(results: Results, setting: TieredSetting, sizes: Sizes) -> None:
    """Leave a prefix behind in one process, and find it in another.

    Args:
        results: receives `reuse.*`.
        setting: model and place of the store.
        sizes: of the prefix.

    Raises:
        ConfigError: the prefix was not found.
    """
    name = f"reuse.{label(sizes.prefix_tokens)}"
    with store_folder(setting) as store:
        job = Job(setting.model, store, sizes, setting.repetitions)
        setting.progress(f"{name}: one process reads the prefix, and ends")
        prefill_s = in_child(leave, job)
        setting.progress(f"{name}: another one finds it, {setting.repetitions} times with an empty memory")
        rounds = Rounds(in_child(find, job))
    results.put(f"{name}.prefill_s", prefill_s)
    results.put(f"{name}.ttft_s", rounds.median("first_token"))
    results.put(f"{name}.limit_s", rounds.median("limit"))
    results.put(f"{name}.disk_gb_per_s", rounds.median("bandwidth") / 1e9)
    results.put(f"{name}.ttft_over_limit", rounds.ratio("first_token", "limit"))
    results.put(f"{name}.ttft_speedup", prefill_s / rounds.median("first_token"))


def leave(job: Job) -> float:
    """Seconds to the first token with an empty store, which holds the prefix afterwards."""
    model, layout_tokens = _load(job)
    with open_tiered(model, job.sizes.caps, store=job.store, store_tokens=layout_tokens) as node:
        return _answer(node, _prompt(model, job.sizes, question=0)).first_token_s


def find(job: Job) -> dict[str, list[float]]:
    """Seconds to the first token, and their limit, of one request after another, each in a node of its own.

    Raises:
        ConfigError: the prefix is not in the store.
    """
    model, layout_tokens = _load(job)
    prefix_bytes = kv_bytes(kv_layout(model), job.sizes.prefix_tokens)
    rounds = Rounds()
    for repetition in range(job.repetitions):
        with (
            open_tiered(model, job.sizes.caps, store=job.store, store_tokens=layout_tokens) as node,
            DiskLimit(job.store / STORE_FILE) as disk,
        ):
            if repetition == 0:
                tell_store(job.store, tell, is_direct=disk.is_direct)
            prompt = _prompt(model, job.sizes, question=repetition + 1)
            answered = _answer(node, prompt)
            bandwidth = disk.bytes_per_second()
        if answered.cached_tokens < job.sizes.prefix_tokens:
            raise ConfigError(
                f"{answered.cached_tokens} of {job.sizes.prefix_tokens} tokens were found in {job.store}: give "
                "a --store with more free space",
                field="store",
            )
        rounds.add("first_token", answered.first_token_s)
        rounds.add("limit", prefix_bytes / bandwidth + answered.step_s)
        rounds.add("bandwidth", bandwidth)
        tell(
            f"reuse: first token after {answered.first_token_s * 1e3:.0f} ms; reading {prefix_bytes >> 20} MiB takes "
            f"{prefix_bytes / bandwidth * 1e3:.0f} ms, a step takes {answered.step_s * 1e3:.0f} ms"
        )
    return rounds.values


def _load(job: Job) -> tuple[LoadedModel, int]:
    """The model, and the tokens that it must reach and the store hold."""
    tokens = job.sizes.prefix_tokens + QUESTION_TOKENS + STEPS
    return load_reaching(job.model, dtype=DType.BF16, context_tokens=tokens), tokens


def _prompt(model: LoadedModel, sizes: Sizes, *, question: int) -> tuple[int, ...]:
    prefix = random_tokens(model, sizes.prefix_tokens, seed=0)
    return (*prefix, *random_tokens(model, QUESTION_TOKENS, seed=question + 1))


def _answer(node: Node, prompt: tuple[int, ...]) -> Answered:
    """Answer a request. The step is one of those with all KV in memory, late in the answer."""
    sampling = SamplingParameters(max_new_tokens=STEPS, ignore_eos=True)
    begin_ns = time.perf_counter_ns()
    for event in node.engine.generate(Request(prompt=prompt, sampling=sampling)):
        if isinstance(event, PrefillProgress):
            tell(f"reuse: {event.done_tokens} of {event.prompt_tokens} tokens after {_since(begin_ns):.2f} s")
        if isinstance(event, Finished):
            found = event.statistics
            assert found.time_to_first_token_ns is not None
            late_ns = found.inter_token_ns[len(found.inter_token_ns) // 2 :]
            return Answered(
                found.time_to_first_token_ns / 1e9,
                statistics.median(late_ns) / 1e9,
                found.cached_tokens.get(Tier.NVME, 0),
            )
    raise AssertionError("a request ends with Finished, or raises")


def _since(begin_ns: int) -> float:
    return (time.perf_counter_ns() - begin_ns) / 1e9
