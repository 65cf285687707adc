"""Where documents stand in a chat: at its very beginning, so that all chats about them share the KV of one prefix."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Final

from h3kv.models.chat_template import Messages
from h3kv.models.tokenizer import Tokenizer

_CONTINUATIONS: Final = ("", "Answer", "\n")
"""What may follow documents: the end of a message, a word, or more of the white space that ends them. Tokenizers join
these with what is before in different ways."""


def chat_with_documents(messages: Messages, texts: Sequence[str]) -> Messages:
    """The chat with a leading system message that holds the documents, and then what the chat's own one says.

    Args:
        messages: oldest first. Not modified.
        texts: of the documents, in order; none: the chat is given back as it is.
    """
    if not texts:
        return messages
    documents = "".join(f"Document {number}:\n{text}\n\n" for number, text in enumerate(texts, start=1))
    if messages and messages[0].get("role") == "system":
        return [{**messages[0], "content": f"{documents}{messages[0].get('content', '')}"}, *messages[1:]]
    return [{"role": "system", "content": documents}, *messages]


def prefix_tokens(tokenizer: Tokenizer, texts: Sequence[str]) -> list[int]:
    """The tokens with which every chat about these documents begins.

    It is what several chats with different continuations have in common. A continuation that joins the documents' last
    characters in yet another way shares a token or two less.

    Args:
        tokenizer: of the model.
        texts: of the documents, in order, at least one.

    Raises:
        RequestError: the model has no chat template, or it refuses a system message.

    Cost: the documents are tokenized once for each continuation.
    """
    prompts = [
        tokenizer.encode(tokenizer.apply_chat(chat_with_documents(_chat(text), texts), add_generation_prompt=False))
        for text in _CONTINUATIONS
    ]
    columns = zip(*prompts, strict=False)
    return [column[0] for column in itertools.takewhile(lambda column: len(set(column)) == 1, columns)]


def _chat(system: str) -> Messages:
    return [{"role": "system", "content": system}, {"role": "user", "content": system or "?"}]
