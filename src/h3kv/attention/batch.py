"""The next token of several sequences on its way through the layers, attended to in one call for each of them.

Shapes: B sequences, L layers, H query heads, K KV heads, D head dim.

    layer    sequence 0   sequence 1   sequence 2
    0           plain        plain        plain       one call for all
    1           plain        cold         plain       one call for 0 and 2, then sequence 1 by itself
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from h3kv.attention import native
from h3kv.attention.paged import PagedCache
from h3kv.core.layout import CacheLayout
from h3kv.core.ports import Offload


class PagedBatch:
    """Satisfies `models.decoder.TokenBatch`. For one token of each: made anew for the next.

    Args:
        caches: of the sequences, at least one, each with room for a token.
        layout: of all of them.
        offload: who attends.
    """

    def __init__(self, caches: Sequence[PagedCache], layout: CacheLayout, *, offload: Offload = native.LOCAL) -> None:
        self._caches = caches
        self._layout = layout
        self._offload = offload
        self.positions = [cache.tokens for cache in caches]
        """See `TokenBatch.positions`."""
        self.current: int | None = None
        """The sequence that attends by itself just now, or did when an error came; None: all do."""
        rows, plain = zip(*(cache.begin_token() for cache in caches), strict=True)
        self._rows_LB = np.stack(rows, axis=1)
        self._is_plain_LB = np.stack(plain, axis=1)

    def attend(self, layer: int, q_BHD: Tensor, k_BKD: Tensor, v_BKD: Tensor) -> Tensor:
        """See `TokenBatch.attend`.

        Raises:
            SlabCorruptError, SlabUnavailableError: of the sequence `current`. The tokens may be computed again.
        """
        is_plain_B, page = self._is_plain_LB[layer], self._layout.slab.page
        states = (q_BHD.contiguous(), k_BKD.contiguous(), v_BKD.contiguous())
        if is_plain_B.all():
            return native.attend_batch(states, self._rows_LB[layer], layout=page, offload=self._offload)
        attended_BHD = torch.empty_like(states[0])
        if is_plain_B.any():
            plain = torch.from_numpy(np.flatnonzero(is_plain_B))
            some = (states[0][plain], states[1][plain], states[2][plain])
            rows_P = self._rows_LB[layer][is_plain_B]
            attended_BHD[plain] = native.attend_batch(some, rows_P, layout=page, offload=self._offload)
        for self.current in np.flatnonzero(~is_plain_B).tolist():
            at = slice(self.current, self.current + 1)
            attended_BHD[at] = self._caches[self.current].attend(layer, q_BHD[at], k_BKD[at], v_BKD[at])
        self.current = None
        return attended_BHD

    def advance(self) -> None:
        """See `TokenBatch.advance`."""
        for cache in self._caches:
            cache.advance(1)
