"""Time from one token to the next while segments move between HOST and the cold store, over that without moves.

A node in this process decodes over memory and cold store of `nvme_io`, a process of its own. In every other round new
segments are sealed beside it, which are written to the cold store, and others are brought back from there, so many
bytes a second each way. They hold no sequence's tokens: a segment's bytes are as good as any others.

    still       token   token   token   token
    migrating   token   token   token   token       between them: seal a segment, ask for one from the cold store
"""

from __future__ import annotations

import itertools
import os
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

from h3kv.bench.child import in_child, tell
from h3kv.bench.measure import Rounds
from h3kv.bench.remote_node import RemoteNode, RemotePlace
from h3kv.bench.results import Results
from h3kv.bench.texts import NamedText, take_tokens
from h3kv.bench.tiered import TieredSetting, TokenCaps, load_reaching
from h3kv.core.errors import PeerTimeoutError, TierFullError
from h3kv.core.hashing import KEY_BYTES
from h3kv.core.limits import SEGMENT_BLOCKS_MAX
from h3kv.core.types import BlockKey, DType, Encoding, SegmentLabel, Tier
from h3kv.core.units import NS_PER_MS, NS_PER_S
from h3kv.engine.events import TokenGenerated
from h3kv.engine.request import Request, SamplingParameters
from h3kv.engine.segment import Segment
from h3kv.telemetry import names

REASON: Final = "measured"
MB: Final = 1e6
SETTLE_NS: Final = 60 * NS_PER_S
"""For moves to end between two rounds."""


@dataclass(frozen=True, slots=True)
class Sizes:
    """How much is measured."""

    prompt_tokens: int
    rounds: int
    round_tokens: int
    """Decoded in each round of either kind."""
    bytes_per_s: int
    """That are begun to move, each way."""
    segments: int
    """That lie in the cold store alone before the first round."""
    caps: TokenCaps
    store_bytes: int


CAPS: Final = TokenCaps(device_tokens=2048, window_tokens=1024, host_tokens=16_384, chunk_tokens=896)
FULL: Final = Sizes(2048, 9, 200, 130_000_000, 16, CAPS, 2 << 30)
QUICK: Final = Sizes(1024, 2, 100, 130_000_000, 6, CAPS, 1 << 30)


