"""What one run measured, as a table for people and as a flat object for machines."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rich.table import Table

from h3kv.core.units import NS_PER_MS, NS_PER_S, describe_size
from h3kv.engine.events import RequestStatistics
from h3kv.engine.stopping import FinishReason


@dataclass(frozen=True, slots=True)
class Answer:
    """One question and what came of it."""

    question: str
    text: str
    reason: FinishReason
    statistics: RequestStatistics

    @property
    def prefill_tokens_per_s(self) -> float | None:
        """Prompt tokens computed in a second; None when all of them were found."""
        computed = self.statistics.prompt_tokens - self.statistics.cached_tokens_total
        return computed * NS_PER_S / self.statistics.prefill_ns if self.statistics.prefill_ns and computed else None

    @property
    def ttft_s(self) -> float | None:
        """Seconds from the question to the first token."""
        first_ns = self.statistics.time_to_first_token_ns
        return None if first_ns is None else first_ns / NS_PER_S

    @property
    def decode_tokens_per_s(self) -> float | None:
        """Tokens in a second after the first one; None for fewer than two."""
        gaps_ns = self.statistics.inter_token_ns
        return len(gaps_ns) * NS_PER_S / sum(gaps_ns) if gaps_ns and sum(gaps_ns) else None

    def itl_ms(self, percent: int) -> float | None:
        """A percentile of the times between tokens, in milliseconds; None for fewer than two tokens."""
        gaps_ns = self.statistics.inter_token_ns
        return percentile(gaps_ns, percent) / NS_PER_MS if gaps_ns else None


@dataclass(frozen=True, slots=True)
class Usage:
    """Memory at the end of a run, in bytes."""

    kv_used_bytes: int
    kv_cap_bytes: int
    peak_rss_bytes: int


def percentile(values: Sequence[int], percent: int) -> int:
    """The smallest value that at least `percent` of all do not exceed. There is at least one value."""
    ordered = sorted(values)
    return ordered[max(0, -(-len(ordered) * percent // 100) - 1)]


def answer_fields(answer: Answer) -> dict[str, object]:
    """An answer under the stable keys of `--json`. What was not measured is null."""
    statistics = answer.statistics
    return {
        "question": answer.question,
        "answer": answer.text,
        "finish_reason": answer.reason.value,
        "prompt_tokens": statistics.prompt_tokens,
        "cached_tokens": statistics.cached_tokens_total,
        "cached_tokens_by_tier": {tier.value: tokens for tier, tokens in statistics.cached_tokens.items()},
        "generated_tokens": statistics.generated_tokens,
        "prefill_tokens_per_s": answer.prefill_tokens_per_s,
        "ttft_s": answer.ttft_s,
        "itl_ms_p50": answer.itl_ms(50),
        "itl_ms_p99": answer.itl_ms(99),
        "decode_tokens_per_s": answer.decode_tokens_per_s,
    }


def table(answers: Sequence[Answer], usage: Usage, *, load_s: float) -> Table:
    """One column per question; what the whole process has once, such as the seconds of loading, in the first."""
    grid = Table(title_justify="left", show_edge=False, pad_edge=False, box=None)
    grid.add_column("", style="dim")
    for number in range(1, len(answers) + 1):
        grid.add_column("measured" if len(answers) == 1 else f"question {number}", justify="right")
    rows = {
        "prompt tokens": [f"{answer.statistics.prompt_tokens:,}" for answer in answers],
        "found in the cache": [f"{answer.statistics.cached_tokens_total:,}" for answer in answers],
        "prefill, new tokens/s": [
            rounded(answer.prefill_tokens_per_s if is_mostly_new(answer) else None) for answer in answers
        ],
        "time to first token, s": [rounded(answer.ttft_s) for answer in answers],
        "answer tokens": [f"{answer.statistics.generated_tokens:,}" for answer in answers],
        "between tokens, ms p50": [rounded(answer.itl_ms(50)) for answer in answers],
        "between tokens, ms p99": [rounded(answer.itl_ms(99)) for answer in answers],
        "decode, tokens/s": [rounded(answer.decode_tokens_per_s) for answer in answers],
    }
    for name, cells in rows.items():
        grid.add_row(name, *cells)
    grid.add_row("loading before, s", rounded(load_s))
    grid.add_row("KV in memory", f"{describe_size(usage.kv_used_bytes)} of {describe_size(usage.kv_cap_bytes)}")
    grid.add_row("peak memory", describe_size(usage.peak_rss_bytes))
    return grid


def is_mostly_new(answer: Answer) -> bool:
    """Whether most of the prompt was computed. The speed of a short rest says nothing: it is all start and wait."""
    return 2 * answer.statistics.cached_tokens_total < answer.statistics.prompt_tokens


def rounded(value: float | None) -> str:
    """Three digits, and a dash for what was not measured."""
    if value is None:
        return "-"
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"
