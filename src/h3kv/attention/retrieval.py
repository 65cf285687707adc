"""Which clusters of indexed segments a decode step reads exactly, and attention over them.

Shapes: T query rows, H query heads, K KV heads, D head dim, S indexed segments, C clusters that a KV head may choose.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from h3kv import _native
from h3kv.attention.native import CODES, LOCAL, TORCH_DTYPES
from h3kv.attention.parts import Part
from h3kv.core.errors import ShapeError
from h3kv.core.layout import SCALES_BYTES, PageLayout, SlabLayout
from h3kv.core.limits import BLOCK_CLUSTERS, BLOCK_TOKENS, CLUSTER_TOKENS, SEGMENT_BLOCKS_MAX
from h3kv.core.ports import Offload
from h3kv.core.retrieval import RetrievalSetting
from h3kv.core.types import Encoding

INDEXED_DTYPE: Final = np.dtype(
    [("pages", "<u8"), ("planes", "<u8"), ("summary", "<u8"), ("blocks", "<i4"), ("reserved", "<i4")]
)
"""An indexed segment of one layer: addresses of its slab (0: its pages are not in memory), of its planes and of its
summaries as `core.layout` draws them, and the number of its blocks. The same 32 bytes as `h3::Indexed`."""

SEGMENT_CLUSTERS: Final = SEGMENT_BLOCKS_MAX * BLOCK_CLUSTERS
"""Ids of clusters that each indexed segment takes, however many of its blocks are used."""

SCALE_BYTES: Final = SCALES_BYTES // (2 * BLOCK_TOKENS)
"""Scale and offset of one token's key, or of its value."""

MISSING: Final = 1
"""In place of a page's address: it is not there, its clusters are estimated. The native core has the same number."""

assert INDEXED_DTYPE.itemsize == 32


