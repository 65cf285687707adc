"""Ctrl-C at any point of `h3 run` leaves the cold store intact: what was written whole is found again."""

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

import pytest
from typer.testing import CliRunner

from h3kv.cli.app import app
from h3kv.testing.tiny_models import write_tiny_model

DEADLINE_S = 120.0
DOCUMENT = "The keeper climbed the stairs and lit the lamp before the storm came over the bay. " * 60
FLAGS = ("--window", "64", "--device-kv", "2048tokens", "--host-kv", "16MiB", "--dtype", "fp32")

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random model that reaches 8,192 tokens; a token is a byte or two."""
    folder = tmp_path_factory.mktemp("models") / "tiny"
    write_tiny_model(folder, max_position_embeddings=8192)
    return folder


@pytest.fixture
def flags(model: Path, tmp_path: Path) -> Iterator[list[str]]:
    """Of `h3 run` over a store that is intact when the test has ended."""
    (tmp_path / "document.txt").write_text(DOCUMENT, encoding="utf-8")
    (tmp_path / "kv").mkdir()
    yield [
        *("run", "--model", str(model), "--document", str(tmp_path / "document.txt"), "--question", "Who?"),
        *("--store", str(tmp_path / "kv"), "--store-capacity", "128MiB", *FLAGS),
    ]
    checked = CliRunner().invoke(app, ["verify", str(tmp_path / "kv")])
    assert checked.exit_code == 0, checked.output


def started(flags: list[str]) -> subprocess.Popen[str]:
    environment = os.environ | {"H3_ENGINE__CHUNK_TOKENS": "64"}
    command = [sys.executable, "-u", "-m", "h3kv", *flags, "--max-new-tokens", "2000"]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment)


def await_text(stream: IO[str] | None, pattern: str) -> None:
    """Read until something matches."""
    assert stream is not None
    text = ""
    while not re.search(pattern, text):
        character = stream.read(1)
        assert character, f"{pattern} did not come in {text}"
        text += character


def interrupt(process: subprocess.Popen[str], *, times: int = 1) -> None:
    for _ in range(times):
        process.send_signal(signal.SIGINT)
    _, text = process.communicate(timeout=DEADLINE_S)
    assert process.returncode == 130, text
    assert "Traceback" not in text


def next_answer(flags: list[str]) -> dict[str, Any]:
    result = CliRunner().invoke(app, [*flags, "--max-new-tokens", "8", "--json"])
    assert result.exit_code == 0, result.stderr
    found: dict[str, Any] = json.loads(result.stdout)["answers"][0]
    return found


def resident_answer(flags: list[str]) -> str:
    return str(next_answer([*flags, "--tiering", "off", "--device-kv", "64MiB"])["answer"])


def test_while_the_model_is_loaded(flags: list[str]) -> None:
    with started(flags) as process:
        await_text(process.stderr, "loading")
        interrupt(process)
    assert next_answer(flags)["cached_tokens"] == 0


@pytest.mark.parametrize("mark", ["reading: 0", r"reading: 0 % 2\d", r"reading: 0 %.* 7\d"])
def test_while_the_document_is_read(flags: list[str], mark: str) -> None:
    with started(flags) as process:
        await_text(process.stderr, mark)
        interrupt(process)
    answer = next_answer(flags)
    assert answer["cached_tokens"] % 64 == 0
    assert answer["cached_tokens"] > 0 or mark == "reading: 0"
    assert answer["answer"] == resident_answer(flags)


def test_while_the_answer_is_written(flags: list[str]) -> None:
    with started(flags) as process:
        assert process.stdout is not None
        assert process.stdout.read(1)
        interrupt(process)
    answer = next_answer(flags)
    assert answer["cached_tokens"] > answer["prompt_tokens"] - 64
    assert answer["answer"] == resident_answer(flags)


def test_twice_so_that_closing_is_interrupted_too(flags: list[str]) -> None:
    with started(flags) as process:
        assert process.stdout is not None
        assert process.stdout.read(1)
        interrupt(process, times=2)
    answer = next_answer(flags)
    assert answer["cached_tokens"] % 64 == 0
    assert answer["answer"] == resident_answer(flags)
