"""Indexed segments that have planes alone, for tests of who scans them."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from h3kv.attention.native import TORCH_DTYPES
from h3kv.attention.retrieval import INDEXED_DTYPE, Retrieval
from h3kv.core.layout import SlabLayout
from h3kv.core.limits import SEGMENT_BLOCKS_MAX
from h3kv.core.ports import Offload
from h3kv.core.retrieval import RetrievalSetting

NO_EXPONENT = 0xBF
"""Clears a bit of each byte, so that no two of them are an fp16 number of 2 or more, or none."""


def planes_bytes(layout: SlabLayout) -> int:
    """Of a segment."""
    return layout.kv_heads * SEGMENT_BLOCKS_MAX * layout.page.plane_bytes


class Planes:
    """Segments of random codes.

    Args:
        layout: of their slabs.
        blocks: of each segment.
        memory: uint8, at a multiple of 64: receives the planes; None: memory of its own.
        seed: of the codes and the queries.
    """

    def __init__(
        self, layout: SlabLayout, blocks: list[int], *, memory: NDArray[np.uint8] | None = None, seed: int = 1
    ) -> None:
        self.layout = layout
        self._random = np.random.default_rng(seed)
        each = planes_bytes(layout)
        self.memory = np.empty(each * len(blocks), dtype=np.uint8) if memory is None else memory[: each * len(blocks)]
        self.memory[:] = self._random.integers(0, 256, self.memory.size, dtype=np.uint8) & NO_EXPONENT
        starts = self.memory.ctypes.data + each * np.arange(len(blocks), dtype=np.uint64)
        self.rows_S = np.zeros(len(blocks), dtype=INDEXED_DTYPE)
        self.rows_S["planes"], self.rows_S["blocks"] = starts, blocks

    @property
    def range(self) -> tuple[int, int]:
        """Of addresses."""
        return self.memory.ctypes.data, self.memory.ctypes.data + self.memory.size

    def queries(self, *, tokens: int, group: int) -> Tensor:
        """New random ones [T, H, D]."""
        shape = (tokens, self.layout.kv_heads * group, self.layout.page.head_dim)
        q_THD = torch.from_numpy(self._random.standard_normal(shape, dtype=np.float32))
        return q_THD.to(TORCH_DTYPES[self.layout.page.dtype])

    def search(
        self, q_THD: Tensor, offload: Offload, *, share: float = 1.0
    ) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
        """Chosen clusters, and the log-sum-exps of all as integers: equal ones are equal bit for bit."""
        retrieval = Retrieval(q_THD, self.rows_S, layout=self.layout, offload=offload)
        exact_lse_TH = torch.zeros(q_THD.shape[:2])
        chosen_TKC = retrieval.select(exact_lse_TH, setting=RetrievalSetting(512, shortlist_share=share))
        return chosen_TKC, retrieval.lse_THC.numpy().view(np.int32)

    def check(self, offload: Offload, local: Offload, *, tokens: int = 1, group: int = 3) -> None:
        """Assert that both find the same."""
        q_THD = self.queries(tokens=tokens, group=group)
        for of_one, of_other in zip(self.search(q_THD, local), self.search(q_THD, offload), strict=True):
            np.testing.assert_array_equal(of_one, of_other)
