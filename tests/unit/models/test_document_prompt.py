import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import decoders, models, pre_tokenizers

from h3kv.core.errors import RequestError
from h3kv.models.chat_template import Messages
from h3kv.models.document_prompt import chat_with_documents, prefix_tokens
from h3kv.models.tokenizer import Tokenizer
from h3kv.testing.tiny_models import CHAT_TEMPLATE, byte_tokenizer

QUESTION: Messages = [{"role": "user", "content": "What?"}]


def tokenizer(backend: tokenizers.Tokenizer, template: str | None = CHAT_TEMPLATE) -> Tokenizer:
    return Tokenizer(backend, eos_ids=frozenset({260}), special_tokens={}, chat_template=template, path="tiny")


def joining() -> tokenizers.Tokenizer:
    """Joins newlines with one another and with the letter behind."""
    tokens = [*sorted(pre_tokenizers.ByteLevel.alphabet()), "\u010a\u010a", "\u010aA", "\u010a\u010aA"]
    merges = [("\u010a", "\u010a"), ("\u010a\u010a", "A"), ("\u010a", "A")]
    backend = tokenizers.Tokenizer(models.BPE({token: index for index, token in enumerate(tokens)}, merges))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    return backend


BYTES = tokenizer(byte_tokenizer())


def test_documents_come_first_and_then_what_the_system_says() -> None:
    own: Messages = [{"role": "system", "content": "Be brief.", "name": "s"}, *QUESTION]
    chat = chat_with_documents(own, ["One.", "Two."])
    expected = "Document 1:\nOne.\n\nDocument 2:\nTwo.\n\nBe brief."
    assert chat == [{"role": "system", "content": expected, "name": "s"}, *QUESTION]
    assert own[0]["content"] == "Be brief.", "not modified"
    assert chat_with_documents(QUESTION, ["One."]) == [
        {"role": "system", "content": "Document 1:\nOne.\n\n"},
        *QUESTION,
    ]
    assert chat_with_documents(QUESTION, []) is QUESTION
    assert chat_with_documents([], ["One."]) == [{"role": "system", "content": "Document 1:\nOne.\n\n"}]


@settings(max_examples=60)
@given(st.lists(st.text(max_size=20), min_size=1, max_size=3), st.text(max_size=20), st.text(max_size=5))
def test_every_chat_begins_with_the_tokens_of_its_documents(texts: list[str], question: str, system: str) -> None:
    prefix = prefix_tokens(BYTES, texts)
    for own in ([], [{"role": "system", "content": system}]):
        chat = chat_with_documents([*own, {"role": "user", "content": question}], texts)
        prompt = BYTES.encode(BYTES.apply_chat(chat))
        assert prompt[: len(prefix)] == prefix
    assert texts[-1] in BYTES.decode(prefix)


@settings(max_examples=30)
@given(st.lists(st.text(max_size=20), min_size=1, max_size=3), st.text(max_size=20))
def test_documents_before_a_further_one_begin_alike(texts: list[str], further: str) -> None:
    prefix = prefix_tokens(BYTES, texts)
    assert prefix_tokens(BYTES, [*texts, further])[: len(prefix)] == prefix


def test_tokens_that_join_with_what_follows_are_not_of_the_prefix() -> None:
    joins = tokenizer(joining())
    prefix = prefix_tokens(joins, ["One."])
    assert joins.decode(prefix).endswith("One.")
    for own in ("Answer well.", "\nA", "be"):
        chat = chat_with_documents([{"role": "system", "content": own}, *QUESTION], ["One."])
        assert joins.encode(joins.apply_chat(chat))[: len(prefix)] == prefix


def test_models_without_a_place_for_documents_say_so() -> None:
    with pytest.raises(RequestError, match="no chat template"):
        prefix_tokens(tokenizer(byte_tokenizer(), None), ["One."])
    refuses = "{% if messages[0].role == 'system' %}{{ raise_exception('no system role') }}{% endif %}"
    with pytest.raises(RequestError, match="no system role"):
        prefix_tokens(tokenizer(byte_tokenizer(), refuses), ["One."])
