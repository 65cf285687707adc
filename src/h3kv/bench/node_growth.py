"""What a node holds after many short requests, over what it held after the first of them.

Every prompt is another one, so that each request fills what the caps allow, then displaces what came before: all tiers
are full after the first requests, and what grows afterwards is not KV. Summed over all processes, `h3 up` included.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from h3kv.bench.results import Results
from h3kv.bench.tiered import TieredSetting
from h3kv.bench.whole_node import WholeNode

WORDS: Final = ("north", "sea", "old", "stone", "river", "light", "ship", "seven", "garden", "winter", "road", "hand")
MIB: Final = 1 << 20


@dataclass(frozen=True, slots=True)
class Sizes:
    """How much is asked."""

    requests: int
    first: int
    """After so many the node counts as grown up."""
    prompt_words: int
    """About a token each."""
    answer_tokens: int
    caps: tuple[str, ...]
    """Flags of `h3 up`."""


SMALL_CAPS: Final = ("--device-kv", "64MiB", "--host-kv", "96MiB", "--window", "256", "--store-capacity", "256MiB")
FULL: Final = Sizes(1_000, 100, 80, 4, SMALL_CAPS)
QUICK: Final = Sizes(45, 15, 300, 2, SMALL_CAPS)


@dataclass(frozen=True, slots=True)
class NodePlace:
    """Where a node keeps things."""

    sockets: Path
    """And its log. The path must be short."""
    store: Path
    """Folder of its cold store."""


def measure(results: Results, place: NodePlace, setting: TieredSetting, *, sizes: Sizes) -> None:
    """Put `services.rss_mib`, `services.rss_growth`, a fraction, and the differences `services.{fd,region}_growth`.

    Args:
        results: where they go.
        place: of sockets and store.
        setting: model, and who hears how far it is.
        sizes: how much is asked.

    Raises:
        ConfigError: `services` is not there: the wheel leaves it out.
        PeerUnavailableError: the node does not come up.
        RequestError: it refuses a request.
    """
    chance = random.Random(sizes.requests)
    with WholeNode.open(place.sockets, setting.model, [*sizes.caps, "--store", str(place.store)]) as node:
        for number in range(sizes.first):
            node.complete(_prompt(chance, number, sizes), tokens=sizes.answer_tokens)
        before = node.holding()
        for number in range(sizes.first, sizes.requests):
            node.complete(_prompt(chance, number, sizes), tokens=sizes.answer_tokens)
            if number % sizes.first == 0:
                setting.progress(
                    f"growth: {number} of {sizes.requests} requests, {node.holding().resident_bytes // MIB} MiB"
                )
        after = node.holding()
    results.put("services.rss_mib", after.resident_bytes / MIB)
    results.put("services.rss_growth", after.resident_bytes / before.resident_bytes - 1)
    results.put("services.fd_growth", after.descriptors - before.descriptors)
    results.put("services.region_growth", after.regions - before.regions)


def _prompt(chance: random.Random, number: int, sizes: Sizes) -> str:
    return f"{number}. " + " ".join(chance.choices(WORDS, k=sizes.prompt_words))