@dataclass(slots=True)
class RetrievalMeter:
    """What decode steps under retrieval have read, over all KV heads. Reads of every row count, whoever shares them."""

    rows: int = 0
    """Query rows of one layer."""
    plane_bytes: int = 0
    """Nibbles and key scales of the clusters that were scanned."""
    summary_bytes: int = 0
    """Mean keys and mean values, with their scales."""
    cluster_bytes: int = 0
    """What the chosen clusters have outside their planes' nibbles and key scales: codes in pages, scales of values."""
    page_bytes: int = 0
    """Whole pages that hold a chosen cluster, and the scales of the chosen values, which lie with the planes."""
    chosen_tokens: int = 0
    """Tokens of chosen clusters that were read."""
    exact_tokens: int = 0
    """Tokens that are read without being chosen: of the window, and of segments without an index. Counted by whoever
    attends to them."""
    recall_sum: float = 0.0
    """Shares of all attention that went to tokens read exactly, summed over the rows and heads of a sample."""
    recalls: int = 0
    """How many these are."""

    def add_choice(self, page: PageLayout, *, tokens: int, lists: int, clusters: int, shortlist: int) -> None:
        """Count the choice of some rows.

        Args:
            page: layout of the segments' pages.
            tokens: how many rows.
            lists: choices, one for each row and KV head.
            clusters: there are, for each of the choices.
            shortlist: of them are scanned.
        """
        self.rows += tokens
        self.plane_bytes += lists * shortlist * CLUSTER_TOKENS * (page.head_dim // 2 + SCALE_BYTES)
        if shortlist < clusters:
            self.summary_bytes += lists * clusters * (page.head_dim + SCALE_BYTES)

    def add_reads(self, page: PageLayout, *, clusters: int, pages: int, estimated: int) -> None:
        """Count what was read after a choice.

        Args:
            page: layout of the segments' pages.
            clusters: chosen ones, over all choices.
            pages: that hold one of these, over all choices.
            estimated: clusters with mean values, over all choices.
        """
        token_bytes = (page.keys_bytes + page.values_bytes) // BLOCK_TOKENS + SCALE_BYTES
        self.chosen_tokens += clusters * CLUSTER_TOKENS
        self.cluster_bytes += clusters * CLUSTER_TOKENS * token_bytes
        self.page_bytes += pages * page.size_bytes + clusters * CLUSTER_TOKENS * SCALE_BYTES
        self.summary_bytes += estimated * (page.head_dim + SCALE_BYTES)

    @property
    def read_bytes(self) -> int:
        """What was read of indexed segments: planes, summaries, and of the chosen clusters what else they have."""
        return self.plane_bytes + self.summary_bytes + self.cluster_bytes

    @property
    def recall(self) -> float | None:
        """Mean of the sample; None before the first."""
        return self.recall_sum / self.recalls if self.recalls else None

    def add_recall(self, share_TH: Tensor) -> None:
        """Count a measured row: of each head the share of attention in tokens that were read exactly."""
        self.recall_sum += float(share_TH.double().sum())
        self.recalls += share_TH.numel()


class Retrieval:
    """One layer's retrieval of some query rows: `select`, then `attend`.

    Every row and KV head chooses for itself. Results depend on numbers and the setting alone, not on threads, on places
    in memory, or on the other rows.

    Args:
        q_THD: CPU, contiguous; fp32, bf16 or fp16; not rotated. Rows come after all tokens of the segments.
        segments_S: INDEXED_DTYPE; planes and summaries stay readable.
        layout: of the segments' slabs, in a clustered encoding.
        scale: of the scores, above 0; None: 1 / sqrt(D).
        meter: counts what is read; None: nobody counts.
        threads: None: torch's number.
        offload: who searches the index beside these threads. Results do not depend on it.

    Raises:
        ShapeError: shapes, types or strides disagree, or the encoding has no index.
    """

    def __init__(
        self,
        q_THD: Tensor,
        segments_S: NDArray[np.void],
        *,
        layout: SlabLayout,
        scale: float | None = None,
        meter: RetrievalMeter | None = None,
        threads: int | None = None,
        offload: Offload = LOCAL,
    ) -> None:
        _check(q_THD, segments_S, layout)
        tokens, heads = q_THD.shape[:2]
        self._q_THD = q_THD
        self._segments_S = segments_S
        self._layout = layout
        self._meter = RetrievalMeter() if meter is None else meter
        self._lse_THC = torch.empty(tokens, heads, SEGMENT_CLUSTERS * len(segments_S), dtype=torch.float32)
        self._totals_TH = torch.empty(tokens, heads, dtype=torch.float32)
        self._chosen_TKC: NDArray[np.int32] | None = None
        self._clusters = int(segments_S["blocks"].sum()) * BLOCK_CLUSTERS
        self._native = _native_retrieval(
            q_THD,
            segments_S,
            layout,
            lse=self._lse_THC.data_ptr(),
            totals=self._totals_TH.data_ptr(),
            scale=scale,
            threads=threads,
            offload=offload,
        )

    @property
    def lse_THC(self) -> Tensor:
        """After `select`, the natural log-sum-exp of each cluster as the choice saw it; -inf where there is none."""
        return self._lse_THC * math.log(2)

    @property
    def chosen_TKC(self) -> NDArray[np.int32]:
        """What `select` gave."""
        assert self._chosen_TKC is not None, "select comes first"
        return self._chosen_TKC

    def select(self, exact_lse_TH: Tensor, *, setting: RetrievalSetting, runners: int = 0) -> NDArray[np.int32]:
        """Clusters that each row and KV head reads exactly.

        Args:
            exact_lse_TH: fp32, CPU: natural log-sum-exp of all tokens that are read exactly anyway; -inf: of none.
            setting: its budget and shortlist.
            runners: how many of the best others `runners_TKC` is to have; they decide nothing.

        Returns:
            [T, K, C], C = budget in clusters, at most all there are: `SEGMENT_CLUSTERS * s + cluster`, ascending.
            Rows of NaN choose as well, what is not a number first.

        Raises:
            ShapeError: the log-sum-exps are not [T, H].

        Cost: reads the planes of the shortlist once, and with a shortlist all mean keys.
        """
        tokens, heads = self._q_THD.shape[:2]
        if exact_lse_TH.shape != (tokens, heads) or exact_lse_TH.dtype != torch.float32:
            raise ShapeError(f"expected fp32 log-sum-exps [{tokens}, {heads}], got {tuple(exact_lse_TH.shape)}")
        exact_lse_TH = exact_lse_TH.contiguous()
        clusters = self._clusters
        budget = min(setting.budget_tokens // CLUSTER_TOKENS, clusters)
        shortlist = math.ceil(setting.shortlist_share * clusters)
        kv_heads = self._layout.kv_heads
        chosen_TKC = np.empty((tokens, kv_heads, budget), dtype=np.int32)
        self.runners_TKC = np.empty((tokens, kv_heads, runners if budget else 0), dtype=np.int32)
        """After `select`: the best clusters that were not chosen, like the chosen ones, then -1."""
        self._native.select(
            exact_lse_TH.data_ptr(),
            chosen_TKC.ctypes.data,
            budget,
            shortlist,
            self.runners_TKC.ctypes.data,
            self.runners_TKC.shape[2],
        )
        self._meter.add_choice(
            self._layout.page, tokens=tokens, lists=tokens * kv_heads, clusters=clusters, shortlist=shortlist
        )
        self._chosen_TKC = chosen_TKC
        return chosen_TKC

    def attend(self, addresses_TKC: NDArray[np.uint64] | None = None, *, estimate: bool = True) -> Part:
        """Attention over all tokens of the segments: the chosen clusters exactly, the others by their mean values.

        Args:
            addresses_TKC: for each chosen cluster the address of the page that holds it, one for all of a page's; 0:
                where its segment lies; MISSING: nowhere, it is estimated like the others. None: all lie with their
                segments.
            estimate: whether what is not read exactly counts at all.

        Returns:
            A new part in fp32; rows that see no token are zero, with -inf.

        Raises:
            ShapeError: the addresses are not as many as the choices, or a chosen cluster has none.

        Cost: reads the chosen clusters and all mean values.
        """
        return self.attend_apart(addresses_TKC, estimate=estimate)[0]

    def attend_apart(
        self,
        addresses_TKC: NDArray[np.uint64] | None = None,
        *,
        exact: Part | None = None,
        estimate: bool = True,
    ) -> tuple[Part, Tensor]:
        """The same, and the natural log-sum-exp [T, H] of the tokens that were read.

        Args:
            addresses_TKC: as in `attend`.
            exact: attention over other tokens, fp32, CPU: both results include it. None: there are none.
            estimate: as in `attend`.

        What is nothing beside all that `select` saw may be left out.

        Raises:
            ShapeError: as in `attend`, or `exact` has other shapes.
        """
        chosen_TKC = self.chosen_TKC
        self._check_addresses(chosen_TKC, addresses_TKC)
        exact = None if exact is None else _checked_part(exact, self._q_THD)
        part = Part(torch.empty(self._q_THD.shape, dtype=torch.float32), torch.empty(self._q_THD.shape[:2]))
        read_lse_TH = torch.empty_like(part.lse_TH)
        clusters, pages = self._native.attend_chosen(
            chosen_TKC.ctypes.data,
            0 if addresses_TKC is None else addresses_TKC.ctypes.data,
            part.out_THD.data_ptr(),
            part.lse_TH.data_ptr(),
            read_lse_TH.data_ptr(),
            chosen_TKC.shape[2],
            estimate,
            0 if exact is None else exact.out_THD.data_ptr(),
            0 if exact is None else exact.lse_TH.data_ptr(),
        )
        lists = chosen_TKC.shape[0] * chosen_TKC.shape[1]
        estimated = self._clusters * lists if estimate else 0
        self._meter.add_reads(self._layout.page, clusters=clusters, pages=pages, estimated=estimated)
        return part, read_lse_TH

    def _check_addresses(self, chosen_TKC: NDArray[np.int32], addresses_TKC: NDArray[np.uint64] | None) -> None:
        if addresses_TKC is not None and (
            addresses_TKC.shape != chosen_TKC.shape
            or addresses_TKC.dtype != np.uint64
            or not addresses_TKC.flags.c_contiguous
        ):
            raise ShapeError(f"expected contiguous addresses {chosen_TKC.shape}, got {addresses_TKC.shape}")
        is_cold_S = self._segments_S["pages"] == 0
        if not is_cold_S.any():
            return
        is_cold_TKC = is_cold_S[chosen_TKC // SEGMENT_CLUSTERS] & (chosen_TKC >= 0)
        if is_cold_TKC.any() and (addresses_TKC is None or not addresses_TKC[is_cold_TKC].all()):
            raise ShapeError("a chosen cluster lies in no memory: give the address of its page")


def lies_in_memory(segments_S: NDArray[np.void]) -> bool:
    """Whether the pages of all these segments, INDEXED_DTYPE and contiguous, lie in memory."""
    return _native.all_in_memory(segments_S.ctypes.data, len(segments_S))


def retrieve_in_memory(
    q_THD: Tensor,
    segments_S: NDArray[np.void],
    exact: Part,
    *,
    layout: SlabLayout,
    setting: RetrievalSetting,
    meter: RetrievalMeter,
    scale: float | None = None,
    offload: Offload = LOCAL,
) -> tuple[Part, Tensor]:
    """`select` and `attend_apart` of a `Retrieval` in one call, for segments that lie in memory. Equal bit for bit.

    Arguments, results and errors as there.
    """
    _check(q_THD, segments_S, layout)
    exact = _checked_part(exact, q_THD)
    assert lies_in_memory(segments_S), "what is not in memory is chosen first"
    native = _native_retrieval(q_THD, segments_S, layout, lse=0, totals=0, scale=scale, threads=None, offload=offload)
    part = Part(torch.empty(q_THD.shape, dtype=torch.float32), torch.empty(q_THD.shape[:2], dtype=torch.float32))
    read_lse_TH = torch.empty(q_THD.shape[:2], dtype=torch.float32)
    clusters, read, pages = native.run(
        setting.budget_tokens // CLUSTER_TOKENS,
        setting.shortlist_share,
        exact.out_THD.data_ptr(),
        exact.lse_TH.data_ptr(),
        part.out_THD.data_ptr(),
        part.lse_TH.data_ptr(),
        read_lse_TH.data_ptr(),
    )
    tokens, lists = len(q_THD), len(q_THD) * layout.kv_heads
    shortlist = math.ceil(setting.shortlist_share * clusters)
    meter.add_choice(layout.page, tokens=tokens, lists=lists, clusters=clusters, shortlist=shortlist)
    meter.add_reads(layout.page, clusters=read, pages=pages, estimated=lists * clusters)
    return part, read_lse_TH


def _native_retrieval(
    q_THD: Tensor,
    segments_S: NDArray[np.void],
    layout: SlabLayout,
    *,
    lse: int,
    totals: int,
    scale: float | None,
    threads: int | None,
    offload: Offload,
) -> _native.Retrieval:
    tokens, heads, head_dim = q_THD.shape
    page = layout.page
    return _native.Retrieval(
        q_THD.data_ptr(),
        segments_S.ctypes.data,
        lse,
        totals,
        layout.kv_heads,
        head_dim,
        page.encoding is Encoding.K8V4,
        page.size_bytes,
        CODES[q_THD.dtype],
        CODES[TORCH_DTYPES[page.dtype]],
        tokens,
        heads,
        len(segments_S),
        head_dim**-0.5 if scale is None else scale,
        torch.get_num_threads() if threads is None else threads,
        offload.scanner(),
    )


def _checked_part(exact: Part, q_THD: Tensor) -> Part:
    """Contiguous."""
    out_THD, lse_TH = exact.out_THD, exact.lse_TH
    if out_THD.shape != q_THD.shape or lse_TH.shape != out_THD.shape[:2]:
        raise ShapeError(f"a part of {tuple(out_THD.shape)} beside queries {tuple(q_THD.shape)}")
    if out_THD.dtype != torch.float32 or lse_TH.dtype != torch.float32 or out_THD.device.type != "cpu":
        raise ShapeError(f"expected an fp32 CPU part, got {out_THD.dtype} on {out_THD.device}")
    return Part(out_THD.contiguous(), lse_TH.contiguous())


def _check(q_THD: Tensor, segments_S: NDArray[np.void], layout: SlabLayout) -> None:
    page = layout.page
    if not page.encoding.is_clustered:
        raise ShapeError(f"segments in {page.encoding} have no index: retrieval needs k8v4 or int4")
    if q_THD.dtype not in CODES or q_THD.device.type != "cpu" or not q_THD.is_contiguous():
        raise ShapeError(f"expected a contiguous fp32, bf16 or fp16 CPU tensor, got {q_THD.dtype} on {q_THD.device}")
    if q_THD.ndim != 3 or q_THD.shape[2] != page.head_dim or q_THD.shape[1] % layout.kv_heads != 0:
        raise ShapeError(f"queries {tuple(q_THD.shape)} for {layout.kv_heads} KV heads of {page.head_dim}")
    if segments_S.dtype != INDEXED_DTYPE or segments_S.ndim != 1 or not segments_S.flags.c_contiguous:
        raise ShapeError(f"expected a contiguous list of indexed segments, got {segments_S.dtype} {segments_S.shape}")
