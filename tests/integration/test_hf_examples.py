"""The examples for models of one's own run, and say what they promise."""

from __future__ import annotations

import difflib
import os
import subprocess
import sys
from pathlib import Path

import pytest

from h3kv.testing.tiny_models import write_tiny_model

EXAMPLES = Path(__file__).parents[2] / "examples"
PLAIN = EXAMPLES / "plain_attention"
CHANGED_LINES_MAX = 19


def run(script: Path, *arguments: str | Path) -> str:
    """What a script writes. One thread: small products gain nothing from more, and lose much on busy cores."""
    command = [sys.executable, "-W", "error", str(script), *map(str, arguments)]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    result = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    return result.stdout


@pytest.mark.slow
def test_two_edits_change_few_lines_and_no_token(tmp_path: Path) -> None:
    before, after = ((PLAIN / name).read_text(encoding="utf-8").splitlines() for name in ("before.py", "after.py"))
    changed = [line for line in difflib.ndiff(before, after) if line[0] in "+-"]
    assert 0 < len(changed) <= CHANGED_LINES_MAX
    answer = run(PLAIN / "before.py")
    assert len(set(answer.split(","))) > 10
    assert run(PLAIN / "after.py", tmp_path) == answer
    assert (tmp_path / "store.h3").exists()


@pytest.mark.slow
def test_the_transformers_example_uses_all_tiers(tmp_path: Path) -> None:
    model, store = tmp_path / "model", tmp_path / "store"
    store.mkdir()
    write_tiny_model(model)
    caps = ("--device-bytes", "4MiB", "--host-bytes", "8MiB")
    answer = run(EXAMPLES / "transformers_generate.py", "--store", store, "--model", model, *caps)
    tiers = [line.split(": ") for line in answer.splitlines()[-3:]]
    assert [name for name, _ in tiers] == ["device", "host", "nvme"]
    assert all(int(used.split()[0]) > 0 for _, used in tiers)
    assert list(store.iterdir()) == []


def test_example_without_its_argument_says_how_to_call_it() -> None:
    result = subprocess.run([sys.executable, PLAIN / "after.py"], capture_output=True, text=True, check=False)
    assert (result.returncode, result.stderr) == (1, "usage: python after.py FOLDER\n")
