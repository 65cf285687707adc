"""Slow, plain retrieval over sealed slabs: the oracle of the native one.

Shapes: T query rows, H query heads, K KV heads, G query heads per KV head, N tokens, C clusters, D head dim.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from h3kv.attention.parts import Part
from h3kv.core.layout import SlabLayout
from h3kv.core.limits import BLOCK_CLUSTERS, BLOCK_TOKENS, CLUSTER_TOKENS, SEGMENT_BLOCKS_MAX
from h3kv.core.retrieval import RetrievalSetting
from h3kv.core.types import Encoding

SEGMENT_CLUSTERS = SEGMENT_BLOCKS_MAX * BLOCK_CLUSTERS


@dataclass(frozen=True, slots=True)
class SealedSegment:
    """What the bytes of a sealed slab say, in fp64, rotated, in the order of its places."""

    keys_KND: Tensor
    plane_keys_KND: Tensor
    """The keys as their 4-bit plane alone gives them."""
    values_KND: Tensor
    places_KN: Tensor
    """Which token of the segment each one is."""
    mean_keys_KCD: Tensor
    mean_values_KCD: Tensor


def rotate(x_D: Tensor) -> Tensor:
    """The orthonormal Hadamard transform, in Sylvester order, of runs of the last dimension; its own inverse."""
    head_dim = x_D.shape[-1]
    run = head_dim & -head_dim
    matrix = torch.ones(1, 1, dtype=torch.float64)
    while len(matrix) < run:
        matrix = torch.cat([torch.cat([matrix, matrix], dim=1), torch.cat([matrix, -matrix], dim=1)])
    runs = x_D.double().reshape(*x_D.shape[:-1], -1, run)
    rotated: Tensor = (runs @ (matrix / run**0.5)).flatten(-2)
    return rotated


def read_slab(slab: Tensor, layout: SlabLayout, *, blocks: int) -> SealedSegment:
    """Decode a sealed slab of so many used blocks.

    Args:
        slab: uint8, all bytes of a slab with room for 16 blocks.
        layout: of it, in a clustered encoding.
        blocks: in use.
    """
    heads = [[_read_page(slab, layout, head, block) for block in range(blocks)] for head in range(layout.kv_heads)]
    joined = [torch.stack([torch.cat([page[i] for page in pages]) for pages in heads]) for i in range(4)]
    means = [_read_summary(slab, layout, head, blocks) for head in range(layout.kv_heads)]
    mean_keys, mean_values = (torch.stack(rows) for rows in zip(*means, strict=True))
    return SealedSegment(joined[0], joined[1], joined[2], joined[3].long(), mean_keys, mean_values)


def _bytes(slab: Tensor, offset: int, count: int) -> Tensor:
    return slab[offset : offset + count]


def _numbers(slab: Tensor, offset: int) -> Tensor:
    """Arrays of scales [4, 64]."""
    return _bytes(slab, offset, 4 * 2 * BLOCK_TOKENS).clone().view(torch.float16).view(4, BLOCK_TOKENS, 1).double()


def _key_nibbles(raw: Tensor, head_dim: int) -> Tensor:
    lanes = raw.view(BLOCK_CLUSTERS, head_dim // 8, CLUSTER_TOKENS, 1, 4)
    nibbles = torch.cat([lanes & 15, lanes >> 4], dim=3)
    return nibbles.transpose(1, 2).reshape(BLOCK_TOKENS, head_dim).double()


def _value_nibbles(raw: Tensor, head_dim: int) -> Tensor:
    lanes = raw.view(BLOCK_TOKENS // 8, head_dim, 4)
    return torch.cat([lanes & 15, lanes >> 4], dim=2).transpose(1, 2).reshape(BLOCK_TOKENS, head_dim).double()


def _read_page(slab: Tensor, layout: SlabLayout, head: int, block: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Keys, keys of the plane, values, places."""
    page = layout.page
    at = layout.page_offset(block, head, blocks=SEGMENT_BLOCKS_MAX)
    plane = layout.plane_offset(block, head, blocks=SEGMENT_BLOCKS_MAX)
    scales_at = plane + page.nibbles_bytes
    key_scale, key_offset, value_scale, value_offset = _numbers(slab, scales_at)
    codes = plane_codes = _key_nibbles(_bytes(slab, plane, page.nibbles_bytes), page.head_dim)
    if page.encoding is Encoding.K8V4:
        codes, plane_codes = (
            16 * codes + _key_nibbles(_bytes(slab, at, page.keys_bytes), page.head_dim),
            16 * codes + 7.5,
        )
    values = _value_nibbles(_bytes(slab, at + page.keys_bytes, page.values_bytes), page.head_dim)
    places = _bytes(slab, plane + page.plane_bytes - 2 * BLOCK_TOKENS, 2 * BLOCK_TOKENS).clone().view(torch.int16)
    return (
        key_scale * codes + key_offset,
        key_scale * plane_codes + key_offset,
        value_scale * values + value_offset,
        places,
    )


