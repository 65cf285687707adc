"""The page cache as one sequence sees it: it takes, and it guesses what it will take next.

Shapes: N pages that a layer wants.
"""

from __future__ import annotations

from typing import Final

import numpy as np
from numpy.typing import NDArray

from h3kv.attention.retrieval import MISSING
from h3kv.core.units import NS_PER_MS
from h3kv.engine.interrupts import interrupts_deferred
from h3kv.engine.page_cache import PageCache
from h3kv.engine.page_slots import Pins
from h3kv.engine.predictor import AHEAD_LAYERS, Predictor

GUESS_STEPS: Final = 4
"""Steps that the cache holds the units of, at the least, where guesses are read ahead."""

PATIENCE_NS: Final = 20 * NS_PER_MS
"""How long best effort waits for the clusters that matter most."""


class PageLane:
    """Satisfies `attention.retriever.PageSource`. Not thread-safe.

    Args:
        cache: of the pool.
        layers: of the model.
        patience_ns: with best effort, how long a layer waits for pages whose `reserved` is 0; for the others it does
            not wait. None: it waits for all.
    """

    def __init__(self, cache: PageCache, layers: int, *, patience_ns: int | None = None) -> None:
        self._cache = cache
        self._predictor = Predictor(layers)
        self._patience_ns = patience_ns
        self._pins = Pins()
        self._layer = 0
        # Units used by everybody since this layer took last, a step ago; in the first step since the start.
        self._step_units = self._cache.units

    def take(self, layer: int, wanted_N: NDArray[np.void]) -> NDArray[np.uint64]:
        """See `PageSource.take`. Pages of small sizes that share a unit are neighbours in `wanted_N`.

        Raises:
            TierFullError: the cache is smaller than what the layer wants.
        """
        # An interrupt may have kept the caller from giving back.
        self.give_back()
        try:
            if self._cache.pin_present(layer, wanted_N, self._pins):
                addresses_N = self._pins.addresses_N
            else:
                with interrupts_deferred():
                    addresses_N = self._fetch(layer, wanted_N)
            self._layer = layer
            self._step_units = self._cache.uses - self._predictor.uses(layer)
            self._predictor.note(layer, self._pins.keys_N, uses=self._cache.uses)
            self._cache.begin_gap(layer)
            # A few layers at a time, which costs little more than one.
            if layer % AHEAD_LAYERS == 0 and self._expects(layer):
                self._read_ahead()
        except BaseException:
            self.give_back()
            raise
        return addresses_N

    def give_back(self) -> None:
        """See `PageSource.give_back`. Whoever ends the sequence calls it too: an interrupt may have come before."""
        self._cache.give_back(self._pins)

    def expect(self, layer: int, wanted_N: NDArray[np.void]) -> None:
        """See `PageSource.expect`: guesses are read ahead as far as the time carries, at once if their turn is near.

        Args:
            layer: index of it.
            wanted_N: WANTED_DTYPE, as for `take`; what is likelier comes first.
        """
        self._predictor.expect(layer, self._cache.keys(layer, wanted_N))
        if self._predictor.follows(self._layer, layer):
            self._read_ahead()

    @property
    def reads_ahead(self) -> bool:
        """See `PageSource.reads_ahead`. In a small cache guesses would push out what is taken again."""
        return self._cache.reads_ahead and GUESS_STEPS * self._step_units <= self._cache.units

    def _expects(self, layer: int) -> bool:
        return self._cache.reads_ahead and self._predictor.expects(layer, kept_since=self._cache.kept_since)

    def _fetch(self, layer: int, wanted_N: NDArray[np.void]) -> NDArray[np.uint64]:
        """Pin pages of which some are not there: their addresses."""
        self._cache.pin(layer, wanted_N, self._pins, patience_ns=self._patience_ns)
        addresses_N = self._pins.addresses_N
        if self._patience_ns is not None:
            addresses_N[self._cache.give_back_absent(self._pins)] = MISSING
        return addresses_N

    def _read_ahead(self) -> None:
        self._cache.read_ahead(self._layer, self._predictor)
