"""Figures of many answers: rates, percentiles, and where prompts were found."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Final

from h3kv.bench.results import Results
from h3kv.bench.serve_client import TIERS, Answer
from h3kv.core.units import NS_PER_MS, NS_PER_S

PERCENTILES: Final = (50, 90, 99)


def percentile(values: Sequence[float], percent: int) -> float:
    """The value below which so many percent of the values lie, interpolated. There is at least one value."""
    if len(values) == 1:
        return values[0]
    return statistics.quantiles(values, n=100, method="inclusive")[percent - 1]


def elapsed_ns(answers: Sequence[Answer]) -> int:
    """From the first request to the end of the last answer."""
    return max(answer.end_ns for answer in answers) - min(answer.sent_ns for answer in answers)


def output_rate(answers: Sequence[Answer]) -> float:
    """Answer tokens per second of all, from the first request to the end of the last answer."""
    return sum(answer.answer_tokens for answer in answers) * NS_PER_S / elapsed_ns(answers)


def prompt_rate(answers: Sequence[Answer]) -> float:
    """Prompt tokens per second of all, over the same time."""
    return sum(answer.prompt_tokens for answer in answers) * NS_PER_S / elapsed_ns(answers)


def put_latencies(results: Results, prefix: str, answers: Sequence[Answer]) -> None:
    """Put `PREFIX.ttft_ms_p*` and, where an answer has two pieces, `PREFIX.itl_ms_p*`."""
    ttfts_ms = [answer.ttft_ns / NS_PER_MS for answer in answers]
    gaps_ms = [gap / NS_PER_MS for answer in answers for gap in answer.gaps_ns]
    for percent in PERCENTILES:
        results.put(f"{prefix}.ttft_ms_p{percent}", percentile(ttfts_ms, percent))
    for percent in PERCENTILES if gaps_ms else ():
        results.put(f"{prefix}.itl_ms_p{percent}", percentile(gaps_ms, percent))


def put_hits(results: Results, prefix: str, answers: Sequence[Answer]) -> None:
    """Put `PREFIX.hit_rate`, the share of prompt tokens that a cache had, and what each tier had, if it is said."""
    prompt_tokens = sum(answer.prompt_tokens for answer in answers)
    if prompt_tokens == 0:
        return
    results.put(f"{prefix}.hit_rate", sum(answer.cached_tokens for answer in answers) / prompt_tokens)
    if any(answer.cached_by_tier for answer in answers):
        for tier in TIERS:
            tokens = sum(answer.cached_by_tier.get(tier, 0) for answer in answers)
            results.put(f"{prefix}.hit_rate_{tier}", tokens / prompt_tokens)
