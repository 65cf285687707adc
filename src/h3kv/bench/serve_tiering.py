"""What tiers cost a server where nothing is ever reused: a node whose caps push all of it out, and one without."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from h3kv.bench.measure import Progress, Rounds, turns
from h3kv.bench.results import Results
from h3kv.bench.serve_client import Target
from h3kv.bench.serve_figures import prompt_rate
from h3kv.bench.serve_load import all_at_once
from h3kv.bench.serve_prompts import Prompts
from h3kv.core.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Sizes:
    """Requests of one round, and caps that push their KV out to the store all the time."""

    requests: int
    """That run together."""
    prompt_tokens: int
    answer_tokens: int
    rounds: int
    on_caps: tuple[str, ...]
    """Flags of `h3 up`."""
    off_tokens: int
    """That the device holds without tiers."""


FULL: Final = Sizes(
    4,
    2048,
    16,
    9,
    ("--device-kv", "8192tokens", "--window", "1024", "--host-kv", "128MiB", "--store-capacity", "4GiB"),
    4 * 2560,
)
QUICK: Final = Sizes(
    2,
    512,
    4,
    1,
    ("--device-kv", "2048tokens", "--window", "256", "--host-kv", "96MiB", "--store-capacity", "1GiB"),
    2048,
)


def measure(results: Results, targets: Sequence[Target], prompts: Prompts, *, sizes: Sizes, progress: Progress) -> None:
    """Put `serve.noreuse.*`: prompt tokens per second, answers included, with tiers and without, and their ratio.

    Args:
        results: where they go.
        targets: `on`, the node with tiers, and `off`.
        prompts: draws them.
        sizes: how much.
        progress: hears each round.

    Raises:
        ConfigError: something was reused.
        RequestError: a server refuses.
        PeerError: a server goes away.
    """
    rounds = Rounds()
    for repetition in range(-1, sizes.rounds):
        asks = prompts.unshared(
            sizes.requests,
            "noreuse",
            repetition,
            prompt_tokens=sizes.prompt_tokens,
            answer_tokens=sizes.answer_tokens,
        )
        for target in turns(targets, repetition):
            answers = asyncio.run(all_at_once(target, asks))
            if any(answer.cached_tokens for answer in answers):
                raise ConfigError("two prompts begin alike: choose a model with a larger vocabulary", field="model")
            if repetition < 0:
                continue  # Memory is touched for the first time, and HOST is not full yet.
            rounds.add(target.name, prompt_rate(answers))
            progress(f"no reuse, tiers {target.name}: {prompt_rate(answers):.0f} prompt tokens/s")
    results.put("serve.noreuse.on_tokens_per_s", rounds.median("on"))
    results.put("serve.noreuse.off_tokens_per_s", rounds.median("off"))
    results.put("serve.noreuse.fraction", rounds.ratio("on", "off"))
