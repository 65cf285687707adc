import importlib.util
import json
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from h3kv.core.units import TokenCount, parse_cap
from h3kv.testing.tiny_models import write_tiny_model

ROOT = Path(__file__).parents[3]
FOLDER = ROOT / "examples" / "demo"


@pytest.fixture(scope="module")
def demo() -> ModuleType:
    """`tools/demo.py`, which is a program and no part of the package."""
    spec = importlib.util.spec_from_file_location("demo", ROOT / "tools" / "demo.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["demo"] = module
    spec.loader.exec_module(module)
    return module


def test_shipped_job_asks_about_the_middle_of_the_document(demo: ModuleType) -> None:
    job = demo.job([])
    text = job.document.read_text(encoding="utf-8")
    assert len(job.questions) == len(job.expected) > 0
    middle = text[len(text) // 10 : -len(text) // 10]
    assert any(expected in middle for expected in job.expected)
    assert not any(expected in question for expected, question in zip(job.expected, job.questions, strict=True))


def test_questions_of_the_users_own_have_no_expected_answer(demo: ModuleType) -> None:
    job = demo.job(["--document", "a.txt", "--question", "Who?", "--rope", "yarn:4", "--host-kv", "1GiB"])
    shipped = json.loads((ROOT / "examples/demo/demo.json").read_text(encoding="utf-8"))
    assert job.expected == []
    caps = [word for name, cap in shipped["caps"].items() for word in (f"--{name}", cap)]
    flags = ["--rope", "yarn:4", "--max-new-tokens", str(shipped["answer_tokens"]), *caps, "--host-kv", "1GiB"]
    words = demo.command(job, Path("kv"), questions=job.questions)
    assert words == ["h3", "run", "--document", "a.txt", *flags, "--store", "kv", "--question", "Who?"]


def test_caps_are_smaller_than_the_document(demo: ModuleType) -> None:
    shipped = json.loads((ROOT / "examples/demo/demo.json").read_text(encoding="utf-8"))
    words = (FOLDER / shipped["document"]).read_text(encoding="utf-8").split()
    in_memory = [parse_cap(shipped["caps"][name]) for name in ("device-kv", "host-kv")]
    assert all(isinstance(cap, TokenCount) and cap.count < len(words) for cap in in_memory)


def test_text_of_a_command_is_passed_on_and_its_report_given_back(
    demo: ModuleType, tmp_path: Path, capfdbinary: pytest.CaptureFixture[bytes]
) -> None:
    write_tiny_model(tmp_path / "tiny")
    (tmp_path / "a.txt").write_text("The keeper lit the lamp.")
    words = ["h3", "run", "--model", str(tmp_path / "tiny"), "--document", str(tmp_path / "a.txt")]
    report = demo.reported([*words, "--question", "Who?", "--max-new-tokens", "4"], tmp_path / "report.json")
    assert capfdbinary.readouterr().out.decode() == f"{report['answers'][0]['answer']}\n"


def test_failed_command_fails_the_demo(demo: ModuleType, tmp_path: Path) -> None:
    with pytest.raises(SystemExit) as caught:
        demo.reported(["h3", "run", "--document", "nowhere.txt", "--question", "Who?"], tmp_path / "report.json")
    assert caught.value.code == 1


def report(answer: str, *, ttft_s: float, cached: int) -> dict[str, Any]:
    answers = [{"answer": answer, "ttft_s": ttft_s, "cached_tokens": cached, "prompt_tokens": 1200}]
    return {"answers": answers, "load_s": 2.0, "wall_s": ttft_s + 5}


def test_answers_are_compared_with_what_is_expected(demo: ModuleType) -> None:
    found = report("It was Walker.", ttft_s=1.0, cached=0)
    assert demo.missing(["Walker", "not asked"], found) == []
    assert demo.missing(["22,000"], found) == ["22,000"]


def test_comparison_says_how_much_sooner_the_first_token_came(demo: ModuleType) -> None:
    text = demo.comparison(report("", ttft_s=30.0, cached=0), report("", ttft_s=0.5, cached=1152))
    assert text == (
        "the second process found 1,152 of 1,200 prompt tokens in the store: its first token came after 0.50 s, that "
        "of the first process after 30.00 s: 60 times sooner\n"
        "loading counted in: after 2.5 s and 32.0 s; the whole processes took 35 s with 1 question, 6 s with 1 question"
    )
