import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer as Pipeline
from tokenizers import decoders, models

from h3kv.core.errors import ModelCorruptError, ModelUnsupportedError, RequestError
from h3kv.models.gguf_file import GgufFile
from h3kv.models.gguf_tokenizer import tokenizer_from_gguf
from h3kv.models.tokenizer import Tokenizer, tokenizer_from_folder
from h3kv.testing.tiny_gguf import write_tiny_gguf
from h3kv.testing.tiny_models import (
    CHAT_TEMPLATE,
    TURN_END,
    TURN_START,
    byte_tokenizer,
    write_tiny_model,
    write_tokenizer,
)

SPECIAL = {"bos_token": TURN_START, "eos_token": TURN_END}
MESSAGES = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi \u00e9"}]
BYTES = Tokenizer(
    byte_tokenizer(), eos_ids=frozenset({260}), special_tokens=SPECIAL, chat_template=CHAT_TEMPLATE, path="tiny"
)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_tokenizer(tmp_path, byte_tokenizer())
    return tmp_path


@given(st.text())
def test_decoding_gives_back_what_was_encoded(text: str) -> None:
    ids = BYTES.encode(text)
    assert BYTES.decode(ids) == text
    assert b"".join(map(BYTES.token_bytes, ids)) == text.encode()


def test_tokens_can_be_parts_of_a_character() -> None:
    parts = [BYTES.token_bytes(token) for token in BYTES.encode("\u00e9")]
    assert parts == [b"\xc3", b"\xa9"]
    assert BYTES.decode(BYTES.encode("\u00e9")[:1]) == "\ufffd"


def test_every_byte_has_a_token_and_special_tokens_are_their_names() -> None:
    tokens = [BYTES.token_bytes(token) for token in range(BYTES.vocabulary_size)]
    assert sorted(tokens[:256]) == [bytes([byte]) for byte in range(256)]
    assert tokens[256:] == [b"th", b"the", b"<|endoftext|>", b"<|im_start|>", b"<|im_end|>"]


def test_byte_level_token_with_a_foreign_letter_stands_for_its_text() -> None:
    vocabulary = {"\u0120a": 0, "\u4f60\u597d": 1}
    backend = Pipeline(models.BPE(vocabulary, []))
    backend.decoder = decoders.ByteLevel()
    tokenizer = Tokenizer(backend, eos_ids=frozenset(), special_tokens={}, chat_template=None, path="tiny")
    assert tokenizer.decode([0, 1]) == " a\u4f60\u597d"


def test_ids_beyond_the_vocabulary_have_no_bytes() -> None:
    assert BYTES.token_bytes(BYTES.vocabulary_size) == b""


def test_chat_text_is_what_the_template_says() -> None:
    text = BYTES.apply_chat(MESSAGES)
    expected = "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHi \u00e9<|im_end|>\n"
    assert text == expected + "<|im_start|>assistant\n"
    assert BYTES.apply_chat(MESSAGES, add_generation_prompt=False) == expected
    assert BYTES.decode(BYTES.encode(text)) == text
    assert BYTES.encode(text).count(260) == 2


