"""Texts to be scored."""

from __future__ import annotations

from pathlib import Path

import pytest

from h3kv.bench.texts import read_text
from h3kv.core.errors import ConfigError


def test_a_text_is_called_as_its_file(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("Grüße", encoding="utf-8")
    named = read_text(tmp_path / "notes.txt")
    assert (named.name, named.text) == ("notes", "Grüße")


def test_a_checkout_has_a_text_of_its_own() -> None:
    named = read_text(None)
    assert named.name in {"wikitext2", "demo"}
    assert len(named.text) > 100_000


def test_what_is_no_text_is_named(tmp_path: Path) -> None:
    (tmp_path / "data").write_bytes(b"\xff\xfe\xff")
    for place in (tmp_path / "data", tmp_path / "missing"):
        with pytest.raises(ConfigError, match="choose another --text"):
            read_text(place)
