"""Very many short requests to a node with a tiny random model: none may fail, and memory may not grow."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from dataclasses import dataclass
from itertools import islice
from typing import Final

from h3kv.bench.measure import Progress
from h3kv.bench.results import Results
from h3kv.bench.serve_client import Answer, Ask, Target
from h3kv.bench.serve_load import over_connections
from h3kv.bench.serve_prompts import Prompts
from h3kv.bench.whole_node import WholeNode
from h3kv.core.errors import H3Error, PeerError
from h3kv.core.units import NS_PER_S

MIB: Final = 1 << 20
REPORTS: Final = 20
"""Times that progress is said."""
CAPS: Final = (  # a token has 3 KiB: a thousand requests fill all three
    *("--dtype", "fp32", "--device-kv", "16MiB", "--host-kv", "16MiB", "--window", "64"),
    *("--store-capacity", "32MiB", "--max-context", "4096"),
)


@dataclass(frozen=True, slots=True)
class Sizes:
    """How much is asked."""

    requests: int
    connections: int
    prompt_tokens: int
    """Mean length."""
    answer_tokens: int


FULL: Final = Sizes(100_000, 32, 96, 4)
QUICK: Final = Sizes(400, 8, 96, 2)


def measure(
    results: Results, target: Target, prompts: Prompts, *, sizes: Sizes, node: WholeNode | None, progress: Progress
) -> None:
    """Put `serve.soak.errors`, `serve.soak.requests_per_s` and, of a node that runs here, `serve.soak.rss_growth`.

    Growth counts over all processes, from after the first hundredth of the requests, by which all caps are full.

    Args:
        results: where they go.
        target: who is asked.
        prompts: draws them.
        sizes: how much.
        node: the processes behind the target; None: they are another's.
        progress: hears how far it is.
    """

    def check(ask: Ask, answer: Answer) -> None:
        check_whole(ask, answer, target)

    asks = prompts.short(sizes.requests, prompt_tokens=sizes.prompt_tokens, answer_tokens=sizes.answer_tokens)
    errors: list[H3Error] = []
    first, begin_ns = sizes.requests // 100, time.monotonic_ns()
    errors += asyncio.run(over_connections(target, islice(asks, first), connections=sizes.connections, check=check))
    before = None if node is None else node.holding()
    step = -(-(sizes.requests - first) // REPORTS)
    for number in range(REPORTS):
        errors += asyncio.run(over_connections(target, islice(asks, step), connections=sizes.connections, check=check))
        held = "" if node is None else f", {node.holding().resident_bytes // MIB} MiB"
        progress(f"soak: {min(first + (number + 1) * step, sizes.requests)} requests, {len(errors)} errors{held}")
    elapsed_ns = time.monotonic_ns() - begin_ns
    for said, times in Counter(map(str, errors)).most_common(3):
        progress(f"soak: {times} times: {said}")
    results.put("serve.soak.errors", len(errors))
    results.put("serve.soak.requests_per_s", sizes.requests * NS_PER_S / elapsed_ns)
    if node is not None and before is not None:
        after = node.holding()
        results.put("serve.soak.rss_mib", after.resident_bytes / MIB)
        results.put("serve.soak.rss_growth", after.resident_bytes / before.resident_bytes - 1)
        results.put("serve.soak.fd_growth", after.descriptors - before.descriptors)


def check_whole(ask: Ask, answer: Answer, target: Target) -> None:
    """Raise PeerError for an answer that ends without its end, without its usage, or without its tokens."""
    lacks = None
    if not answer.is_done:
        lacks = "[DONE]"
    elif not answer.prompt_tokens:
        lacks = "usage"
    elif not answer.answer_tokens or (target.ignores_eos and answer.answer_tokens != ask.answer_tokens):
        lacks = f"its {ask.answer_tokens} tokens"
    if lacks is not None:
        raise PeerError(f"an answer of {target.name} ended without {lacks}", peer=str(target.address))
