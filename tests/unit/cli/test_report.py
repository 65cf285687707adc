import io
from dataclasses import replace

import pytest
from rich.console import Console

from h3kv.cli.report import Answer, Usage, answer_fields, percentile, rounded, table
from h3kv.core.types import Tier
from h3kv.engine.events import RequestStatistics
from h3kv.engine.stopping import FinishReason

MS = 1_000_000
ANSWER = Answer(
    question="Who?",
    text="Ada.",
    reason=FinishReason.STOP,
    statistics=RequestStatistics(
        prompt_tokens=1_500,
        cached_tokens={Tier.DEVICE: 500},
        generated_tokens=5,
        waiting_ns=0,
        prefill_ns=2_000 * MS,
        time_to_first_token_ns=2_500 * MS,
        inter_token_ns=(10 * MS, 10 * MS, 20 * MS, 40 * MS),
    ),
)
NOTHING = Answer(
    question="Who?",
    text="",
    reason=FinishReason.CANCELLED,
    statistics=RequestStatistics(
        prompt_tokens=64,
        cached_tokens={},
        generated_tokens=0,
        waiting_ns=0,
        prefill_ns=0,
        time_to_first_token_ns=None,
        inter_token_ns=(),
    ),
)


def test_speeds_count_computed_tokens_only() -> None:
    assert answer_fields(ANSWER) == {
        "question": "Who?",
        "answer": "Ada.",
        "finish_reason": "stop",
        "prompt_tokens": 1_500,
        "cached_tokens": 500,
        "cached_tokens_by_tier": {"device": 500},
        "generated_tokens": 5,
        "prefill_tokens_per_s": 500.0,
        "ttft_s": 2.5,
        "itl_ms_p50": 10.0,
        "itl_ms_p99": 40.0,
        "decode_tokens_per_s": 50.0,
    }


def test_what_was_not_measured_is_null() -> None:
    fields = answer_fields(NOTHING)
    assert [key for key, value in fields.items() if value is None] == [
        "prefill_tokens_per_s",
        "ttft_s",
        "itl_ms_p50",
        "itl_ms_p99",
        "decode_tokens_per_s",
    ]


def test_table_has_a_column_for_each_question_and_the_memory_once() -> None:
    out = io.StringIO()
    usage = Usage(kv_used_bytes=3 << 20, kv_cap_bytes=1 << 30, peak_rss_bytes=2 << 30)
    Console(file=out, width=100).print(table([ANSWER, NOTHING], usage, load_s=2.5))
    lines = out.getvalue().splitlines()
    assert lines[0].split() == ["question", "1", "question", "2"]
    assert [line.split()[-2:] for line in lines if line.startswith("time to first")] == [["2.5", "-"]]
    assert sum("3.00 MiB of 1.00 GiB" in line for line in lines) == 1
    assert [line.split() for line in lines if line.startswith("loading")] == [["loading", "before,", "s", "2.5"]]


@pytest.mark.parametrize(("percent", "expected"), [(0, 1), (50, 2), (75, 3), (76, 4), (99, 4), (100, 4)])
def test_percentile_is_the_smallest_value_that_enough_do_not_exceed(percent: int, expected: int) -> None:
    assert percentile([4, 1, 3, 2], percent) == expected


@pytest.mark.parametrize(("value", "text"), [(None, "-"), (0.01234, "0.0123"), (12.345, "12.3"), (1234.5, "1,234")])
def test_numbers_have_three_digits(value: float | None, text: str) -> None:
    assert rounded(value) == text


def test_speed_of_a_short_rest_is_not_shown() -> None:
    out = io.StringIO()
    found = replace(ANSWER, statistics=replace(ANSWER.statistics, cached_tokens={Tier.NVME: 1_450}))
    Console(file=out, width=100).print(table([ANSWER, found], Usage(0, 1 << 30, 1 << 30), load_s=2.5))
    (line,) = [line for line in out.getvalue().splitlines() if line.startswith("prefill")]
    assert line.split()[-2:] == ["500", "-"]
