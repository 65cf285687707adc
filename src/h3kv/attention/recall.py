"""Which layers of which steps are in the sample that recall is measured on, and what was found of each layer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence


class RecallSample:
    """What was measured of all sequences that share it."""

    def __init__(self) -> None:
        self._turns = 0
        self._shares: dict[int, tuple[float, int]] = {}

    @property
    def means(self) -> Mapping[int, float]:
        """Mean share of the attention that was read exactly, of each layer that was measured."""
        return {layer: total / count for layer, (total, count) in sorted(self._shares.items())}

    def open_turn(self) -> RecallTurn:
        """The turn of one sequence. Each begins with another layer, so that short answers together see all of them."""
        self._turns += 1
        return RecallTurn(self._turns - 1)

    def record(self, layer: int, share: float) -> None:
        """What one measurement of a layer found."""
        total, count = self._shares.get(layer, (0.0, 0))
        self._shares[layer] = (total + share, count + 1)


class RecallTurn:
    """Takes the layers that retrieve in turn, one for each measured step of a sequence."""

    def __init__(self, start: int) -> None:
        self._next = start

    def take(self, layers: Sequence[int]) -> int | None:
        """The layer to measure now, one of these; None where there are none."""
        if not layers:
            return None
        self._next += 1
        return layers[(self._next - 1) % len(layers)]
