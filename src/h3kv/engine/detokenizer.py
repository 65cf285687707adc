"""Text from tokens as they come: never half a character, never a piece of a stop string."""

from __future__ import annotations

import codecs
from collections.abc import Callable, Sequence


class Detokenizer:
    """Turns the tokens of one answer into text, piece by piece. The pieces joined are the answer.

    Args:
        token_bytes: UTF-8 bytes of a token, perhaps parts of characters.
        stops: the text ends before whichever of these is complete first; of several that are complete at the same
            character, before the one that began first.

    Bytes that are no UTF-8 become U+FFFD, as Python's incremental decoder replaces them.
    """

    def __init__(self, token_bytes: Callable[[int], bytes], stops: Sequence[str] = ()) -> None:
        self._token_bytes = token_bytes
        self._stops = tuple(stops)
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        # Characters that are decoded but may be the beginning of a stop string.
        self._held = ""
        self._stopped = False

    @property
    def stopped(self) -> bool:
        """Whether a stop string was found. No more text comes after it."""
        return self._stopped

    def push(self, token: int) -> str:
        """Text that is certain after this token; often empty."""
        return self._release(self._decoder.decode(self._token_bytes(token)))

    def finish(self) -> str:
        """The rest of the text: what was held back, with U+FFFD for a character that was never completed."""
        text = self._release(self._decoder.decode(b"", final=True)) + self._held
        self._held = ""
        return text

    def _release(self, text: str) -> str:
        """Take in decoded text; give out what cannot belong to a stop string."""
        if self._stopped:
            return ""
        pending = self._held + text
        found = [(at + len(stop), at) for stop in self._stops if (at := pending.find(stop)) >= 0]
        if found:
            self._stopped = True
            self._held = ""
            _, start = min(found)
            return pending[:start]
        held = self._held_length(pending)
        self._held = pending[len(pending) - held :]
        return pending[: len(pending) - held]

    def _held_length(self, text: str) -> int:
        """Length of the longest end of the text that begins a stop string."""
        longest = max((len(stop) for stop in self._stops), default=1) - 1
        for length in range(min(longest, len(text)), 0, -1):
            end = text[-length:]
            if any(stop.startswith(end) for stop in self._stops):
                return length
        return 0
