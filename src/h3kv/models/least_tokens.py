"""How few tokens a text may be, known before it is cut into them."""

from __future__ import annotations

import functools
from typing import Final

from h3kv.models.tokenizer import Tokenizer

NORMALIZED_MAX: Final = 4
"""Bytes that one becomes of at most where a tokenizer changes characters first."""


class LeastTokens:
    """Of one tokenizer. Thread-safe."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer

    def of(self, text: str) -> int:
        """Tokens that a text has at least. Cost: nothing compared to cutting it."""
        size = len("".join(text.split()).encode())
        return size // self._token_bytes_max if self._token_bytes_max else 0

    @functools.cached_property
    def _token_bytes_max(self) -> int:
        """Bytes of a text that one token may stand for; 0: any number. Cost: reads the vocabulary once."""
        tokenizer = self._tokenizer
        if getattr(tokenizer.backend.model, "fuse_unk", True):
            return 0
        longest = max(len(tokenizer.token_bytes(token)) for token in tokenizer.backend.get_vocab().values())
        return longest * (1 if tokenizer.backend.normalizer is None else NORMALIZED_MAX)
