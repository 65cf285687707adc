"""The document that a question is about, and the prompt made of both."""

from __future__ import annotations

from pathlib import Path
from typing import Final

from h3kv.core.errors import RequestError
from h3kv.core.units import format_size
from h3kv.models.tokenizer import Tokenizer

DOCUMENT_BYTES_MAX: Final = 64 << 20
"""Some 16 million tokens: beyond any context. A device that never ends, such as /dev/zero, is refused by it too."""

SYSTEM: Final = "You answer questions about the text that the user gives you."


def read_document(path: Path) -> str:
    """The text of a file.

    Raises:
        RequestError: missing, a folder, not readable, endless, empty, or not UTF-8. The message says what to do.
    """
    try:
        with path.open("rb") as file:
            data = file.read(DOCUMENT_BYTES_MAX + 1)
    except FileNotFoundError as error:
        raise RequestError(f"document {path} does not exist: correct the path") from error
    except IsADirectoryError as error:
        raise RequestError(f"document {path} is a folder: name a text file in it") from error
    except OSError as error:
        raise RequestError(f"document {path} cannot be read ({error.strerror}): check its permissions") from error
    if len(data) > DOCUMENT_BYTES_MAX:
        limit = format_size(DOCUMENT_BYTES_MAX)
        raise RequestError(f"document {path} is longer than {limit}: split it, no model reads that much at once")
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise RequestError(
            f"document {path} is not UTF-8 text (byte {error.start} is 0x{data[error.start]:02x}): convert it, for "
            f"example with `iconv -f LATIN1 -t UTF-8`, or extract its text first"
        ) from error
    if not text.strip():
        raise RequestError(f"document {path} is empty: there is nothing to answer from")
    return text


def check_question(question: str) -> str:
    """The question itself.

    Raises:
        RequestError: it is empty or not UTF-8.
    """
    try:
        question.encode()
    except UnicodeEncodeError as error:
        raise RequestError("the question is not UTF-8 text: check the terminal's encoding") from error
    if not question.strip():
        raise RequestError("the question is empty: give --question some text")
    return question


def prompt_tokens(tokenizer: Tokenizer, document: str, question: str) -> list[int]:
    """The prompt as tokens. The document comes first, so that prompts of one document share a long prefix.

    A model without a chat template gets the same parts as plain text.
    """
    body = f"{document.strip()}\n\n{question.strip()}"
    if tokenizer.chat_template is None:
        return tokenizer.encode(f"{body}\n\nAnswer:", add_special_tokens=True)
    try:
        text = tokenizer.apply_chat([{"role": "system", "content": SYSTEM}, {"role": "user", "content": body}])
    except RequestError:
        # Some templates know no system role. Its text then opens the user's turn.
        text = tokenizer.apply_chat([{"role": "user", "content": f"{SYSTEM}\n\n{body}"}])
    return tokenizer.encode(text)
