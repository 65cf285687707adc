"""Long windows of text: which ones are scored, and their scores for every variant in lockstep.

All lanes read the same chunk before any reads the next, so that the log-probabilities of one chunk are kept and no
more: 64 rows x 49,152 tokens x 8 bytes = 24 MiB for each of two.
"""

from __future__ import annotations

import bisect
import contextlib
import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import torch

from h3kv.bench.measure import Progress
from h3kv.core.errors import ConfigError
from h3kv.core.types import Encoding
from h3kv.quality.lanes import SCORED_CHUNK, Bank, Lane, whole_segments
from h3kv.quality.reading import Reading
from h3kv.quality.statistics import BlockScore, log_probabilities, score
from h3kv.quality.variants import REFERENCE, Variant


@dataclass(frozen=True, slots=True)
class WindowSizes:
    """Of scored windows."""

    context_tokens: int
    """Read exactly before the first scored token."""
    scored_tokens: int
    """A multiple of 64."""

    @property
    def tokens(self) -> int:
        """Of a window, with the token that is only scored."""
        return self.context_tokens + self.scored_tokens + 1


@dataclass(slots=True)
class WindowScores:
    """What the windows gave, by variant name."""

    blocks: dict[str, list[BlockScore]] = field(default_factory=dict)
    readings: dict[str, Reading] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class TextWindow:
    """A run of tokens of a text."""

    tokens: tuple[int, ...]
    documents: frozenset[int]
    """Numbers of the documents that its scored tokens are of."""


def choose_windows(documents: Sequence[Sequence[int]], sizes: WindowSizes, count: int) -> list[TextWindow]:
    """Windows that begin where a document does, spread over all of them, none over another.

    Documents follow each other as in the text, so a window goes on with the next one where its own ends. A text of few
    long documents is cut evenly instead.

    Raises:
        ConfigError: the text is too short.
    """
    starts = [0, *itertools.accumulate(len(document) for document in documents)]
    text = [token for document in documents for token in document]
    fitting: list[int] = []
    for start in starts:
        if start >= (fitting[-1] + sizes.tokens if fitting else 0) and start + sizes.tokens <= len(text):
            fitting.append(start)
    if len(fitting) < count:
        needed = count * sizes.tokens
        if len(text) < needed:
            raise ConfigError(
                f"this part of the text has {len(text):,} tokens: {needed:,} are needed; give more --text", field="text"
            )
        fitting = [index * (len(text) - sizes.tokens) // max(count - 1, 1) for index in range(count)]
    windows = []
    for start in (fitting[index * len(fitting) // count] for index in range(count)):
        first, last = start + sizes.context_tokens, start + sizes.tokens - 1
        held = range(bisect.bisect_right(starts, first) - 1, bisect.bisect_right(starts, last))
        windows.append(TextWindow(tuple(text[start : start + sizes.tokens]), frozenset(held)))
    return windows


def score_windows(
    banks: Mapping[Encoding, Bank],
    variants: Sequence[Variant],
    windows: Sequence[TextWindow],
    *,
    sizes: WindowSizes,
    progress: Progress,
) -> WindowScores:
    """Score every window under every variant, against full attention over plain numbers.

    Args:
        banks: of the variants' encodings and of the reference's.
        variants: to compare, without the reference.
        windows: of these sizes.
        sizes: of the windows.
        progress: hears of every window.
    """
    scores = WindowScores()
    for number, window in enumerate(windows, 1):
        _score_window(banks, variants, window.tokens, sizes=sizes, scores=scores)
        progress(f"window {number} of {len(windows)}: {sizes.scored_tokens:,} tokens scored {len(variants)} ways")
    return scores


def _score_window(
    banks: Mapping[Encoding, Bank],
    variants: Sequence[Variant],
    tokens: Sequence[int],
    *,
    sizes: WindowSizes,
    scores: WindowScores,
) -> None:
    context = tokens[: sizes.context_tokens]
    prefix = whole_segments(len(context))
    for bank in banks.values():
        if prefix:
            bank.seal_prefix(context[:prefix])
    with _lanes(banks, [REFERENCE, *variants], context, prefix=prefix, room=sizes.scored_tokens) as lanes:
        for variant, lane in zip(variants, lanes[1:], strict=True):
            lane.use(variant.retrieval)
        for start in range(sizes.context_tokens, sizes.context_tokens + sizes.scored_tokens, SCORED_CHUNK):
            chunk, next_T = tokens[start : start + SCORED_CHUNK], tokens[start + 1 : start + SCORED_CHUNK + 1]
            target_T = torch.tensor(next_T)
            reference_TV = log_probabilities(lanes[0].read(chunk, logits="all"))
            for variant, lane in zip(variants, lanes[1:], strict=True):
                found_TV = log_probabilities(lane.read(chunk, logits="all"))
                scores.blocks.setdefault(variant.name, []).append(score(reference_TV, found_TV, target_T))
        for variant, lane in zip(variants, lanes[1:], strict=True):
            before = scores.readings.get(variant.name, Reading())
            scores.readings[variant.name] = before + lane.reading
    for bank in banks.values():
        bank.forget()


@contextlib.contextmanager
def _lanes(
    banks: Mapping[Encoding, Bank], variants: Sequence[Variant], context: Sequence[int], *, prefix: int, room: int
) -> Iterator[list[Lane]]:
    with contextlib.ExitStack() as stack:
        yield [
            stack.enter_context(banks[variant.encoding].lane(context, prefix=prefix, room=room)) for variant in variants
        ]
