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
from h3kv.engine.predictor import Predictor

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
        self._taken_N: NDArray[np.uint32] | None = None
        self._layer = 0
        # Tags of what was read ahead for each layer since its last taking.
        self._ahead_L: list[list[NDArray[np.uint64]]] = [[] for _ in range(layers)]

    def take(self, layer: int, wanted_N: NDArray[np.void]) -> NDArray[np.uint64]:
        """See `PageSource.take`. Pages of small sizes that share a unit are neighbours in `wanted_N`.

        Raises:
            TierFullError: the cache is smaller than what the layer wants.
        """
        assert self._taken_N is None, "what was taken before was not given back"
        try:
            with interrupts_deferred():
                return self._take(layer, wanted_N)
        except BaseException:
            self.give_back()
            raise

    def give_back(self) -> None:
        """See `PageSource.give_back`."""
        with interrupts_deferred():
            if self._taken_N is not None:
                self._cache.give_back(self._taken_N)
            self._taken_N = None

    def expect(self, layer: int, wanted_N: NDArray[np.void]) -> None:
        """Guess which pages a layer will take next: they are read ahead as far as the time carries, and decide nothing.

        Args:
            layer: index of it.
            wanted_N: WANTED_DTYPE, as for `take`; what is likelier comes first.
        """
        with interrupts_deferred():
            self._predictor.expect(layer, self._cache.keys(layer, wanted_N))
            self._read_ahead()

    def _take(self, layer: int, wanted_N: NDArray[np.void]) -> NDArray[np.uint64]:
        keys_N = self._cache.keys(layer, wanted_N)
        slots_N = self._cache.pin(layer, keys_N, wanted_N["reserved"] == 0, patience_ns=self._patience_ns)
        addresses_N = self._cache.addresses(wanted_N, slots_N)
        if self._patience_ns is not None:
            is_ready_N = self._cache.is_ready(slots_N)
            addresses_N[~is_ready_N] = MISSING
            self._cache.give_back(slots_N[~is_ready_N])
            slots_N = slots_N[is_ready_N]
        self._taken_N, self._layer = slots_N, layer
        self._predictor.note(layer, keys_N)
        self._cache.begin_gap(layer)
        self._cache.spare(self._ahead_L[layer])
        self._ahead_L[layer].clear()
        self._read_ahead()
        return addresses_N

    def _read_ahead(self) -> None:
        for layer, tags_R in self._cache.read_ahead(self._layer, self._predictor):
            self._ahead_L[layer].append(tags_R)
