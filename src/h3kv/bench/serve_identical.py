"""Greedy answers that do not depend on what else runs: requests of all lengths one after another, then all at once."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Final

from h3kv.bench.measure import Progress
from h3kv.bench.results import Results
from h3kv.bench.serve_client import Answer, Target
from h3kv.bench.serve_load import all_at_once, one_by_one
from h3kv.bench.serve_prompts import Prompts


@dataclass(frozen=True, slots=True)
class Sizes:
    """Requests whose lengths lie between two numbers."""

    requests: int
    prompt_tokens: tuple[int, int]
    answer_tokens: tuple[int, int]


FULL: Final = Sizes(100, (1, 1500), (8, 64))
QUICK: Final = Sizes(8, (1, 200), (2, 8))
CAPS: Final = ("--dtype", "fp32", "--device-kv", "4GiB", "--host-kv", "2GiB")

Opened = Callable[[], AbstractContextManager[Target]]


def measure(results: Results, opened: Opened, prompts: Prompts, *, sizes: Sizes, progress: Progress) -> None:
    """Put `serve.batch_identical`, how many answers are equal, and how many requests there were.

    Args:
        results: where they go.
        opened: a new server for each of the two ways, so that none finds the prompts of the other.
        prompts: draws them.
        sizes: how much.
        progress: hears what differs.

    Raises:
        RequestError: a server refuses.
        PeerError: a server goes away.
    """
    asks = prompts.mixed(sizes.requests, prompt_tokens=sizes.prompt_tokens, answer_tokens=sizes.answer_tokens)
    progress(f"identical: {len(asks)} requests one after another, then together")
    with opened() as target:
        alone = asyncio.run(one_by_one(target, asks))
    with opened() as target:
        together = asyncio.run(all_at_once(target, asks))
    differing = [number for number, pair in enumerate(zip(alone, together, strict=True)) if not _are_equal(*pair)]
    for number in differing:
        progress(f"identical: request {number} of {len(asks[number].prompt)} tokens has two answers")
    results.put("serve.batch_identical", len(asks) - len(differing))
    results.put("serve.batch_identical_of", len(asks))


def _are_equal(one: Answer, other: Answer) -> bool:
    return one.text == other.text and one.answer_tokens == other.answer_tokens
