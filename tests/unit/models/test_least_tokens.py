from hypothesis import given
from hypothesis import strategies as st

from h3kv.models.least_tokens import LeastTokens
from h3kv.models.tokenizer import Tokenizer
from h3kv.testing.tiny_models import byte_tokenizer

BYTES = Tokenizer(byte_tokenizer(), eos_ids=frozenset({260}), special_tokens={}, chat_template=None, path="tiny")


@given(st.text(max_size=200))
def test_text_takes_no_fewer_tokens_than_its_bytes_say(text: str) -> None:
    assert LeastTokens(BYTES).of(text) <= len(BYTES.encode(text))


def test_long_text_takes_many() -> None:
    assert LeastTokens(BYTES).of("x" * 100_000) > 1_000
