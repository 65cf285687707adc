"""Documents, halves, windows."""

from __future__ import annotations

from pathlib import Path

import pytest

from h3kv.core.errors import ConfigError
from h3kv.models.tokenizer import Tokenizer, tokenizer_from_folder
from h3kv.quality.documents import Portion, read_documents, split_documents, take_portion
from h3kv.quality.windows import WindowSizes, choose_windows
from h3kv.testing.tiny_models import byte_tokenizer, write_tokenizer

WIKI = "\n = First = \n\n text one \n = = Part = = \n more \n\n = Second thing = \n\n text two \n"


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    folder = tmp_path_factory.mktemp("tokenizer")
    write_tokenizer(folder, byte_tokenizer())
    return tokenizer_from_folder(folder)


def test_articles_are_cut_before_their_titles() -> None:
    first, second = split_documents(WIKI)
    assert first == " = First = \n\n text one \n = = Part = = \n more \n\n"
    assert second == " = Second thing = \n\n text two \n"
    assert split_documents("no titles") == ["no titles"]


def test_each_file_is_a_document(tmp_path: Path) -> None:
    for name in "ab":
        (tmp_path / name).write_text(name * 3)
    assert read_documents([tmp_path / "a", tmp_path / "b"]) == ["aaa", "bbb"]


def test_portions_share_no_token(tokenizer: Tokenizer) -> None:
    documents = ["aaaa", "bbb", "cccc", "dd"]
    portions = [take_portion(tokenizer, documents, portion) for portion in Portion]
    assert [[len(document) for document in portion] for portion in portions] == [[4], [3], [4, 2]]
    single = [take_portion(tokenizer, ["abcdefg"], portion) for portion in Portion]
    assert [len(portion[0]) for portion in single] == [2, 2, 3]


def test_an_empty_text_is_refused(tokenizer: Tokenizer) -> None:
    with pytest.raises(ConfigError, match="--text"):
        take_portion(tokenizer, [""], Portion.UNSEEN)


def test_windows_begin_with_documents_and_do_not_overlap() -> None:
    documents = [[number] * length for number, length in enumerate((30, 10, 50, 20, 60, 40))]
    windows = choose_windows(documents, WindowSizes(context_tokens=20, scored_tokens=19), 3)
    # Starts are 0, 30, 40, 90, 110, 170; 40 tokens each: 0, 40, 90 are free of each other, then 170.
    assert [window.tokens[0] for window in windows] == [0, 2, 3]
    assert [len(window.tokens) for window in windows] == [40, 40, 40]
    # The first scored token is the one behind the context's last; all 19 are looked at.
    assert [set(window.documents) for window in windows] == [{0, 1}, {2}, {4}]


def test_one_long_document_is_cut_evenly() -> None:
    windows = choose_windows([list(range(100))], WindowSizes(context_tokens=20, scored_tokens=9), 3)
    assert [window.tokens[0] for window in windows] == [0, 35, 70]


def test_a_short_text_is_refused() -> None:
    with pytest.raises(ConfigError, match="100 tokens: 120 are needed"):
        choose_windows([list(range(100))], WindowSizes(context_tokens=20, scored_tokens=19), 3)