def measure(results: Results, place: RemotePlace, setting: TieredSetting, *, sizes: Sizes, named: NamedText) -> None:
    """Put `services.itl_ratio_under_migration`, both p99s, and the rates of `services.migration_mb_s.*`.

    Args:
        results: where they go.
        place: of sockets and store.
        setting: model.
        sizes: how much is measured.
        named: text to read.

    Raises:
        ConfigError: the text is too short, or `services` is not there: the wheel leaves it out.
        PeerError: nvme_io does not come up, or moves do not end.
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
    answer_tokens = 2 * (sizes.rounds + 1) * sizes.round_tokens
    loaded = load_reaching(work.model, dtype=DType.BF16, context_tokens=sizes.prompt_tokens + answer_tokens)
    prompt = take_tokens(loaded, work.named, sizes.prompt_tokens)
    with RemoteNode.open(loaded, sizes.caps, place=work.place, encoding=Encoding.RAW) as remote:
        decode = _Decode(remote, prompt, answer_tokens)
        load = MigrationLoad(remote, sizes.bytes_per_s)
        load.fill(sizes.segments)
        tell(f"migration: {sizes.rounds} rounds of {sizes.round_tokens} tokens, with moves and without")
        rounds = Rounds.run(
            {
                "still": lambda: decode.itl_ns_p99(sizes.round_tokens, None),
                "migrating": lambda: decode.itl_ns_p99(sizes.round_tokens, load),
            },
            repetitions=sizes.rounds,
        )
    found = {f"services.itl_ms_p99.{name}": rounds.median(name) / NS_PER_MS for name in rounds.values}
    found["services.itl_ratio_under_migration"] = rounds.ratio("migrating", "still")
    return found | {f"services.migration_mb_s.{way}": rate / MB for way, rate in load.rates.items()}


class MigrationLoad:
    """Makes segments move, so many bytes a second each way, from `begin` to `end`; `advance` between two steps.

    Args:
        remote: whose segments move.
        bytes_per_s: that are begun, each way.
    """

    def __init__(self, remote: RemoteNode, bytes_per_s: int) -> None:
        self._remote = remote
        self._pool = remote.node.pool
        self._segment_bytes = SEGMENT_BLOCKS_MAX * self._pool.layout.block_bytes
        self._interval_ns = round(self._segment_bytes * NS_PER_S / bytes_per_s)
        self._own: dict[int, Segment] = {}
        self._due_ns = 0
        self._began = _Moved()
        self._moved = {"host_to_nvme": 0.0, "nvme_to_host": 0.0}
        self._active_ns = 0

    @property
    def rates(self) -> dict[str, float]:
        """Bytes a second that moved while it was active."""
        return {way: moved * NS_PER_S / max(self._active_ns, 1) for way, moved in self._moved.items()}

    def fill(self, segments: int) -> None:
        """Seal until so many lie in the cold store alone.

        Raises:
            PeerTimeoutError: they do not come to lie there.
        """
        end_ns = time.monotonic_ns() + SETTLE_NS
        while len(self._lying({Tier.NVME})) < segments:
            if time.monotonic_ns() > end_ns:
                raise PeerTimeoutError("segments are not written to the cold store: see nvme_io", peer="nvme_io")
            self._seal()
            self.settle()

    def begin(self) -> None:
        """From now on."""
        self._due_ns = time.monotonic_ns()
        self._began = self._now()

    def advance(self) -> None:
        """Begin the moves that are due."""
        while self._due_ns <= time.monotonic_ns():
            self._due_ns += self._interval_ns
            # What is sealed and what comes back need room: as much leaves HOST before.
            written = self._lying({Tier.HOST, Tier.NVME})[:2]
            self._pool.placer.ask([each.id for each in written], Tier.NVME, reason=REASON)
            self._seal()
            cold = self._lying({Tier.NVME})
            if cold:
                self._pool.placer.ask([cold[0].id], Tier.HOST, reason=REASON)
                # Oldest first: each is asked for once in a while.
                self._own[cold[0].id] = self._own.pop(cold[0].id)

    def end(self) -> None:
        """Wait for what is under way, and count what moved in all that time."""
        self.settle()
        now = self._now()
        self._active_ns += now.at_ns - self._began.at_ns
        self._moved["host_to_nvme"] += now.out_bytes - self._began.out_bytes
        self._moved["nvme_to_host"] += now.in_bytes - self._began.in_bytes

    def settle(self) -> None:
        """Wait until nothing moves."""
        self._pool.placer.settle(SETTLE_NS)
        self._remote.after_step()

    def _seal(self) -> None:
        """A segment more, which the policy writes to the cold store. None where HOST is full of what is under way."""
        table = self._pool.segments
        try:
            (segment,) = table.open([SEGMENT_BLOCKS_MAX], waits=False)
        except TierFullError:
            return
        keys = [BlockKey(os.urandom(KEY_BYTES)) for _ in range(SEGMENT_BLOCKS_MAX + 1)]
        table.seal(segment, SegmentLabel(tuple(keys[1:]), keys[0]), parent=None)
        table.unpin(segment)
        self._own[segment.id] = segment

    def _lying(self, tiers: set[Tier]) -> list[Segment]:
        """Those of which nothing is asked and that lie in just these tiers, longest unasked first."""
        find = self._pool.segments.find
        self._own = {number: segment for number, segment in self._own.items() if find(segment.id) is segment}
        asked = self._pool.placer.is_asked
        return [each for each in self._own.values() if each.tiers == tiers and not asked(each.id)]

    def _now(self) -> _Moved:
        telemetry = self._remote.node.telemetry
        out_bytes = telemetry.value(names.MOVED_BYTES, source=Tier.HOST, target=Tier.NVME)
        in_bytes = telemetry.value(names.MOVED_BYTES, source=Tier.NVME, target=Tier.HOST)
        return _Moved(out_bytes, in_bytes)


@dataclass(frozen=True, slots=True)
class _Moved:
    """Bytes that had moved at one moment."""

    out_bytes: float = 0.0
    in_bytes: float = 0.0
    at_ns: int = field(default_factory=time.monotonic_ns)


class _Decode:
    """An answer that is decoded piece by piece."""

    def __init__(self, remote: RemoteNode, prompt: Sequence[int], answer_tokens: int) -> None:
        self._remote = remote
        sampling = SamplingParameters(max_new_tokens=answer_tokens, ignore_eos=True)
        remote.node.engine.submit(Request(prompt=tuple(prompt), sampling=sampling))
        while not self._step():
            pass

    def itl_ns_p99(self, tokens: int, load: MigrationLoad | None) -> float:
        """Of so many tokens, each from the end of the one before to its own end, with moves or without."""
        if load is not None:
            load.begin()
        ends_ns = [time.perf_counter_ns()]
        while len(ends_ns) <= tokens:
            if load is not None:
                load.advance()
            if self._step():
                ends_ns.append(time.perf_counter_ns())
        if load is not None:
            load.end()
        waits_ns = [after - before for before, after in itertools.pairwise(ends_ns)]
        return statistics.quantiles(waits_ns, n=100, method="inclusive")[98]

    def _step(self) -> bool:
        """Whether it made a token."""
        events = self._remote.node.engine.step()
        self._remote.after_step()
        return any(isinstance(event, TokenGenerated) for event in events)