def test_folder_and_transformers_agree(tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    write_tiny_model(tmp_path)
    ours, theirs = tokenizer_from_folder(tmp_path), AutoTokenizer.from_pretrained(tmp_path)
    text = "the other\n\n  caf\u00e9 <|im_end|> \U0001f642 12345"
    assert ours.encode(text) == theirs(text)["input_ids"]
    assert ours.decode(ours.encode(text)) == theirs.decode(theirs(text)["input_ids"])
    expected = theirs.apply_chat_template(MESSAGES, tokenize=False, add_generation_prompt=True)
    assert ours.apply_chat(MESSAGES) == expected
    assert ours.eos_ids == {theirs.eos_token_id}


def test_gguf_and_folder_agree(tmp_path: Path) -> None:
    model = write_tiny_model(tmp_path / "folder")
    write_tiny_gguf(tmp_path / "model.gguf", model)
    from_folder, from_gguf = (
        tokenizer_from_folder(tmp_path / "folder"),
        tokenizer_from_gguf(GgufFile(tmp_path / "model.gguf")),
    )
    text = BYTES.apply_chat(MESSAGES) + "the other 12345 it's"
    assert from_folder.encode(text) == from_gguf.encode(text)
    assert from_folder.apply_chat(MESSAGES) == from_gguf.apply_chat(MESSAGES)
    assert from_gguf.eos_ids == {258, 260}, "the stated one and <|endoftext|>"


def test_end_tokens_come_from_every_file_that_states_them(folder: Path) -> None:
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [7, 8]}))
    (folder / "config.json").write_text(json.dumps({"eos_token_id": 9}))
    assert tokenizer_from_folder(folder).eos_ids == {7, 8, 9, 260}


@pytest.mark.parametrize(
    "settings",
    [
        {"chat_template": [{"name": "tool_use", "template": "T"}, {"name": "default", "template": "{{ eos_token }}"}]},
        {"chat_template": "{{ eos_token }}"},
    ],
)
def test_chat_template_may_be_one_or_a_list(folder: Path, settings: dict[str, object]) -> None:
    content = {"eos_token": {"content": TURN_END, "special": True}} | settings
    (folder / "tokenizer_config.json").write_text(json.dumps(content))
    assert tokenizer_from_folder(folder).apply_chat([]) == TURN_END


def test_chats_with_tools_take_the_template_for_them(folder: Path) -> None:
    named = {"default": "plain", "tool_use": "{{ tools | length }}"}
    settings = {"chat_template": [{"name": name, "template": source} for name, source in named.items()]}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    tokenizer = tokenizer_from_folder(folder)
    assert tokenizer.apply_chat(MESSAGES) == "plain"
    assert tokenizer.apply_chat(MESSAGES, tools=[{"type": "function"}]) == "1"


def test_gguf_may_bring_a_template_for_chats_with_tools(tmp_path: Path) -> None:
    metadata = {"tokenizer.chat_template.tool_use": "{{ tools | length }}"}
    write_tiny_gguf(tmp_path / "model.gguf", write_tiny_model(tmp_path / "folder"), metadata=metadata)
    tokenizer = tokenizer_from_gguf(GgufFile(tmp_path / "model.gguf"))
    assert tokenizer.apply_chat(MESSAGES, tools=[{"type": "function"}]) == "1"
    assert tokenizer.apply_chat(MESSAGES) == BYTES.apply_chat(MESSAGES)


def test_chat_template_in_its_own_file_goes_first(folder: Path) -> None:
    (folder / "chat_template.jinja").write_text("{{ messages[0]['content'] }}!")
    assert tokenizer_from_folder(folder).apply_chat([{"role": "user", "content": "Hi"}]) == "Hi!"


def test_model_without_a_chat_template_asks_for_a_plain_prompt(folder: Path) -> None:
    (folder / "tokenizer_config.json").unlink()
    with pytest.raises(RequestError, match="plain prompt"):
        tokenizer_from_folder(folder).apply_chat(MESSAGES)


def test_messages_that_the_template_refuses_name_its_reason(folder: Path) -> None:
    (folder / "chat_template.jinja").write_text("{{ raise_exception('roles must alternate') }}")
    with pytest.raises(RequestError, match=r"roles must alternate.*change their roles or order"):
        tokenizer_from_folder(folder).apply_chat(MESSAGES)


def test_templates_cannot_reach_python(folder: Path) -> None:
    (folder / "chat_template.jinja").write_text("{{ messages.__class__.__mro__ }}")
    with pytest.raises(RequestError, match="unsafe"):
        tokenizer_from_folder(folder).apply_chat(MESSAGES)


