"""Touches of segments, made from a public trace of conversations.

The trace has one line a request: when it came, and the numbers of the 512-token blocks of its prompt, equal where
prefixes are equal. Such a block is a segment here. What attention does with it is not in the trace; it is modelled:

- a request touches what it finds in every tick of its prefill, which takes three;
- while it answers, it touches its first and its two newest segments in every tick, of the others one in five in nine
  ticks of ten, and the rest in one of twenty. Which ones follows from their numbers alone.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

TRACE = Path(__file__).parents[3] / "shared" / "data" / "traces" / "mooncake_conversation.jsonl"

PREFILL_TICKS = 3

TICKS_PER_TOKEN = 0.03
"""Ticks of a second in which a request answers: 30 ms a token."""


@dataclass(frozen=True)
class Request:
    first_tick: int
    """In seconds."""
    ticks: int
    """From its beginning to its last token."""
    blocks: tuple[int, ...]


@dataclass(frozen=True)
class Touches:
    """What happens in one tick."""

    begun: tuple[Request, ...]
    attended: dict[int, None]
    """Segments that running requests touch."""


def read_requests(path: Path, *, seconds: int, one_in: int) -> list[Request]:
    """Requests of the first seconds; of the conversations, which are told by their second block, one in so many."""
    requests = []
    with path.open(encoding="utf-8") as lines:
        for line in lines:
            record = json.loads(line)
            second = record["timestamp"] // 1000
            blocks = tuple(record["hash_ids"])
            if second >= seconds:
                break
            if draw("conversation", blocks[min(1, len(blocks) - 1)]) * one_in < 1:
                ticks = PREFILL_TICKS + round(record["output_length"] * TICKS_PER_TOKEN)
                requests.append(Request(second, ticks, blocks))
    return requests


def play(requests: list[Request]) -> Iterator[Touches]:
    """What happens tick by tick, from the first request to the end of the last."""
    last_tick = max(request.first_tick + request.ticks for request in requests)
    running: list[Request] = []
    waiting = iter(requests)
    request = next(waiting, None)
    for tick in range(last_tick + 1):
        begun = []
        while request is not None and request.first_tick <= tick:
            begun.append(request)
            request = next(waiting, None)
        running = [each for each in (*running, *begun) if tick < each.first_tick + each.ticks]
        attended = {block: None for each in running for block in attended_blocks(each, tick)}
        yield Touches(tuple(begun), attended)


def attended_blocks(request: Request, tick: int) -> Iterator[int]:
    if tick < request.first_tick + PREFILL_TICKS:
        yield from request.blocks
        return
    head, tail = request.blocks[:1], request.blocks[-2:]
    for block in request.blocks:
        if block in head or block in tail:
            yield block
            continue
        is_favourite = draw("favourite", request.first_tick, block) < 0.2
        if draw("tick", request.first_tick, block, tick) < (0.9 if is_favourite else 0.05):
            yield block


def draw(*of: object) -> float:
    """A number from 0 to 1 that depends on the arguments alone."""
    digest = hashlib.blake2b(repr(of).encode(), digest_size=8).digest()
    return int.from_bytes(digest) / 2**64
