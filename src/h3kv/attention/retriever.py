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

from h3kv import _native
from h3kv.attention.native import LOCAL
from h3kv.attention.page_table import IndexedSegments
from h3kv.attention.parts import Part
from h3kv.attention.retrieval import Retrieval, RetrievalMeter, lies_in_memory, retrieve_in_memory
from h3kv.attention.touches import TouchTurn
from h3kv.core.layout import SlabLayout
from h3kv.core.limits import CLUSTER_TOKENS
from h3kv.core.ports import Offload
from h3kv.core.retrieval import RetrievalSetting

WANTED_DTYPE: Final = np.dtype([("segment", "<u8"), ("kv_head", "<u2"), ("block", "<u2"), ("reserved", "<u4")])
"""Names one page of a layer: 16 bytes. `reserved`: 1 where best effort does not wait for it, else 0."""

ROWS_MAX: Final = 64
"""Rows that choose at a time: their scores take room."""

IMPORTANT_CLUSTERS: Final = 8
"""What best effort waits for, of each row and KV head: the best ones. Without them needles are lost."""


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

    @property
    def reads_ahead(self) -> bool:
        """Whether guesses are of use."""
        ...

    def expect(self, layer: int, wanted_N: NDArray[np.void]) -> None:
        """Guess pages that a layer will take in the next step beside those of this one. Guesses decide nothing."""
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
    touches: TouchTurn | None = None,
    offload: Offload = LOCAL,
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
        touches: receives how much attention each segment's chosen clusters drew. The numbers do not depend on it.
        offload: who searches the index beside this process. Nor do they depend on that.

    Raises:
        SlabCorruptError, SlabUnavailableError: as `PageSource.take`.
    """
    segments_S = indexed.rows_LS[layer]
    device = query.q_QHD.device
    q_QHD, exact = query.q_QHD.cpu(), Part(exact.out_THD.cpu(), exact.lse_TH.cpu())
    in_memory = lies_in_memory(segments_S)
    # A row's pages on NVMe must fit the source; rows do not depend on each other.
    rows = ROWS_MAX if in_memory else 1
    found = []
    for start in range(0, len(q_QHD), rows):
        end = start + rows
        q_of_rows, of_rows = q_QHD[start:end], Part(exact.out_THD[start:end], exact.lse_TH[start:end])
        if in_memory and touches is None:
            found.append(
                retrieve_in_memory(
                    q_of_rows,
                    segments_S,
                    of_rows,
                    layout=layout,
                    setting=setting,
                    meter=meter,
                    scale=query.scale,
                    offload=offload,
                )
            )
        else:
            retrieval = Retrieval(q_of_rows, segments_S, layout=layout, scale=query.scale, meter=meter, offload=offload)
            found.append(_attend_cold(retrieval, of_rows, indexed, layer=layer, setting=setting, source=source))
            if touches is not None:
                touches.add(retrieval.chosen_TKC, retrieval.lse_THC, found[-1][0].lse_TH, indexed.segments)
    part, read_lse_QH = found[0] if len(found) == 1 else _joined(found)
    return Retrieved(Part(part.out_THD.to(device), part.lse_TH.to(device)), read_lse_QH)


def _joined(found: list[tuple[Part, Tensor]]) -> tuple[Part, Tensor]:
    """What was found of groups of rows, as one."""
    part = Part(torch.cat([part.out_THD for part, _ in found]), torch.cat([part.lse_TH for part, _ in found]))
    return part, torch.cat([lse_QH for _, lse_QH in found])


def _attend_cold(
    retrieval: Retrieval,
    exact: Part,
    indexed: IndexedSegments,
    *,
    layer: int,
    setting: RetrievalSetting,
    source: PageSource | None,
) -> tuple[Part, Tensor]:
    """One row's attention where some pages lie on NVMe."""
    # What nearly won is most of what the next step wants and this one does not.
    runners = setting.budget_tokens // CLUSTER_TOKENS if source is not None and source.reads_ahead else 0
    chosen_QKC = retrieval.select(exact.lse_TH, setting=setting, runners=runners)
    is_important_QKC = _important(retrieval, exact.lse_TH, chosen_QKC) if setting.best_effort else None
    return _attend(retrieval, chosen_QKC, exact, indexed, layer=layer, source=source, is_important_QKC=is_important_QKC)


