"""A recorded trace of a chat service, scaled down to what a small machine serves.

Each line of the file is one request: when it came, how many tokens it had and how many were answered, and one number
for each block of 512 prompt tokens. Equal numbers mean equal blocks, which is all that is known of the text:

    hash_ids   0        46       47              the same blocks in another request are the same tokens here,
    tokens     |--512---|--512---|--rest--|      drawn from the number; scaled by 8, 512 become 64
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Final

from h3kv.bench.serve_client import Ask
from h3kv.bench.texts import ROOT
from h3kv.core.errors import ConfigError
from h3kv.core.units import NS_PER_MS

DEFAULT: Final = ROOT / "../shared/data/traces/mooncake_conversation.jsonl"
BLOCK_TOKENS: Final = 512
"""Prompt tokens for which a trace has one number."""


@dataclass(frozen=True, slots=True)
class Recorded:
    """One request of a trace."""

    time_ms: int
    prompt_tokens: int
    answer_tokens: int
    blocks: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Scale:
    """By how much a trace is made smaller."""

    lengths: int
    """Prompts and answers are divided by it. It divides the tokens of a block."""
    times: float
    """By how much longer the time between two requests is."""
    prompt_tokens_max: int
    """Longer prompts are cut at their end."""
    answer_tokens_max: int


def read_trace(path: Path, count: int) -> list[Recorded]:
    """The first requests of a trace.

    Raises:
        ConfigError: it cannot be read, or is no trace.
    """
    try:
        with path.open(encoding="utf-8") as lines:
            return [_parsed(line) for line in islice(lines, count)]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"cannot read the trace {path}: {error}; name another with --trace", field="trace") from error


def scaled(trace: Iterable[Recorded], scale: Scale, *, vocabulary: int) -> list[tuple[int, Ask]]:
    """Requests of a trace with the nanoseconds at which they come, counted from the first.

    Args:
        trace: in the order of time.
        scale: how much smaller.
        vocabulary: tokens lie below it.
    """
    recorded = list(trace)
    assert BLOCK_TOKENS % scale.lengths == 0, "a block has whole tokens"
    width = BLOCK_TOKENS // scale.lengths
    return [
        (
            round((each.time_ms - recorded[0].time_ms) * scale.times * NS_PER_MS),
            Ask(
                _prompt(each, width, vocabulary)[
                    : max(min(each.prompt_tokens // scale.lengths, scale.prompt_tokens_max), 1)
                ],
                max(min(each.answer_tokens // scale.lengths, scale.answer_tokens_max), 1),
            ),
        )
        for each in recorded
    ]


def _prompt(recorded: Recorded, width: int, vocabulary: int) -> tuple[int, ...]:
    return tuple(
        token for block in recorded.blocks for token in random.Random(block).choices(range(vocabulary), k=width)
    )


def _parsed(line: str) -> Recorded:
    fields = json.loads(line)
    blocks = tuple(int(each) for each in fields["hash_ids"])
    return Recorded(int(fields["timestamp"]), int(fields["input_length"]), int(fields["output_length"]), blocks)
