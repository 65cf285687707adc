"""Flags of `h3 bench` reach the measurements, and what is wrong is said before the first of them."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner

from h3kv.cli.app import app
from h3kv.testing.engines import one_thread
from h3kv.testing.tiny_models import write_tiny_model


@pytest.mark.slow
def test_repetitions_count_for_both_parts_of_decode_and_any_vocabulary_will_do(tmp_path: Path) -> None:
    model, store = tmp_path / "model", tmp_path / "store"
    write_tiny_model(model, "llama", max_position_embeddings=2048, vocab_size=128)
    store.mkdir()
    flags = ["--quick", "--model", str(model), "--repetitions", "1", "--threads", "1", "--store", str(store)]
    with one_thread():
        result = CliRunner().invoke(app, ["bench", "decode", *flags])
    assert result.exit_code == 0, result.stderr
    assert result.stderr.count("decode 8K, h3:") == 1
    assert result.stderr.count("decode 8k, cold:") == 2, "one line says that it is filled"


@pytest.mark.parametrize("command", ["decode", "exact", "services", "all"])
def test_a_text_that_cannot_be_read_is_named_before_anything_is_measured(tmp_path: Path, command: str) -> None:
    flags = ["--model", str(tmp_path / "model"), "--text", str(tmp_path / "missing")]
    result = CliRunner().invoke(app, ["bench", command, *flags])
    assert result.exit_code != 0
    assert "choose another --text" in result.stderr
    assert "attend" not in result.stderr