def _attend(
    retrieval: Retrieval,
    chosen_QKC: NDArray[np.int32],
    exact: Part,
    indexed: IndexedSegments,
    *,
    layer: int,
    source: PageSource | None,
    is_important_QKC: NDArray[np.bool_] | None,
) -> tuple[Part, Tensor]:
    """Attention to everything, and the log-sum-exp of what was read; what lies on NVMe is read meanwhile."""
    wanted_N, (is_cold_QKC, page_of) = _wanted(chosen_QKC, indexed.rows_LS[layer], indexed)
    if not len(wanted_N):
        return retrieval.attend_apart(exact=exact)
    if is_important_QKC is not None:
        wanted_N["reserved"] = 1
        wanted_N["reserved"][page_of[is_important_QKC[is_cold_QKC]]] = 0
    assert source is not None, "there is no source for what is not in memory"
    addresses_N = source.take(layer, wanted_N)
    try:
        if retrieval.runners_TKC.size:
            source.expect(layer, _wanted(retrieval.runners_TKC, indexed.rows_LS[layer], indexed)[0])
        addresses_QKC = np.zeros(chosen_QKC.shape, dtype=np.uint64)
        addresses_QKC[is_cold_QKC] = addresses_N[page_of]
        return retrieval.attend_apart(addresses_QKC, exact=exact)
    finally:
        source.give_back()


def _important(retrieval: Retrieval, exact_lse_QH: Tensor, chosen_QKC: NDArray[np.int32]) -> NDArray[np.bool_]:
    """The best `IMPORTANT_CLUSTERS` of the choices of each row and KV head, ranked as `select` did."""
    rows, kv_heads, budget = chosen_QKC.shape
    lse_THC = retrieval.lse_THC
    lse_QKGC = lse_THC.view(rows, kv_heads, -1, lse_THC.shape[2])
    all_lse_QKG = torch.logaddexp(exact_lse_QH.view(rows, kv_heads, -1), lse_QKGC.logsumexp(-1))
    importance_QKC = (lse_QKGC - all_lse_QKG[..., None]).exp().sum(2).nan_to_num(torch.inf)
    chosen = torch.from_numpy(chosen_QKC).long()
    of_chosen_QKC = importance_QKC.gather(2, chosen.clamp(min=0)).where(chosen >= 0, -1.0)
    best_QKC = of_chosen_QKC.topk(min(IMPORTANT_CLUSTERS, budget)).indices
    is_important_QKC: NDArray[np.bool_] = (
        torch.zeros(rows, kv_heads, budget, dtype=torch.bool).scatter(2, best_QKC, True).numpy()
    )
    return is_important_QKC


def _wanted(
    chosen_QKC: NDArray[np.int32], segments_S: NDArray[np.void], indexed: IndexedSegments
) -> tuple[NDArray[np.void], tuple[NDArray[np.bool_], NDArray[np.int64]]]:
    """Distinct pages on NVMe that hold chosen clusters; which choices lie there, and in which of the pages."""
    is_cold_QKC = np.zeros(chosen_QKC.shape, dtype=bool)
    if segments_S["pages"].all():
        return np.zeros(0, dtype=WANTED_DTYPE), (is_cold_QKC, np.zeros(0, dtype=np.int64))
    ids_S = np.array(indexed.segments, dtype=np.uint64)
    wanted_N = np.empty(chosen_QKC.size, dtype=WANTED_DTYPE)
    page_of = np.empty(chosen_QKC.size, dtype=np.int64)
    rows, kv_heads, budget = chosen_QKC.shape
    pages, clusters = _native.list_pages(
        chosen_QKC.ctypes.data,
        rows,
        kv_heads,
        budget,
        segments_S.ctypes.data,
        ids_S.ctypes.data,
        wanted_N.ctypes.data,
        is_cold_QKC.ctypes.data,
        page_of.ctypes.data,
    )
    return wanted_N[:pages], (is_cold_QKC, page_of[:clusters])
