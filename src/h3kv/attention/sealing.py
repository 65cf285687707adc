"""Sealing: the tokens of a segment are put in clusters of keys that are alike, and get their index.

Shapes: L slabs, K KV heads, N tokens, D head dim, B batch, P nodes of a level.
"""

from __future__ import annotations

import ctypes

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from h3kv import _native
from h3kv.core.errors import ShapeError
from h3kv.core.layout import PLACES_BYTES, SlabLayout
from h3kv.core.limits import BLOCK_TOKENS, CLUSTER_TOKENS, SEGMENT_BLOCKS_MAX
from h3kv.core.types import Encoding

POWER_STEPS = 6
"""Towards the principal direction; more change no measured quality. `cluster_impl.hpp` has the same number."""


def seal(slab_addresses_L: NDArray[np.uint64], *, layout: SlabLayout, blocks: int, threads: int | None = None) -> None:
    """Cluster the tokens of each slab and KV head in place, and write places and summaries.

    Pages, nibbles and scales of a token move together. Slabs must hold tokens in natural order: seal each once.

    Args:
        slab_addresses_L: contiguous; slabs with room for 16 blocks, writable.
        layout: of the slabs, in a clustered encoding.
        blocks: in use, the first ones, all of their tokens.
        threads: None: torch's number. The result does not depend on it.

    Raises:
        ShapeError: the encoding has no clusters, or so many blocks do not fit.

    Cost: about a millisecond for 1,024 tokens of a KV head of 64, on one core.
    """
    if not layout.page.encoding.is_clustered:
        raise ShapeError(f"segments in {layout.page.encoding} have no clusters: k8v4 and int4 do")
    if not 0 < blocks <= SEGMENT_BLOCKS_MAX or not slab_addresses_L.flags.c_contiguous:
        raise ShapeError(f"{blocks} blocks: a segment has 1 to {SEGMENT_BLOCKS_MAX}")
    assert slab_addresses_L.dtype == np.uint64
    _native.seal(
        slab_addresses_L.ctypes.data,
        slab_addresses_L.size,
        layout.kv_heads,
        layout.page.head_dim,
        layout.page.encoding is Encoding.K8V4,
        layout.page.size_bytes,
        blocks,
        torch.get_num_threads() if threads is None else threads,
    )


def read_places(slab_address: int, layout: SlabLayout, blocks: int) -> NDArray[np.uint16]:
    """Which token of the segment each place of a sealed slab holds: [K, 64 * blocks], a copy."""
    places_KN = np.empty((layout.kv_heads, BLOCK_TOKENS * blocks), dtype=np.uint16)
    before = layout.page.plane_bytes - PLACES_BYTES
    for head in range(layout.kv_heads):
        for block in range(blocks):
            offset = layout.plane_offset(block, head, blocks=SEGMENT_BLOCKS_MAX) + before
            row = (ctypes.c_uint16 * BLOCK_TOKENS).from_address(slab_address + offset)
            places_KN[head, block * BLOCK_TOKENS : (block + 1) * BLOCK_TOKENS] = row
    return places_KN


def cluster_torch(keys_BND: Tensor) -> Tensor:
    """The native core's clusters on any device: which token comes to each place, int64 [B, N].

    Args:
        keys_BND: floating point, N a multiple of 16. Tokens 16 i to 16 i + 15 of the result are cluster i.

    The same halving, with sums in another order: clusters differ where two tokens lie equally far from a cut.

    Cost: log2(N / 16) levels of some twenty operators each when the number of clusters is a power of two.
    """
    batch, tokens, head_dim = keys_BND.shape
    if tokens % CLUSTER_TOKENS != 0:
        raise ShapeError(f"{tokens} tokens are no whole clusters of {CLUSTER_TOKENS}")
    order_BN = torch.arange(tokens, device=keys_BND.device).expand(batch, tokens)
    along_BD = torch.zeros(batch, head_dim, device=keys_BND.device)
    return _halve(keys_BND.float(), order_BN, along_BD)


def _halve(keys_PND: Tensor, order_PN: Tensor, along_PD: Tensor) -> Tensor:
    """Each node's tokens in the order of its leaves. `along_PD` are the parents' directions."""
    nodes, tokens, head_dim = keys_PND.shape
    leaves = tokens // CLUSTER_TOKENS
    if leaves <= 1:
        return order_PN
    direction_PD = _spread(keys_PND, along_PD)
    along_PN = (keys_PND @ direction_PD.unsqueeze(2)).squeeze(2)
    middle = (leaves + 1) // 2 * CLUSTER_TOKENS
    ranked_PN = along_PN.argsort(dim=1, stable=True)
    halves = []
    for part_PN in (ranked_PN[:, :middle].sort(dim=1).values, ranked_PN[:, middle:].sort(dim=1).values):
        keys = keys_PND.gather(1, part_PN.unsqueeze(2).expand(-1, -1, head_dim))
        halves.append((keys, order_PN.gather(1, part_PN)))
    (low, low_order), (high, high_order) = halves
    if low.shape != high.shape:
        return torch.cat([_halve(low, low_order, direction_PD), _halve(high, high_order, direction_PD)], dim=1)
    keys, order = (
        torch.stack([low, high], dim=1).flatten(0, 1),
        torch.stack([low_order, high_order], dim=1).flatten(0, 1),
    )
    return _halve(keys, order, direction_PD.repeat_interleave(2, dim=0)).view(nodes, tokens)


def _spread(keys_PND: Tensor, along_PD: Tensor) -> Tensor:
    """The principal direction of each node's keys, from the key that lies farthest from their mean."""
    mean_P1D = keys_PND.mean(dim=1, keepdim=True)
    apart_PND = keys_PND - mean_P1D
    start_P = apart_PND.square().sum(dim=2).argmax(dim=1)
    direction_PD = apart_PND[torch.arange(len(apart_PND), device=apart_PND.device), start_P]
    for _ in range(POWER_STEPS):
        length_P1 = direction_PD.norm(dim=1, keepdim=True)
        unit_PD = direction_PD / length_P1.clamp_min(1e-30)
        along_PN1 = apart_PND @ unit_PD.unsqueeze(2)
        direction_PD = (along_PN1 * apart_PND).sum(dim=1)
    flipped_P1 = (direction_PD * along_PD).sum(dim=1, keepdim=True) < 0
    return torch.where(flipped_P1, -direction_PD, direction_PD)
