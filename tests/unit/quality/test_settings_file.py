"""Calibration writes its own part of a file of settings and nothing else."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from h3kv.config import load
from h3kv.core.errors import ConfigError
from h3kv.core.types import Encoding
from h3kv.quality.settings_file import merge_settings, settings_of, write_settings
from h3kv.quality.variants import exact, retrieval

EXACT = {"encoding": "k8v4", "mode": "exact"}


def merged(text: str) -> str:
    return merge_settings(text, EXACT, name="h3_config.yaml")


def test_an_empty_file_gets_the_section() -> None:
    assert yaml.safe_load(merged("")) == {"attention": EXACT}
    assert merged("# mine\n").startswith("# mine\nattention:\n")


def test_what_else_is_in_the_file_stays_with_its_comments() -> None:
    text = "# caps\nhost:\n  kv_bytes: 4GiB  # half\n\n# reading\nattention:\n  mode: retrieval\n  recall_every: 8\n"
    text += "\n# the model\nmodel: {dtype: bf16}\n"
    found = merged(text)
    assert found.startswith("# caps\nhost:\n  kv_bytes: 4GiB  # half\n\n# reading\nattention:\n")
    assert found.endswith("\n# the model\nmodel: {dtype: bf16}\n")
    tree = yaml.safe_load(found)
    assert tree["attention"] == {"mode": "exact", "recall_every": 8, "encoding": "k8v4"}
    assert tree["host"] == {"kv_bytes": "4GiB"}


@pytest.mark.parametrize(
    "text",
    [
        "attention:\n  mode: exact",
        "attention: {mode: retrieval}\nmodel:\n  dtype: bf16\n",
        "model:\n  dtype: bf16",
        "{model: {dtype: bf16}}",
        "attention:\nmodel: {dtype: bf16}\n",
        "attention:\n  dense_layers:\n  - 0\n  - 1\n# end\n",
        "model: {}\nattention:\n  dense_layers: [0,\n    1]\nhost: {}\n",
    ],
)
def test_any_way_to_write_the_file_is_understood(text: str) -> None:
    before = yaml.safe_load(text)
    after = yaml.safe_load(merged(text))
    assert after.pop("attention") == {**(before.pop("attention", None) or {}), **EXACT}
    assert after == before


@pytest.mark.parametrize("text", ["- a\n", "attention: 3\n", "a: [\n"])
def test_what_is_no_file_of_settings_is_refused(text: str) -> None:
    with pytest.raises(ConfigError):
        merged(text)


def test_a_node_reads_what_was_written(tmp_path: Path) -> None:
    file = tmp_path / "h3_config.yaml"
    write_settings(file, retrieval(Encoding.K8V4, 512, dense_layers=(0, 1), shortlist_share=0.5))
    attention = load(file=file).attention
    assert (attention.encoding, attention.mode, attention.budget_tokens) == ("k8v4", "retrieval", 512)
    assert (attention.dense_layers, attention.shortlist_share) == ((0, 1), 0.5)
    write_settings(file, exact(Encoding.INT8))
    assert (load(file=file).attention.encoding, load(file=file).attention.mode) == ("int8", "exact")
    assert list(tmp_path.iterdir()) == [file]


def test_a_file_that_cannot_be_written_says_so(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="--config"):
        write_settings(tmp_path / "missing" / "h3_config.yaml", exact(Encoding.INT8))


def test_exact_settings_name_no_budget() -> None:
    assert settings_of(exact(Encoding.INT4)) == {"encoding": "int4", "mode": "exact"}
