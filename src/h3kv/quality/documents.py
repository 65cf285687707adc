"""The text that quality is measured on: documents, in three portions.

text         document | document | document | document | document | document
portion      calibration         | verification        | unseen

Settings are found on the first, chosen among few on the second, and no choice sees the third.
"""

from __future__ import annotations

import enum
import itertools
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from h3kv.bench.texts import read_text
from h3kv.core.errors import ConfigError
from h3kv.models.tokenizer import Tokenizer

TITLE: Final = re.compile(r"^ = [^=].*[^=] = $", re.MULTILINE)
"""Line that begins an article of WikiText."""


class Portion(enum.Enum):
    """Third of the text."""

    CALIBRATION = 0
    VERIFICATION = 1
    UNSEEN = 2


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


def take_portion(tokenizer: Tokenizer, documents: Sequence[str], portion: Portion) -> list[list[int]]:
    """One portion of the documents as tokens: every token of the text is in one of them only.

    Cut between documents, each in the portion that its middle lies in; fewer than three are cut within.

    Raises:
        ConfigError: there is no token.
    """
    tokens = [list(tokenizer.encode(document)) for document in documents]
    count = len(Portion)
    if len(tokens) < count:
        whole = [token for document in tokens for token in document]
        ends = [len(whole) * end // count for end in range(count + 1)]
        tokens = [whole[first:last] for first, last in itertools.pairwise(ends)]
    total = sum(map(len, tokens))
    if not total:
        raise ConfigError("the text is empty: give another --text", field="text")
    ends = list(itertools.accumulate(map(len, tokens)))
    return [
        document
        for document, end in zip(tokens, ends, strict=True)
        if min((2 * end - len(document)) * count // (2 * total), count - 1) == portion.value
    ]
