"""How much of what full attention reads an answer's tokens attended to."""

from __future__ import annotations

from h3kv.attention.retrieval import RetrievalMeter


class AttendedTokens:
    """Adds up over the tokens of one answer.

    Args:
        layers, kv_heads: of the model.
        window_tokens: newest tokens that are always read.
    """

    def __init__(self, *, layers: int, kv_heads: int, window_tokens: int) -> None:
        self._layers = layers
        self._kv_heads = kv_heads
        self._window_tokens = window_tokens
        self._read = 0.0
        self._there = 0.0

    def add(self, tokens: int, before: RetrievalMeter, after: RetrievalMeter) -> None:
        """A token attended to so many, itself included.

        Args:
            tokens: that there are.
            before, after: what retrieval had read, and in how many layers.
        """
        retrieving = after.rows - before.rows
        outside = after.exact_tokens - before.exact_tokens
        chosen = (after.chosen_tokens - before.chosen_tokens) / self._kv_heads
        self._read += (
            (self._layers - retrieving) * tokens + retrieving * min(tokens, self._window_tokens) + outside + chosen
        )
        self._there += self._layers * tokens

    @property
    def fraction(self) -> float | None:
        """Of all that was there, mean over layers and KV heads; None before the first token."""
        return min(self._read / self._there, 1.0) if self._there else None
