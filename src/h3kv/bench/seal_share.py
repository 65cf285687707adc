"""What sealing adds to decode, where HOST and the cold store belong to another process.

A segment is sealed once in 1,024 tokens, between two of them: its tokens are clustered, and the cold store is asked to
keep it. The step after which that happens takes so much longer than the steps around it. Nothing of it waits for a
call: room is leased ahead.

    step   ...  20  20  20  95  20  20  20  ...     ms; what is added here: 75
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final

from h3kv.bench.child import in_child, tell
from h3kv.bench.remote_node import RemoteNode, RemotePlace
from h3kv.bench.results import Results
from h3kv.bench.texts import NamedText, take_tokens
from h3kv.bench.tiered import TieredSetting, TokenCaps, load_reaching
from h3kv.core.errors import ConfigError
from h3kv.core.limits import SEGMENT_TOKENS_MAX
from h3kv.core.types import DType, Encoding
from h3kv.core.units import NS_PER_MS
from h3kv.engine.events import Event, TokenGenerated
from h3kv.engine.request import Request, SamplingParameters

AROUND: Final = 32
"""Steps before and after one that seals, which say what it would have taken."""


@dataclass(frozen=True, slots=True)
class Sizes:
    """How much is measured."""

    prompt_tokens: int
    segments: int
    """That are sealed while tokens are made."""
    caps: TokenCaps
    store_bytes: int = 1 << 30


FULL: Final = Sizes(8192, 3, TokenCaps(device_tokens=2048, window_tokens=1024, host_tokens=16_384, chunk_tokens=896))
QUICK: Final = Sizes(1024, 1, TokenCaps(device_tokens=1024, window_tokens=512, host_tokens=8192, chunk_tokens=448))


@dataclass(frozen=True, slots=True)
class Step:
    """One step of decode."""

    duration_ns: int
    seals: int
    """Segments that were sealed in it."""


def measure(results: Results, place: RemotePlace, setting: TieredSetting, *, sizes: Sizes, named: NamedText) -> None:
    """Put `services.seal_overhead`, a fraction of decode time, `services.seal_ms`, and how often room was waited for.

    Args:
        results: where they go.
        place: of sockets and store.
        setting: model.
        sizes: how much is measured.
        named: text to read.

    Raises:
        ConfigError: the text is too short, or `services` is not there: the wheel leaves it out.
        PeerError: nvme_io does not come up.
    """
    for name, value in in_child(_measured, _Work(place, setting.model, sizes, named)).items():
        results.put(name, value)


@dataclass(frozen=True, slots=True)
class _Work:
    place: RemotePlace
    model: str
    sizes: Sizes
    named: NamedText


def _measured(work: _Work) -> dict[str, float]:
    sizes = work.sizes
    answer_tokens = sizes.segments * SEGMENT_TOKENS_MAX + 2 * AROUND
    loaded = load_reaching(work.model, dtype=DType.BF16, context_tokens=sizes.prompt_tokens + answer_tokens)
    prompt = take_tokens(loaded, work.named, sizes.prompt_tokens)
    with RemoteNode.open(loaded, sizes.caps, place=work.place, encoding=Encoding.K8V4) as remote:
        tell(f"sealing: reading {sizes.prompt_tokens} tokens, then {answer_tokens} are made")
        steps = list(_steps(remote, prompt, answer_tokens))
        waits = remote.tiers.stock.waits_total
    seal_ns = statistics.median(added_ns(steps))
    plain_ns = statistics.median(step.duration_ns for step in steps)
    return {
        "services.seal_ms": seal_ns / NS_PER_MS,
        # So much is added once in a segment's tokens.
        "services.seal_overhead": seal_ns / (SEGMENT_TOKENS_MAX * plain_ns),
        "services.seal_waits": waits,
    }


def _steps(remote: RemoteNode, prompt: Sequence[int], answer_tokens: int) -> Iterator[Step]:
    """Steps of decode, the first few left out."""
    engine, table = remote.node.engine, remote.node.pool.segments
    sampling = SamplingParameters(max_new_tokens=answer_tokens, ignore_eos=True)
    engine.submit(Request(prompt=tuple(prompt), sampling=sampling))
    made = 0
    while engine.has_work:
        before = len(table.sealed())
        start_ns = time.perf_counter_ns()
        events: list[Event] = engine.step()
        duration_ns = time.perf_counter_ns() - start_ns
        remote.after_step()
        made += sum(isinstance(event, TokenGenerated) for event in events)
        if AROUND // 2 < made < answer_tokens:  # the last one closes the sequence, which is no part of decode
            yield Step(duration_ns, len(table.sealed()) - before)


def added_ns(steps: Sequence[Step]) -> list[int]:
    """Of each step that sealed a segment: what it took beyond the median of those around it.

    Raises:
        ConfigError: none did.
    """
    found_ns = []
    for at, step in enumerate(steps):
        if step.seals > 0:
            around = [*steps[max(at - AROUND, 0) : at], *steps[at + 1 : at + 1 + AROUND]]
            plain_ns = statistics.median(each.duration_ns for each in around if each.seals == 0)
            found_ns.append(round(step.duration_ns - plain_ns))
    if not found_ns:
        raise ConfigError("no segment was sealed while tokens were made: ask for more of them", field="max_new_tokens")
    return found_ns
