"""What a sequence will take next, and how much of it can be read before it does.

    attention of layer 3    | gap: layer 4 up to its attention                 | attention of layer 4
    take    give back       | reads ahead for layers 4, 5: as much as the gap  | take: what is missing is read first
                            | carries at the measured speed                    |

Shapes: N units of one layer.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

import numpy as np
from numpy.typing import NDArray

from h3kv.core.units import NS_PER_S
from h3kv.engine.page_slots import KEY_DTYPE

GROUP_LAYERS: Final = 4
"""Layers whose predictions share a bound."""

GROUP_STATE_BYTES: Final = 32 << 10
"""Bound on what a sequence keeps of each group of layers."""

_COMPACT_DTYPE: Final = np.dtype([("segment", "<u4"), ("unit", "<u4")])

LAYER_UNITS_MAX: Final = GROUP_STATE_BYTES // GROUP_LAYERS // _COMPACT_DTYPE.itemsize
"""Units that are expected of one layer."""

AHEAD_LAYERS: Final = 4
"""How many layers ahead are looked at: pages for later ones push out what is needed sooner."""

_NOTHING: Final = np.zeros(0, dtype=_COMPACT_DTYPE)


class Predictor:
    """Of one sequence. A layer takes what somebody guessed, and again what it took in the step before.

    Args:
        layers: of the model.
    """

    def __init__(self, layers: int) -> None:
        reach = range(1, min(AHEAD_LAYERS, layers - 1) + 1)
        self._following_LA = [[(layer + distance) % layers for distance in reach] for layer in range(layers)]
        # What is expected of each layer and was not looked at yet.
        self._guessed_L = [_NOTHING] * layers
        self._taken_L = [_NOTHING] * layers
        # `PageSlots.uses` when it was taken.
        self._uses_L = [0] * layers

    def note(self, layer: int, keys_N: NDArray[np.void], *, uses: int) -> None:
        """A layer took these; the next step may do so again. What was guessed of it before is void.

        Args:
            layer: index of it.
            keys_N: KEY_DTYPE.
            uses: `PageSlots.uses` now.
        """
        self._guessed_L[layer] = _NOTHING
        self._taken_L[layer] = _compact(keys_N[:LAYER_UNITS_MAX])
        self._uses_L[layer] = uses

    def expect(self, layer: int, keys_N: NDArray[np.void]) -> None:
        """Guess what a layer will take, before all that was expected of it so far."""
        guessed_N = _compact(keys_N[:LAYER_UNITS_MAX])
        if len(self._guessed_L[layer]):
            guessed_N = np.concatenate([guessed_N, self._guessed_L[layer]])[:LAYER_UNITS_MAX]
        self._guessed_L[layer] = guessed_N
        self._taken_L[layer] = self._taken_L[layer][: LAYER_UNITS_MAX - len(guessed_N)]

    def uses(self, layer: int) -> int:
        """`PageSlots.uses` when a layer took last; 0: it never did."""
        return self._uses_L[layer]

    def follows(self, layer: int, other: int) -> bool:
        """Whether the other layer is so near behind that one that it is looked at."""
        return other in self._following_LA[layer]

    def expects(self, layer: int, *, kept_since: int) -> bool:
        """Whether anything is expected of the layers after this one that may have to be read; see `ahead`."""
        return any(
            len(self._guessed_L[following]) or (len(self._taken_L[following]) and self._uses_L[following] < kept_since)
            for following in self._following_LA[layer]
        )

    def ahead(self, layer: int, *, kept_since: int) -> Iterator[tuple[int, NDArray[np.void]]]:
        """What is expected of the layers after this one, the nearest first.

        Args:
            layer: the one that has taken last.
            kept_since: what was taken since then (`PageSlots.uses`) is there anyway.
        """
        for following in self._following_LA[layer]:
            expected_N = self._guessed_L[following]
            if self._uses_L[following] < kept_since:
                expected_N = np.concatenate([expected_N, self._taken_L[following]])
            if len(expected_N):
                keys_N = np.zeros(len(expected_N), dtype=KEY_DTYPE)
                keys_N["segment"], keys_N["unit"] = expected_N["segment"], expected_N["unit"]
                keys_N["layer"] = following
                yield following, keys_N

    def drop(self, layer: int, units: int) -> None:
        """The first ones that were expected of a layer are there, or on their way."""
        guessed = len(self._guessed_L[layer])
        self._guessed_L[layer] = self._guessed_L[layer][units:]
        self._taken_L[layer] = self._taken_L[layer][max(units - guessed, 0) :]

    @property
    def state_bytes(self) -> int:
        """Bytes kept now."""
        return sum(expected_N.nbytes for expected_N in (*self._guessed_L, *self._taken_L))


def _compact(keys_N: NDArray[np.void]) -> NDArray[np.void]:
    compact_N = np.empty(len(keys_N), dtype=_COMPACT_DTYPE)
    compact_N["segment"], compact_N["unit"] = keys_N["segment"], keys_N["unit"]
    return compact_N


class Pace:
    """How much can be read ahead without making the next demand wait: measured, not configured.

    Args:
        layers: of the model.
        first_bytes: what is read ahead in a gap before anything was measured, and enough to measure a speed with.
    """

    def __init__(self, layers: int, *, first_bytes: int) -> None:
        self._gap_ns_L: list[float | None] = [None] * layers
        self._bytes_per_ns: float | None = None
        self._first_bytes = first_bytes

    def note_gap(self, layer: int, gap_ns: int) -> None:
        """From the end of one layer's taking to the start of the next taking."""
        self._gap_ns_L[layer] = _blend(self._gap_ns_L[layer], float(gap_ns))

    def note_speed(self, size_bytes: int, duration_ns: int) -> None:
        """So many bytes that were waited for came in that time.

        A few small reads take as long as one of them, whatever the device could do: they never slow the pace.
        """
        if duration_ns <= 0:
            return
        speed = size_bytes / duration_ns
        if size_bytes >= self._first_bytes:
            self._bytes_per_ns = _blend(self._bytes_per_ns, speed)
        elif self._bytes_per_ns is None or speed > self._bytes_per_ns:
            self._bytes_per_ns = speed

    def carries_bytes(self, layer: int) -> int:
        """What can be read between this layer's taking and the next one."""
        gap_ns = self._gap_ns_L[layer]
        if gap_ns is None or self._bytes_per_ns is None:
            return self._first_bytes
        return int(gap_ns * self._bytes_per_ns)

    @property
    def bytes_per_s(self) -> float | None:
        """Measured speed of reads that were waited for."""
        return None if self._bytes_per_ns is None else self._bytes_per_ns * NS_PER_S


_BLEND: Final = 0.2
"""Weight of the newest measurement."""


def _blend(old: float | None, new: float) -> float:
    return new if old is None else old + _BLEND * (new - old)
