"""One layer's attention under retrieval: choose clusters, have their pages, attend, merge with what was read exactly.

Shapes: Q query rows, H query heads, K KV heads, D head dim, S indexed segments, C clusters that a KV head may choose,
N pages.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from h3kv.attention.page_table import IndexedSegments
from h3kv.attention.parts import Part
from h3kv.attention.retrieval import SEGMENT_CLUSTERS, Retrieval, RetrievalMeter
from h3kv.core.layout import SlabLayout
from h3kv.core.limits import BLOCK_CLUSTERS, SEGMENT_BLOCKS_MAX
from h3kv.core.retrieval import RetrievalSetting

WANTED_DTYPE: Final = np.dtype([("segment", "<u8"), ("kv_head", "<u2"), ("block", "<u2"), ("reserved", "<u4")])
"""Names one page of a layer: 16 bytes."""

ROWS_MAX: Final = 64
"""Rows that choose at a time: their scores take room."""


@dataclass(frozen=True, slots=True)
class Retrieved:
    """Attention of some rows, and how much of it they read."""

    part: Part
    """Over all tokens."""
    read_lse_QH: Tensor
    """Natural log-sum-exp of the tokens that were read exactly."""


@dataclass(frozen=True, slots=True)
class Query:
    """Rows that attend: row q sees the tokens whose position is <= position + q."""

    q_QHD: Tensor
    position: int
    scale: float | None


class PageSource(Protocol):
    """Gives single pages that do not lie in memory."""

    def take(self, layer: int, wanted_N: NDArray[np.void]) -> NDArray[np.uint64]:
        """Addresses of distinct pages (WANTED_DTYPE), in their order. They stay readable, whole and verified, until
        they are given back. With best effort one that is not there in time has the address `retrieval.MISSING`.

        Raises:
            SlabCorruptError: one is damaged.
            SlabUnavailableError: one cannot be read, or did not come in time.
        """
        ...

    def give_back(self) -> None:
        """The pages that were taken last are no longer read."""
        ...


def retrieve(
    query: Query,
    indexed: IndexedSegments,
    exact: Part,
    *,
    layer: int,
    layout: SlabLayout,
    setting: RetrievalSetting,
    source: PageSource | None,
    meter: RetrievalMeter,
) -> Retrieved:
    """Attention to the tokens of `exact` and to those of the indexed segments.

    Args:
        query: whose rows choose each for itself.
        indexed: what they choose from: at least one segment.
        exact: over all other tokens; fp32.
        layer: index of it.
        layout: of slabs.
        setting: how they choose.
        source: gives pages on NVMe; may be None where all lie in memory.
        meter: counts what is read.

    Raises:
        SlabCorruptError, SlabUnavailableError: as `PageSource.take`.
    """
    segments_S = indexed.rows_LS[layer]
    device = query.q_QHD.device
    exact = Part(exact.out_THD.cpu(), exact.lse_TH.cpu())
    # A row's pages on NVMe must fit the source; rows do not depend on each other.
    rows = ROWS_MAX if segments_S["pages"].all() else 1
    found = []
    for start in range(0, len(query.q_QHD), rows):
        end = start + rows
        of_rows = Part(exact.out_THD[start:end], exact.lse_TH[start:end])
        retrieval = Retrieval(query.q_QHD[start:end].cpu(), segments_S, layout=layout, scale=query.scale, meter=meter)
        chosen_QKC = retrieval.select(of_rows.lse_TH, setting=setting)
        found.append(_attend(retrieval, chosen_QKC, of_rows, indexed, layer=layer, source=source))
    part, read_lse_QH = found[0]
    if len(found) > 1:
        part = Part(torch.cat([part.out_THD for part, _ in found]), torch.cat([part.lse_TH for part, _ in found]))
        read_lse_QH = torch.cat([lse_QH for _, lse_QH in found])
    return Retrieved(Part(part.out_THD.to(device), part.lse_TH.to(device)), read_lse_QH)


def _attend(
    retrieval: Retrieval,
    chosen_QKC: NDArray[np.int32],
    exact: Part,
    indexed: IndexedSegments,
    *,
    layer: int,
    source: PageSource | None,
) -> tuple[Part, Tensor]:
    """Attention to everything, and the log-sum-exp of what was read; what lies on NVMe is read meanwhile."""
    wanted_N, (is_cold_QKC, page_of) = _wanted(chosen_QKC, indexed.rows_LS[layer], indexed)
    if not len(wanted_N):
        return retrieval.attend_apart(exact=exact)
    assert source is not None, "there is no source for what is not in memory"
    addresses_N = source.take(layer, wanted_N)
    try:
        addresses_QKC = np.zeros(chosen_QKC.shape, dtype=np.uint64)
        addresses_QKC[is_cold_QKC] = addresses_N[page_of]
        return retrieval.attend_apart(addresses_QKC, exact=exact)
    finally:
        source.give_back()


def _wanted(
    chosen_QKC: NDArray[np.int32], segments_S: NDArray[np.void], indexed: IndexedSegments
) -> tuple[NDArray[np.void], tuple[NDArray[np.bool_], NDArray[np.int64]]]:
    """Distinct pages on NVMe that hold chosen clusters; which choices lie there, and in which of the pages."""
    is_cold_S = segments_S["pages"] == 0
    if not is_cold_S.any():
        return np.zeros(0, dtype=WANTED_DTYPE), (np.zeros_like(chosen_QKC, dtype=bool), np.zeros(0, dtype=np.int64))
    segment_QKC, cluster_QKC = np.divmod(chosen_QKC, SEGMENT_CLUSTERS)
    is_cold_QKC = (chosen_QKC >= 0) & is_cold_S[segment_QKC]
    head_QKC = np.broadcast_to(np.arange(chosen_QKC.shape[1])[:, None], chosen_QKC.shape)
    page_QKC = (segment_QKC * chosen_QKC.shape[1] + head_QKC) * SEGMENT_BLOCKS_MAX + cluster_QKC // BLOCK_CLUSTERS
    pages_N, page_of = np.unique(page_QKC[is_cold_QKC], return_inverse=True)
    wanted_N = np.zeros(len(pages_N), dtype=WANTED_DTYPE)
    row_N, wanted_N["block"] = np.divmod(pages_N, SEGMENT_BLOCKS_MAX)
    segment_N, wanted_N["kv_head"] = np.divmod(row_N, chosen_QKC.shape[1])
    wanted_N["segment"] = np.array(indexed.segments, dtype=np.uint64)[segment_N]
    return wanted_N, (is_cold_QKC, page_of)
