from pathlib import Path

import pytest
import tokenizers
from tokenizers import decoders, models, pre_tokenizers

from h3kv.cli.document import SYSTEM, check_question, prompt_tokens, read_document
from h3kv.core.errors import RequestError
from h3kv.models.tokenizer import Tokenizer

WITH_ROLES = "{% for message in messages %}<{{ message.role }}>{{ message.content }}{% endfor %}<assistant>"
WITHOUT_SYSTEM = "{% if messages[0].role == 'system' %}{{ raise_exception('no system role') }}{% endif %}" + WITH_ROLES


def byte_tokenizer(chat_template: str | None) -> Tokenizer:
    """One token for each byte."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = tokenizers.Tokenizer(models.BPE(vocab={letter: id for id, letter in enumerate(letters)}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    return Tokenizer(backend, eos_ids=frozenset(), special_tokens={}, chat_template=chat_template, path="made here")


def refusal(path: Path) -> str:
    with pytest.raises(RequestError) as caught:
        read_document(path)
    return str(caught.value)


def test_text_is_read_without_its_byte_order_mark(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes("\ufeffGrüße\n".encode())
    assert read_document(tmp_path / "a.txt") == "Grüße\n"


def test_document_that_is_not_utf8_is_refused_with_the_place_and_a_cure(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(b"Gr\xfc\xdfe")
    message = refusal(tmp_path / "a.txt")
    assert "not UTF-8 text (byte 2 is 0xfc)" in message
    assert "iconv" in message


@pytest.mark.parametrize("data", [b"", b" \n\t\n", "\ufeff".encode()])
def test_empty_document_is_refused(tmp_path: Path, data: bytes) -> None:
    (tmp_path / "a.txt").write_bytes(data)
    assert "is empty" in refusal(tmp_path / "a.txt")


def test_folder_and_missing_file_are_refused_by_name(tmp_path: Path) -> None:
    assert refusal(tmp_path).startswith(f"document {tmp_path} is a folder: name a text file")
    assert refusal(tmp_path / "none.txt").startswith(f"document {tmp_path / 'none.txt'} does not exist")


def test_file_in_place_of_a_folder_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("text")
    assert "cannot be read" in refusal(tmp_path / "a.txt" / "b.txt")


def test_empty_question_is_refused() -> None:
    with pytest.raises(RequestError, match="the question is empty"):
        check_question("  \n")


def test_prompts_of_one_document_differ_only_after_it() -> None:
    tokenizer = byte_tokenizer(WITH_ROLES)
    first = tokenizer.decode(prompt_tokens(tokenizer, "The sky is blue.\n", "What is blue?"))
    second = tokenizer.decode(prompt_tokens(tokenizer, "The sky is blue.\n", "Is it?"))
    assert first == f"<system>{SYSTEM}<user>The sky is blue.\n\nWhat is blue?<assistant>"
    assert second == f"<system>{SYSTEM}<user>The sky is blue.\n\nIs it?<assistant>"


def test_template_without_a_system_role_gets_its_text_in_the_users_turn() -> None:
    tokenizer = byte_tokenizer(WITHOUT_SYSTEM)
    text = tokenizer.decode(prompt_tokens(tokenizer, "Document.", "Question?"))
    assert text == f"<user>{SYSTEM}\n\nDocument.\n\nQuestion?<assistant>"


def test_model_without_a_template_gets_plain_text() -> None:
    tokenizer = byte_tokenizer(None)
    assert tokenizer.decode(prompt_tokens(tokenizer, "Document.", "Question?")) == "Document.\n\nQuestion?\n\nAnswer:"


def test_a_document_that_never_ends_is_refused() -> None:
    with pytest.raises(RequestError, match="longer than 64"):
        read_document(Path("/dev/zero"))


def test_a_question_that_is_not_utf8_is_refused() -> None:
    with pytest.raises(RequestError, match="UTF-8"):
        check_question("a\udcffb")
