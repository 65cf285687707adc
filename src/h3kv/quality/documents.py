"""The text that quality is measured on: documents, in a part to choose settings by and a part that nobody has seen.

text         document | document | document | document | document | document
half         calibration                    | unseen
"""

from __future__ import annotations

import enum
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from h3kv.bench.texts import read_text
from h3kv.models.tokenizer import Tokenizer

TITLE: Final = re.compile(r"^ = [^=].*[^=] = $", re.MULTILINE)
"""Line that begins an article of WikiText."""


class Half(enum.Enum):
    """Of the text."""

    CALIBRATION = 0
    UNSEEN = 1


def read_documents(paths: Sequence[Path]) -> list[str]:
    """The documents of these files, or of the default text where none is named.

    A file is one document, or as many as it has titles of WikiText.

    Raises:
        ConfigError: a file cannot be read, or there is no default outside a checkout.
    """
    texts = [read_text(path).text for path in paths] or [read_text(None).text]
    return [document for text in texts for document in split_documents(text)]


def split_documents(text: str) -> list[str]:
    """A text cut before every title; what stands before the first one is left out where there are any."""
    starts = [match.start() for match in TITLE.finditer(text)]
    if not starts:
        return [text]
    return [text[start:end] for start, end in zip(starts, [*starts[1:], len(text)], strict=True)]


def take_half(tokenizer: Tokenizer, documents: Sequence[str], half: Half) -> list[list[int]]:
    """One half of the documents as tokens: every token of the text is in one half only.

    Cut between documents; a single one is cut in its middle.
    """
    tokens = [list(tokenizer.encode(document)) for document in documents]
    if len(tokens) == 1:
        middle = len(tokens[0]) // 2
        tokens = [tokens[0][:middle], tokens[0][middle:]]
    total, seen, cut = sum(map(len, tokens)), 0, 0
    while cut < len(tokens) - 1 and (seen == 0 or seen + len(tokens[cut]) <= total / 2):
        seen += len(tokens[cut])
        cut += 1
    return tokens[:cut] if half is Half.CALIBRATION else tokens[cut:]
