"""What attention over pages needs of others.

Shapes: T tokens of a chunk, K KV heads, D head dim, N pages.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from h3kv.attention.parts import Part
from h3kv.core.layout import PageLayout
from h3kv.core.types import SlabKey


class PageKernels(Protocol):
    """What computes over pages. The module `attention.native` is one, `TorchPages` another."""

    def append(
        self, k_TKD: Tensor, v_TKD: Tensor, pages_KN: NDArray[np.void], *, layout: PageLayout, index: int
    ) -> None:
        """Write contiguous keys and values as tokens number `index` and up of the page lists, 64 to a page."""
        ...

    def attend(
        self,
        q_THD: Tensor,
        pages_KN: NDArray[np.void],
        *,
        layout: PageLayout,
        position: int,
        scale: float | None = ...,
        out_dtype: torch.dtype = ...,
    ) -> Part:
        """Attention of contiguous queries: row t sees the tokens whose position is <= position + t."""
        ...


class SlabSource(Protocol):
    """Gives slabs that do not lie in memory."""

    def take(self, slabs: Sequence[SlabKey]) -> list[int]:
        """Addresses of the first of these slabs: one at least, as many as are there. They stay readable, whole and
        verified, until they are given back.

        Raises:
            SlabCorruptError: the first one's bytes are damaged.
            SlabUnavailableError: the first one cannot be read, or did not come in time.
        """
        ...

    def give_back(self, slabs: Sequence[SlabKey]) -> None:
        """These slabs are no longer read."""
        ...
