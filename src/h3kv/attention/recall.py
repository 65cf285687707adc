"""Which layers of which steps are in the sample that recall is measured on."""

from __future__ import annotations

from collections.abc import Collection


class RecallSample:
    """Takes the layers that retrieve in turn, over all sequences that share it: none is measured more often."""

    def __init__(self) -> None:
        self._last = -1

    def next_layer(self, layers: int, dense_layers: Collection[int]) -> int | None:
        """The layer to measure in the next step that is in the sample; None where all of them are dense."""
        for ahead in range(1, layers + 1):
            layer = (self._last + ahead) % layers
            if layer not in dense_layers:
                self._last = layer
                return layer
        return None
