from pathlib import Path
from typing import Any

import pytest
from tests.integration.h3_run import fields, invoke, written
from typer.testing import Result

from h3kv.testing.tiny_models import write_tiny_model

DOCUMENT = "The lighthouse was built by Mathilda Voss. " * 8
QUESTION = "Who built the lighthouse?"

KEYS = {
    "peak_kv_bytes",
    "dropped_segments",
    "model", "dtype", "isa", "threads", "load_s", "max_context", "trained_context", "rope_scaling",
    "kv_used_bytes", "kv_cap_bytes", "peak_rss_bytes", "tiers", "moved_bytes", "region", "store", "answers",
}  # fmt: skip
ANSWER_KEYS = {
    "question", "answer", "finish_reason", "prompt_tokens", "cached_tokens", "cached_tokens_by_tier",
    "generated_tokens", "prefill_tokens_per_s", "ttft_s", "itl_ms_p50", "itl_ms_p99", "decode_tokens_per_s",
}  # fmt: skip


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random model that reaches 1,024 tokens; a token is a byte or two."""
    folder = tmp_path_factory.mktemp("models") / "tiny"
    write_tiny_model(folder, max_position_embeddings=1024)
    return folder


@pytest.fixture
def document(tmp_path: Path) -> Path:
    return written(tmp_path, DOCUMENT)


def run(model: Path, document: Path, *flags: str, questions: tuple[str, ...] = (QUESTION,)) -> Result:
    asked = [word for question in questions for word in ("--question", question)]
    return invoke(model, document, *asked, "--kv-cap", "64MiB", *flags)


def run_json(model: Path, document: Path, *flags: str, questions: tuple[str, ...] = (QUESTION,)) -> dict[str, Any]:
    return fields(run(model, document, "--json", *flags, questions=questions))


def test_json_has_the_stable_keys_and_consistent_numbers(model: Path, document: Path) -> None:
    found = run_json(model, document)
    (answer,) = found["answers"]
    assert set(found) == KEYS
    assert set(answer) == ANSWER_KEYS
    assert answer["question"] == QUESTION
    assert 0 < answer["generated_tokens"] <= 8
    assert answer["cached_tokens"] == 0
    assert 0 < found["kv_used_bytes"] <= found["kv_cap_bytes"] <= 64 << 20
    assert found["max_context"] == found["trained_context"] == 1024


def test_second_question_reuses_the_document_in_whole_blocks(model: Path, document: Path) -> None:
    first, second = run_json(model, document, questions=(QUESTION, "When?"))["answers"]
    assert first["cached_tokens"] == 0
    assert second["cached_tokens"] >= 256
    assert second["cached_tokens"] % 64 == 0
    assert second["cached_tokens_by_tier"] == {"device": second["cached_tokens"]}


def test_reuse_does_not_change_the_answer(model: Path, document: Path) -> None:
    alone = run_json(model, document, "--dtype", "fp32", questions=("When?",))["answers"][0]
    after = run_json(model, document, "--dtype", "fp32", questions=(QUESTION, "When?"))["answers"][1]
    assert after["answer"] == alone["answer"]


def test_equal_seeds_give_equal_samples_and_other_seeds_others(model: Path, document: Path) -> None:
    flags = ("--temperature", "2", "--top-p", "0.9", "--seed")
    answers = [run_json(model, document, *flags, seed)["answers"][0]["answer"] for seed in ("1", "1", "2")]
    assert answers[0] == answers[1]
    assert answers[0] != answers[2]


def test_text_goes_to_stdout_and_all_else_to_stderr(model: Path, document: Path) -> None:
    expected = run_json(model, document)["answers"][0]["answer"]
    result = run(model, document)
    assert result.stdout == f"{expected}\n"
    assert "loading" in result.stderr
    (line,) = [line for line in result.stderr.splitlines() if line.startswith("reading:")]
    assert line.endswith(" 100 %")
    assert "time to first token, s" in result.stderr


def test_several_answers_are_told_apart(model: Path, document: Path) -> None:
    result = run(model, document, questions=(QUESTION, "When?"))
    assert [line for line in result.stdout.splitlines() if line.startswith("> ")] == [f"> {QUESTION}", "> When?"]


def test_maximum_context_beyond_the_trained_one_fixes_a_static_ntk_factor(model: Path, document: Path) -> None:
    found = run_json(model, document, "--max-context", "1500")
    assert found["rope_scaling"] == {"type": "ntk", "factor": 1.47}
    assert (found["max_context"], found["trained_context"]) == (1500, 1024)
    stated = run(model, document, "--max-context", "1500").stderr
    assert "context 1,500 tokens by static rope scaling ntk:1.47 (trained for 1,024)" in stated


def test_rope_flag_reaches_as_far_as_its_factor(model: Path, document: Path) -> None:
    found = run_json(model, document, "--rope", "yarn:2")
    assert found["rope_scaling"] == {"type": "yarn", "factor": 2.0}
    assert found["max_context"] == 2048


def test_smaller_context_needs_no_scaling(model: Path, document: Path) -> None:
    found = run_json(model, document, "--max-context", "800")
    assert found["rope_scaling"] is None
    assert (found["max_context"], found["trained_context"]) == (800, 1024)


@pytest.mark.parametrize("isa", ["avx512", "avx2", "portable"])
def test_instruction_set_can_be_named(model: Path, document: Path, monkeypatch: pytest.MonkeyPatch, isa: str) -> None:
    from h3kv import _native

    before = _native.isa_current()
    if isa not in _native.isa_list():
        pytest.skip(f"this processor lacks {isa}")
    monkeypatch.setenv("H3_RUNTIME__ISA", isa)
    try:
        assert run_json(model, document)["isa"] == isa
    finally:
        _native.isa_select(before)