def _read_summary(slab: Tensor, layout: SlabLayout, head: int, blocks: int) -> tuple[Tensor, Tensor]:
    head_dim = layout.page.head_dim
    at = layout.summary_offset(head, blocks=SEGMENT_BLOCKS_MAX)
    size = BLOCK_TOKENS * head_dim
    keys = _bytes(slab, at, size).view(BLOCK_CLUSTERS, head_dim // 4, CLUSTER_TOKENS, 4).transpose(1, 2)
    values = _bytes(slab, at + size, size).view(BLOCK_TOKENS // 4, head_dim, 4).transpose(1, 2)
    key_scale, key_offset, value_scale, value_offset = _numbers(slab, at + 2 * size)
    used = slice(0, blocks * BLOCK_CLUSTERS)
    mean_keys = key_scale * keys.reshape(BLOCK_TOKENS, head_dim).double() + key_offset
    mean_values = value_scale * values.reshape(BLOCK_TOKENS, head_dim).double() + value_offset
    return mean_keys[used], mean_values[used]


def _clusters(scores_TKGN: Tensor) -> Tensor:
    return scores_TKGN.reshape(*scores_TKGN.shape[:-1], -1, CLUSTER_TOKENS)


class RetrievalReference:
    """`Retrieval` in fp64, one row and KV head at a time. Arguments as there, segments as tensors."""

    def __init__(
        self, q_THD: Tensor, segments: Sequence[SealedSegment], *, kv_heads: int, scale: float | None = None
    ) -> None:
        tokens, heads, head_dim = q_THD.shape
        self._q_TKGD = rotate(q_THD).view(tokens, kv_heads, heads // kv_heads, head_dim)
        self._q_TKGD = self._q_TKGD * (head_dim**-0.5 if scale is None else scale)
        self._segments = segments
        self._ids_C = [
            SEGMENT_CLUSTERS * index + cluster
            for index, segment in enumerate(segments)
            for cluster in range(segment.mean_keys_KCD.shape[1])
        ]
        self.lse_TKGC = torch.empty(0)
        """After `select`, what each cluster weighs by its plane or its mean key; only clusters that there are."""
        self.importance_TKC = torch.empty(0)

    @property
    def ids_C(self) -> list[int]:
        """Numbers of the clusters that there are, ascending."""
        return self._ids_C

    def _all(self, field: str) -> Tensor:
        return torch.cat([getattr(segment, field) for segment in self._segments], dim=1)

    def _cluster_lse(self, keys_KND: Tensor) -> Tensor:
        scores_TKGN = torch.einsum("tkgd,knd->tkgn", self._q_TKGD, keys_KND)
        return _clusters(scores_TKGN).logsumexp(dim=4)

    def _best(self, lse_TKGC: Tensor, exact_lse_TH: Tensor, count: int) -> Tensor:
        """Which clusters are the best ones, as a mask [T, K, C]."""
        tokens, kv_heads, group, clusters = lse_TKGC.shape
        exact_TKG1 = exact_lse_TH.double().view(tokens, kv_heads, group, 1)
        total_TKG1 = torch.cat([lse_TKGC, exact_TKG1], dim=3).logsumexp(dim=3, keepdim=True)
        self.importance_TKC = torch.exp(lse_TKGC - total_TKG1).sum(dim=2)
        chosen_TKC = torch.zeros(tokens, kv_heads, clusters, dtype=torch.bool)
        best_TKC = self.importance_TKC.argsort(dim=2, descending=True, stable=True)[..., :count]
        return chosen_TKC.scatter(2, best_TKC, value=True)

    def select(self, exact_lse_TH: Tensor, *, setting: RetrievalSetting) -> Tensor:
        """Mask [T, K, C] of the chosen clusters among `ids_C`."""
        self.lse_TKGC = self._cluster_lse(self._all("plane_keys_KND"))
        clusters = len(self._ids_C)
        shortlist = math.ceil(setting.shortlist_share * clusters)
        if shortlist < clusters:
            means_TKGC = torch.einsum("tkgd,kcd->tkgc", self._q_TKGD, self._all("mean_keys_KCD"))
            means_TKGC = means_TKGC + math.log(CLUSTER_TOKENS)
            is_scanned_TKC = self._best(means_TKGC, exact_lse_TH, shortlist)
            self.lse_TKGC = torch.where(is_scanned_TKC.unsqueeze(2), self.lse_TKGC, means_TKGC)
        return self._best(self.lse_TKGC, exact_lse_TH, min(setting.budget_tokens // CLUSTER_TOKENS, clusters))

    def attend(self, chosen_TKC: Tensor, *, estimate: bool = True) -> tuple[Part, Tensor]:
        """Chosen clusters exactly, the others by mean values; and the log-sum-exp [T, H] of the chosen tokens."""
        chosen_TK1C1 = chosen_TKC[:, :, None, :, None]
        scores_TKGN = torch.einsum("tkgd,knd->tkgn", self._q_TKGD, self._all("keys_KND"))
        scores_TKGCS = _clusters(scores_TKGN).masked_fill(~chosen_TK1C1, -torch.inf)
        others_TKGC = self.lse_TKGC.masked_fill(chosen_TKC.unsqueeze(2) | (not estimate), -torch.inf)
        chosen_lse_TKG = scores_TKGCS.flatten(3).logsumexp(dim=3)
        lse_TKG = torch.logaddexp(chosen_lse_TKG, others_TKGC.logsumexp(dim=3))
        origin_TKG1 = torch.where(torch.isneginf(lse_TKG), 0.0, lse_TKG).unsqueeze(3)
        out_TKGD = torch.einsum(
            "tkgn,knd->tkgd", torch.exp(scores_TKGCS.flatten(3) - origin_TKG1), self._all("values_KND")
        )
        out_TKGD += torch.einsum("tkgc,kcd->tkgd", torch.exp(others_TKGC - origin_TKG1), self._all("mean_values_KCD"))
        return Part(rotate(out_TKGD).flatten(1, 2).float(), lse_TKG.flatten(1).float()), chosen_lse_TKG.flatten(
            1
        ).float()
