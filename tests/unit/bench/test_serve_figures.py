"""What is asked of servers, and what is made of their answers."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path

import pytest

from h3kv.bench.results import Results
from h3kv.bench.serve_client import Answer
from h3kv.bench.serve_figures import elapsed_ns, output_rate, percentile, prompt_rate, put_hits, put_latencies
from h3kv.bench.serve_group import Part, parts_of
from h3kv.bench.serve_prefill import gaps_touching, gaps_within
from h3kv.bench.serve_prompts import Conversation, Prompts
from h3kv.bench.serve_servers import vllm_threads
from h3kv.bench.serve_trace import Scale, read_trace, scaled
from h3kv.core.errors import ConfigError
from h3kv.core.types import Tier

S = 1_000_000_000


def answer(sent_s: int, pieces_s: list[int], *, prompt: int = 10, cached: dict[Tier, int] | None = None) -> Answer:
    return Answer(
        sent_s * S,
        [each * S for each in pieces_s],
        pieces_s[-1] * S,
        ["x"] * len(pieces_s),
        prompt,
        len(pieces_s),
        sum((cached or {}).values()),
        cached or {},
    )


def test_rates_count_from_the_first_request_to_the_end_of_the_last_answer() -> None:
    answers = [answer(0, [1, 2]), answer(1, [3, 4, 5])]
    assert elapsed_ns(answers) == 5 * S
    assert output_rate(answers) == 1.0
    assert prompt_rate(answers) == 4.0


def test_percentiles_lie_between_values_and_one_value_is_all_of_them() -> None:
    assert percentile([7.0], 99) == 7.0
    assert percentile(list(range(101)), 90) == 90.0
    assert percentile([0, 10], 50) == 5.0


def test_latencies_and_hits_are_put_under_the_names_of_their_part() -> None:
    results = Results()
    answers = [answer(0, [1, 2, 3], cached={Tier.DEVICE: 4, Tier.HOST: 1}), answer(0, [3])]
    put_latencies(results, "serve.x", answers)
    put_hits(results, "serve.x", answers)
    assert results.metrics["serve.x.ttft_ms_p50"] == 2000
    assert results.metrics["serve.x.itl_ms_p99"] == 1000
    assert results.metrics["serve.x.hit_rate"] == 0.25
    assert results.metrics["serve.x.hit_rate_device"] == 0.2
    assert results.metrics["serve.x.hit_rate_nvme"] == 0


def test_a_server_that_says_nothing_of_tiers_has_one_hit_rate() -> None:
    results = Results()
    put_hits(results, "serve.x", [answer(0, [1])])
    assert set(results.metrics) == {"serve.x.hit_rate"}


def test_an_answer_without_text_counts_by_its_end() -> None:
    empty = Answer(S, end_ns=3 * S)
    assert (empty.ttft_ns, empty.gaps_ns, empty.text) == (2 * S, [], "")


def test_times_between_pieces_are_told_by_where_they_lie() -> None:
    # |0 10 20    50|   |5 45|     the interval is 20..50
    times = [(0, 10, 20, 50), (5, 45)]
    assert gaps_within(times, 0, 20) == [10, 10]
    assert gaps_within(times, 20, 50) == [30]
    assert gaps_touching(times, 20, 50) == [30, 40]


def test_prompts_are_the_same_for_the_same_seed_and_share_nothing_else() -> None:
    first, again, other = Prompts(300), Prompts(300), Prompts(300, seed=1)
    asks = first.unshared(3, "a", prompt_tokens=50, answer_tokens=4)
    assert asks == again.unshared(3, "a", prompt_tokens=50, answer_tokens=4)
    assert asks != other.unshared(3, "a", prompt_tokens=50, answer_tokens=4)
    assert asks != first.unshared(3, "b", prompt_tokens=50, answer_tokens=4)
    assert len({tuple(ask.prompt)[:8] for ask in asks}) == 3
    assert all(0 <= token < 300 for ask in asks for token in ask.prompt if isinstance(token, int))


def test_questions_begin_with_their_document_and_then_differ() -> None:
    asks = Prompts(300).questions(4, "x", document=64, question=8, answer=2)
    assert len({tuple(ask.prompt)[:64] for ask in asks}) == 1
    assert len({tuple(ask.prompt)[64:] for ask in asks}) == 4


def test_mixed_lengths_have_both_ends_of_their_ranges() -> None:
    asks = Prompts(300).mixed(20, prompt_tokens=(1, 90), answer_tokens=(2, 7))
    lengths = [len(ask.prompt) for ask in asks]
    assert (min(lengths), max(lengths)) == (1, 90)
    assert {min(ask.answer_tokens for ask in asks), max(ask.answer_tokens for ask in asks)} == {2, 7}
    assert lengths != sorted(lengths), "long and short ones are mixed"


def test_short_requests_are_made_one_by_one() -> None:
    asks = Prompts(300).short(1000, prompt_tokens=5, answer_tokens=2)
    assert {len(next(asks).prompt) for _ in range(200)} == set(range(1, 10))
    assert len(list(asks)) == 800


def test_a_conversation_keeps_all_that_was_said() -> None:
    chat = Conversation(3, answer_tokens=5)
    first = chat.say(4)
    chat.hear("yes")
    second = chat.say(2)
    assert first.is_chat
    assert second.prompt[:2] == (*first.prompt, {"role": "assistant", "content": "yes"})
    assert Conversation(4, answer_tokens=5).say(4) != first


def write_trace(path: Path) -> Path:
    rows = [(1000, 1200, 300, [5, 6, 7]), (1500, 1024, 20, [5, 6]), (3000, 700, 1, [5, 9])]
    names = ("timestamp", "input_length", "output_length", "hash_ids")
    path.write_text("".join(json.dumps(dict(zip(names, row, strict=True))) + "\n" for row in rows), encoding="utf-8")
    return path


def test_a_trace_keeps_its_shared_beginnings_when_it_is_made_smaller(tmp_path: Path) -> None:
    trace = read_trace(write_trace(tmp_path / "trace.jsonl"), 3)
    timed = scaled(trace, Scale(16, 2.0, 1000, 10), vocabulary=300)
    assert [due for due, _ in timed] == [0, S, 4 * S]
    first, second, third = (ask.prompt for _, ask in timed)
    assert [len(first), len(second), len(third)] == [75, 64, 43]
    assert first[:64] == second
    assert third[:32] == first[:32]
    assert third[32:] != first[32:43]
    assert [ask.answer_tokens for _, ask in timed] == [10, 1, 1]


def test_long_prompts_of_a_trace_are_cut_and_only_the_first_requests_are_read(tmp_path: Path) -> None:
    trace = read_trace(write_trace(tmp_path / "trace.jsonl"), 2)
    assert len(trace) == 2
    assert all(sooner.time_ms <= later.time_ms for sooner, later in pairwise(trace))
    assert [len(ask.prompt) for _, ask in scaled(trace, Scale(16, 1.0, 40, 10), vocabulary=300)] == [40, 40]


@pytest.mark.parametrize("text", ["{", "[]", '{"timestamp": 1}', '{"timestamp": "x", "hash_ids": []}'])
def test_what_is_no_trace_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "trace").write_text(text, encoding="utf-8")
    with pytest.raises(ConfigError, match="cannot read the trace"):
        read_trace(tmp_path / "trace", 1)
    with pytest.raises(ConfigError, match="cannot read the trace"):
        read_trace(tmp_path / "missing", 1)


def test_vllm_has_two_settings_of_its_threads() -> None:
    bound, unbound = vllm_threads()
    assert unbound.environment["VLLM_CPU_OMP_THREADS_BIND"] == "nobind"
    assert int(bound.environment["OMP_NUM_THREADS"]) <= int(unbound.environment["OMP_NUM_THREADS"])


def test_a_part_that_does_not_exist_is_named() -> None:
    assert parts_of(["soak", "chat8"]) == [Part.SOAK, Part.CHAT8]
    with pytest.raises(ConfigError, match="must be one of chat8, docqa, noreuse, identical, itl, soak, turns, trace"):
        parts_of(["all"])