def test_broken_template_is_refused(folder: Path) -> None:
    (folder / "chat_template.jinja").write_text("{% for %}")
    with pytest.raises(ModelCorruptError, match="not valid Jinja"):
        tokenizer_from_folder(folder)


def test_truncation_and_padding_of_the_file_are_switched_off(folder: Path) -> None:
    limited = byte_tokenizer()
    limited.enable_truncation(4)
    limited.enable_padding(length=8)
    limited.save(str(folder / "tokenizer.json"))
    assert len(tokenizer_from_folder(folder).encode("0123456789")) == 10


def test_begin_token_is_added_only_where_asked_for(tmp_path: Path) -> None:
    metadata = {"tokenizer.ggml.bos_token_id": 259, "tokenizer.ggml.pre": "llama-bpe"}
    write_tiny_gguf(tmp_path / "model.gguf", write_tiny_model(tmp_path / "folder"), metadata=metadata)
    tokenizer = tokenizer_from_gguf(GgufFile(tmp_path / "model.gguf"))
    plain = tokenizer.encode("x")
    assert tokenizer.encode("x", add_special_tokens=True) == [259, *plain]


def test_unknown_decoders_are_refused_by_name(folder: Path) -> None:
    other = byte_tokenizer()
    other.decoder = decoders.WordPiece()
    other.save(str(folder / "tokenizer.json"))
    with pytest.raises(ModelUnsupportedError, match="WordPiece"):
        tokenizer_from_folder(folder)


# As llama.cpp cuts the same text.
PIECES = {
    "default": "x 123 45 _it ' s _WE ' LL __// $ 5 . 00 _end",
    "gpt-2": "x 12345 _it 's _WE ' LL __/ / $ 5 . 00 _end",
    "smollm": "x 1 2 3 4 5 _it 's _WE ' LL __/ / $ 5 . 0 0 _end",
    "llama-bpe": "x 123 45 _it 's _WE 'LL __// $ 5 . 00 _end",
    "qwen2": "x 1 2 3 4 5 _it 's _WE 'LL __// $ 5 . 0 0 _end",
}


@pytest.mark.parametrize("pre", PIECES)
def test_text_is_cut_as_the_name_of_the_pre_tokenizer_says(tmp_path: Path, pre: str) -> None:
    write_tiny_gguf(tmp_path / "m.gguf", write_tiny_model(tmp_path / "folder"), metadata={"tokenizer.ggml.pre": pre})
    backend = tokenizer_from_gguf(GgufFile(tmp_path / "m.gguf")).backend
    cut = backend.pre_tokenizer.pre_tokenize_str("x12345 it's WE'LL  \n\n$5.00 end")
    shown = [piece.replace("\u0120", "_").replace("\u010a", "/") for piece, _ in cut]
    assert " ".join(shown) == PIECES[pre]


def test_sentencepiece_merges_by_score_and_falls_back_to_bytes(tmp_path: Path) -> None:
    pieces = {"\u2581": -9.0, "a": -8.0, "b": -7.0, "ab": -2.0, "\u2581a": -1.0, "\u2581ab": -3.0}
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *pieces]
    metadata = {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.scores": [0.0] * 259 + list(pieces.values()),
        "tokenizer.ggml.token_type": [2, 3, 3] + [6] * 256 + [1] * len(pieces),
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
    }
    write_tiny_gguf(tmp_path / "model.gguf", write_tiny_model(tmp_path / "folder"), metadata=metadata)
    tokenizer = tokenizer_from_gguf(GgufFile(tmp_path / "model.gguf"))
    spelled = [tokens[token] for token in tokenizer.encode("ab aba\u00e9", add_special_tokens=True)]
    assert spelled == ["<s>", "\u2581ab", "\u2581ab", "a", "<0xC3>", "<0xA9>"]
    assert tokenizer.decode(tokenizer.encode("ab aba\u00e9")) == " ab aba\u00e9"
    assert tokenizer.eos_ids == {2}
