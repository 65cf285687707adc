"""Sealing puts alike keys together, loses nothing, and writes summaries that are means."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from tests.unit.attention.slabs import Slab, encode_slab, slab_layout, topical_keys
from torch import Tensor

from h3kv.attention.sealing import cluster_torch, read_places, seal
from h3kv.core.errors import ShapeError
from h3kv.core.limits import BLOCK_TOKENS, CLUSTER_TOKENS, SEGMENT_BLOCKS_MAX
from h3kv.core.types import Encoding
from h3kv.testing.retrieval_reference import SealedSegment, read_slab

CLUSTERED = [Encoding.K8V4, Encoding.INT4]


@pytest.fixture
def generator() -> torch.Generator:
    return torch.Generator().manual_seed(5)


def random_slab(encoding: Encoding, *, blocks: int, head_dim: int, generator: torch.Generator) -> Slab:
    tokens = blocks * BLOCK_TOKENS
    k_KND = topical_keys(2, tokens, head_dim, generator)
    v_KND = torch.randn(k_KND.shape, generator=generator)
    return encode_slab(k_KND, v_KND, slab_layout(encoding, kv_heads=2, head_dim=head_dim))


def seal_one(slab: Slab, *, threads: int | None = None) -> SealedSegment:
    addresses = np.array([slab.address], dtype=np.uint64)
    seal(addresses, layout=slab.layout, blocks=slab.blocks, threads=threads)
    return read_slab(slab.bytes, slab.layout, blocks=slab.blocks)


def spread_within(x_KND: Tensor) -> float:
    """Mean squared distance from the mean of each 16 neighbours."""
    clusters = x_KND.reshape(*x_KND.shape[:-2], -1, CLUSTER_TOKENS, x_KND.shape[-1])
    return float((clusters - clusters.mean(dim=-2, keepdim=True)).square().mean())


@pytest.mark.parametrize("encoding", CLUSTERED)
@pytest.mark.parametrize(("blocks", "head_dim"), [(16, 64), (1, 80), (5, 128)])
def test_every_token_is_still_there(
    isa: str, encoding: Encoding, blocks: int, head_dim: int, generator: torch.Generator
) -> None:
    slab = random_slab(encoding, blocks=blocks, head_dim=head_dim, generator=generator)
    before = read_slab(slab.bytes, slab.layout, blocks=blocks)
    after = seal_one(slab)
    assert torch.equal(after.places_KN.sort(dim=1).values, torch.arange(blocks * BLOCK_TOKENS).expand(2, -1))
    assert np.array_equal(read_places(slab.address, slab.layout, blocks), after.places_KN.numpy())
    for field in ("keys_KND", "plane_keys_KND", "values_KND"):
        expected = getattr(before, field).gather(1, after.places_KN.unsqueeze(2).expand(-1, -1, head_dim))
        assert torch.equal(getattr(after, field), expected)


@pytest.mark.parametrize("encoding", CLUSTERED)
@pytest.mark.parametrize("blocks", [16, 3])
def test_summaries_are_means_in_eight_bits(
    isa: str, encoding: Encoding, blocks: int, generator: torch.Generator
) -> None:
    sealed = seal_one(random_slab(encoding, blocks=blocks, head_dim=64, generator=generator))
    for rows_KND, coded_KCD in (
        (sealed.keys_KND, sealed.mean_keys_KCD),
        (sealed.values_KND, sealed.mean_values_KCD),
    ):
        means_KCD = rows_KND.reshape(2, -1, CLUSTER_TOKENS, 64).mean(dim=2)
        step_KC = (means_KCD.amax(dim=2) - means_KCD.amin(dim=2)) / 255
        # Half a step of codes, and what fp16 rounds off scale and offset.
        assert ((coded_KCD - means_KCD).abs().amax(dim=2) <= 0.5 * step_KC + 0.003 * means_KCD.abs().amax(dim=2)).all()


@pytest.mark.parametrize("encoding", CLUSTERED)
def test_clusters_hold_keys_that_are_alike(isa: str, encoding: Encoding, generator: torch.Generator) -> None:
    slab = random_slab(encoding, blocks=16, head_dim=64, generator=generator)
    natural = spread_within(read_slab(slab.bytes, slab.layout, blocks=16).keys_KND)
    assert spread_within(seal_one(slab).keys_KND) < 0.55 * natural


def test_clusters_do_not_depend_on_threads(generator: torch.Generator) -> None:
    slab = random_slab(Encoding.K8V4, blocks=16, head_dim=64, generator=generator)
    copies = [Slab(slab.layout, slab.blocks, slab.bytes.clone()) for _ in range(3)]
    for copy, threads in zip(copies, (1, 2, 5), strict=True):
        seal_one(copy, threads=threads)
    assert torch.equal(copies[0].bytes, copies[1].bytes)
    assert torch.equal(copies[0].bytes, copies[2].bytes)


def test_many_slabs_are_sealed_like_one(generator: torch.Generator) -> None:
    slabs = [random_slab(Encoding.INT4, blocks=2, head_dim=64, generator=generator) for _ in range(3)]
    alone = [Slab(slab.layout, slab.blocks, slab.bytes.clone()) for slab in slabs]
    seal(np.array([slab.address for slab in slabs], dtype=np.uint64), layout=slabs[0].layout, blocks=2)
    for slab, single in zip(slabs, alone, strict=True):
        seal_one(single)
        assert torch.equal(slab.bytes, single.bytes)


def test_blocks_that_are_not_used_are_left_alone(generator: torch.Generator) -> None:
    slab = random_slab(Encoding.K8V4, blocks=3, head_dim=64, generator=generator)
    seal_one(slab)
    layout = slab.layout
    for head in range(2):
        for block in range(3, SEGMENT_BLOCKS_MAX):
            page = layout.page_offset(block, head, blocks=SEGMENT_BLOCKS_MAX)
            plane = layout.plane_offset(block, head, blocks=SEGMENT_BLOCKS_MAX)
            assert (slab.bytes[page : page + layout.page.size_bytes] == 255).all()
            assert (slab.bytes[plane : plane + layout.page.plane_bytes] == 255).all()


@pytest.mark.parametrize("value", [0.0, float("nan")])
def test_keys_without_a_direction_are_clustered_all_the_same(isa: str, value: float) -> None:
    k_KND = torch.full((1, 128, 64), value)
    slab = encode_slab(k_KND, k_KND, slab_layout(Encoding.K8V4, kv_heads=1, head_dim=64))
    assert torch.equal(seal_one(slab).places_KN[0].sort().values, torch.arange(128))


@pytest.mark.parametrize("blocks", [16, 5])
def test_torch_cuts_the_same_clusters(blocks: int, generator: torch.Generator) -> None:
    slab = random_slab(Encoding.K8V4, blocks=blocks, head_dim=64, generator=generator)
    keys_KND = read_slab(slab.bytes, slab.layout, blocks=blocks).keys_KND
    sealed = seal_one(slab)
    order_KN = cluster_torch(keys_KND)
    # Sums in another order move few tokens over a cut, and no more than that.
    assert float((order_KN == sealed.places_KN).double().mean()) > 0.9
    ordered_KND = keys_KND.gather(1, order_KN.unsqueeze(2).expand(-1, -1, 64))
    assert spread_within(ordered_KND) == pytest.approx(spread_within(sealed.keys_KND), rel=0.01)


def test_torch_takes_every_head_for_itself(generator: torch.Generator) -> None:
    keys_BND = topical_keys(3, 320, 32, generator)
    together_BN = cluster_torch(keys_BND)
    assert torch.equal(together_BN[1], cluster_torch(keys_BND[1:2])[0])


def test_what_has_no_clusters_is_refused(generator: torch.Generator) -> None:
    slab = random_slab(Encoding.K8V4, blocks=1, head_dim=64, generator=generator)
    addresses = np.array([slab.address], dtype=np.uint64)
    for blocks in (0, 17):
        with pytest.raises(ShapeError, match="1 to 16"):
            seal(addresses, layout=slab.layout, blocks=blocks)
    for encoding in (Encoding.RAW, Encoding.INT8):
        with pytest.raises(ShapeError, match="no clusters"):
            seal(addresses, layout=slab_layout(encoding, kv_heads=2, head_dim=64), blocks=1)
    with pytest.raises(ShapeError, match="whole clusters"):
        cluster_torch(torch.zeros(1, 17, 64))
