"""What three tiers cost where nothing is ever reused: prompts without a common beginning, tiering on against off."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from h3kv.bench.disk import DiskLimit
from h3kv.bench.measure import Rounds, turns
from h3kv.bench.results import Results
from h3kv.bench.tiered import (
    TieredSetting,
    TokenCaps,
    load_reaching,
    open_resident,
    open_tiered,
    random_tokens,
    store_folder,
    tell_store,
)
from h3kv.core.errors import ConfigError
from h3kv.core.types import DType, Tier
from h3kv.core.units import NS_PER_S
from h3kv.engine.events import Finished
from h3kv.engine.pool import SETTLE_NS
from h3kv.engine.request import Request, SamplingParameters
from h3kv.node import Node
from h3kv.telemetry import names
from h3kv.tiers.cold.place import STORE_FILE


@dataclass(frozen=True, slots=True)
class Sizes:
    """Requests of one repetition, and caps that push their segments out to the store all the time."""

    prompts: int
    prompt_tokens: int
    answer_tokens: int
    caps: TokenCaps


FULL: Final = Sizes(4, 2048, 16, TokenCaps(device_tokens=4096, window_tokens=1024, host_tokens=2048, chunk_tokens=1024))
QUICK: Final = Sizes(2, 2048, 16, FULL.caps)


def run(results: Results, setting: TieredSetting, sizes: Sizes, *, suffix: str = "") -> None:
    """Run new prompts through both nodes in turn.

    Args:
        results: receives `noreuse.*`.
        setting: model and place of the store.
        sizes: of prompts and caps.
        suffix: of the metrics' group, for sizes that are not the full ones.

    Raises:
        ConfigError: nothing was written to the store, it was too slow, or something was reused.
    """
    context_tokens = sizes.prompt_tokens + sizes.answer_tokens
    model = load_reaching(setting.model, dtype=DType.BF16, context_tokens=context_tokens)
    store_tokens = (setting.repetitions + 1) * sizes.prompts * context_tokens
    rounds = Rounds()
    with (
        store_folder(setting) as store,
        open_tiered(model, sizes.caps, store=store, store_tokens=store_tokens) as tiered,
        open_resident(model, context_tokens=context_tokens, chunk_tokens=sizes.caps.chunk_tokens) as resident,
    ):
        nodes = {"on": tiered, "off": resident}
        for repetition in range(-1, setting.repetitions):
            prompts = [
                random_tokens(model, sizes.prompt_tokens, seed=(repetition + 1) * sizes.prompts + number)
                for number in range(sizes.prompts)
            ]
            for name, node in turns(nodes.items(), repetition):
                rate = tokens_per_second(node, prompts, sizes)
                if repetition < 0:
                    continue  # Memory is touched for the first time, and HOST is not full yet.
                rounds.add(name, rate)
                setting.progress(f"no reuse, tiering {name}: {rate:.0f} prompt tokens/s")
        _check_written(tiered, store, setting)
    group = f"noreuse{suffix}"
    results.put(f"{group}.on_tokens_per_s", rounds.median("on"))
    results.put(f"{group}.off_tokens_per_s", rounds.median("off"))
    results.put(f"{group}.fraction", rounds.ratio("on", "off"))


def tokens_per_second(node: Node, prompts: Sequence[Sequence[int]], sizes: Sizes) -> float:
    """Prompt tokens per second of requests one after another: answers included, and all that is written behind them.

    Raises:
        ConfigError: something was reused, or the cold store takes more than half a minute to write what is left.
    """
    sampling = SamplingParameters(max_new_tokens=sizes.answer_tokens, ignore_eos=True)
    begin_ns = time.perf_counter_ns()
    for prompt in prompts:
        for event in node.engine.generate(Request(prompt=tuple(prompt), sampling=sampling)):
            if isinstance(event, Finished) and event.statistics.cached_tokens_total:
                raise ConfigError("two prompts begin alike: choose a model with a larger vocabulary", field="model")
    # Nothing runs on into the time of the next contestant.
    node.pool.placer.settle(SETTLE_NS)
    elapsed_ns = time.perf_counter_ns() - begin_ns
    if node.pool.placer.is_moving:
        raise ConfigError("the cold store cannot keep up: choose a --store on a faster disk", field="store")
    return len(prompts) * sizes.prompt_tokens * NS_PER_S / elapsed_ns


def _check_written(node: Node, store: Path, setting: TieredSetting) -> None:
    written_bytes = node.telemetry.value(names.MOVED_BYTES, source=Tier.HOST, target=Tier.NVME)
    if written_bytes == 0:
        raise ConfigError(
            "HOST holds all prompts, so that nothing went to the cold store: lower its cap", field="store"
        )
    with DiskLimit(store / STORE_FILE) as limit:
        tell_store(store, setting.progress, is_direct=limit.is_direct)
    setting.progress(f"no reuse: {int(written_bytes) >> 20} MiB were written to the cold store")
