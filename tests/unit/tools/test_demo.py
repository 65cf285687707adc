import importlib.util
import json
import sys
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[3]


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
    job = demo.job(["--document", "a.txt", "--question", "Who?", "--rope", "yarn:4", "--threads", "1"])
    shipped = json.loads((ROOT / "examples/demo/demo.json").read_text(encoding="utf-8"))
    assert job.expected == []
    limit = str(shipped["answer_tokens"])
    flags = ["--rope", "yarn:4", "--max-new-tokens", limit, "--threads", "1"]
    assert demo.command(job) == ["h3", "run", "--document", "a.txt", *flags, "--question", "Who?"]


def test_what_a_command_says_is_passed_on_and_given_back(
    demo: ModuleType, capfdbinary: pytest.CaptureFixture[bytes]
) -> None:
    text = demo.spoken(["h3", "--version"])
    assert text.startswith("h3 ")
    assert capfdbinary.readouterr().out == text.encode()


def test_failed_command_fails_the_demo(demo: ModuleType) -> None:
    with pytest.raises(SystemExit) as caught:
        demo.spoken(["h3", "run", "--document", "nowhere.txt", "--question", "Who?"])
    assert caught.value.code == 1
