"""The native retrieval against the fp64 reference, on every instruction set that this machine has."""

from __future__ import annotations

import functools
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from tests.unit.attention.slabs import Slab, encode_slab, rows_of, slab_layout, topical_keys
from torch import Tensor

from h3kv import _native
from h3kv.attention import reference, retrieval
from h3kv.attention.native import TORCH_DTYPES
from h3kv.attention.parts import Part, merge
from h3kv.attention.reference import TokenRun
from h3kv.attention.retrieval import MISSING, SEGMENT_CLUSTERS, Retrieval, RetrievalMeter, retrieve_in_memory
from h3kv.attention.sealing import seal
from h3kv.core.errors import ShapeError
from h3kv.core.layout import SlabLayout
from h3kv.core.limits import BLOCK_CLUSTERS, BLOCK_TOKENS, CLUSTER_TOKENS
from h3kv.core.retrieval import RetrievalSetting
from h3kv.core.types import DType, Encoding
from h3kv.testing.retrieval_reference import RetrievalReference, SealedSegment, read_slab, rotate

BLOCKS = (16, 3, 16)
"""Of the segments: one is partly used."""

TOLERANCE = {DType.FP32: (2e-4, 1e-3), DType.BF16: (4e-2, 5e-2)}
"""Of outputs and log-sum-exps, whose scores reach 50 here. Under bf16 seven bits of queries and eight of weights are
kept, under fp32 fourteen of what is estimated."""


@dataclass(frozen=True)
class Context:
    layout: SlabLayout
    slabs: list[Slab]
    """Sealed. Tests share them and write to none."""
    segments: list[SealedSegment]

    @property
    def rows_S(self) -> NDArray[np.void]:
        return rows_of(self.slabs)


@functools.cache
def sealed_context(
    encoding: Encoding = Encoding.K8V4,
    *,
    kv_heads: int = 3,
    head_dim: int = 64,
    dtype: DType = DType.FP32,
    blocks: tuple[int, ...] = BLOCKS,
) -> Context:
    generator = torch.Generator().manual_seed(head_dim + kv_heads)
    layout = slab_layout(encoding, kv_heads=kv_heads, head_dim=head_dim, dtype=dtype)
    slabs = []
    for count in blocks:
        k_KND = topical_keys(kv_heads, count * BLOCK_TOKENS, head_dim, generator)
        slab = encode_slab(k_KND, torch.randn(k_KND.shape, generator=generator), layout)
        seal(np.array([slab.address], dtype=np.uint64), layout=layout, blocks=count)
        slabs.append(slab)
    return Context(layout, slabs, [read_slab(slab.bytes, layout, blocks=slab.blocks) for slab in slabs])


def queries(context: Context, *, tokens: int, group: int) -> tuple[Tensor, Tensor]:
    """Rows, and the log-sum-exp of what else they see."""
    generator = torch.Generator().manual_seed(tokens)
    heads = context.layout.kv_heads * group
    q_THD = torch.randn(tokens, heads, context.layout.page.head_dim, generator=generator)
    q_THD = q_THD.to(TORCH_DTYPES[context.layout.page.dtype])
    return q_THD, 3 + torch.randn(tokens, heads, generator=generator)


def mask_of(chosen_TKC: NDArray[np.int32], ids_C: list[int]) -> Tensor:
    return torch.from_numpy((np.array(ids_C)[:, None] == chosen_TKC[:, :, None, :]).any(axis=3))


def check(context: Context, *, tokens: int, group: int, setting: RetrievalSetting, estimate: bool = True) -> None:
    """Compare one step with the reference: what it chose first, then attention to that."""
    layout = context.layout
    q_THD, exact_lse_TH = queries(context, tokens=tokens, group=group)
    native = Retrieval(q_THD, context.rows_S, layout=layout)
    oracle = RetrievalReference(q_THD, context.segments, kv_heads=layout.kv_heads)
    chosen_TKC = native.select(exact_lse_TH, setting=setting)
    oracle.select(exact_lse_TH, setting=setting)
    is_chosen_TKC = mask_of(chosen_TKC, oracle.ids_C)
    count = min(setting.budget_tokens // CLUSTER_TOKENS, len(oracle.ids_C))
    assert (is_chosen_TKC.sum(dim=2) == count).all()
    assert (np.diff(chosen_TKC, axis=2) > 0).all()
    worst_TK = oracle.importance_TKC.masked_fill(~is_chosen_TKC, torch.inf).amin(dim=2)
    best_TK = oracle.importance_TKC.masked_fill(is_chosen_TKC, 0.0).amax(dim=2)
    assert (worst_TK >= best_TK * (1 - 10 * TOLERANCE[layout.page.dtype][1])).all()
    part, chosen_lse_TH = native.attend_apart(estimate=estimate)
    expected, expected_chosen_TH = oracle.attend(is_chosen_TKC, estimate=estimate)
    out, lse = TOLERANCE[layout.page.dtype]
    torch.testing.assert_close(part.out_THD, expected.out_THD, atol=out, rtol=0)
    torch.testing.assert_close(part.lse_TH, expected.lse_TH, atol=lse, rtol=0)
    torch.testing.assert_close(chosen_lse_TH, expected_chosen_TH, atol=lse, rtol=0)


@pytest.mark.parametrize("encoding", [Encoding.K8V4, Encoding.INT4])
@pytest.mark.parametrize(("kv_heads", "group", "head_dim"), [(3, 3, 64), (1, 7, 80), (2, 1, 128)])
@pytest.mark.parametrize("share", [1.0, 0.4])
def test_a_step_equals_the_reference(
    isa: str, *, encoding: Encoding, kv_heads: int, group: int, head_dim: int, share: float
) -> None:
    context = sealed_context(encoding, kv_heads=kv_heads, head_dim=head_dim)
    check(context, tokens=2, group=group, setting=RetrievalSetting(256, shortlist_share=share))


@pytest.mark.parametrize("encoding", [Encoding.K8V4, Encoding.INT4])
@pytest.mark.parametrize("share", [1.0, 0.25])
def test_bf16_keeps_its_own_precision(isa: str, encoding: Encoding, share: float) -> None:
    context = sealed_context(encoding, dtype=DType.BF16)
    check(context, tokens=1, group=3, setting=RetrievalSetting(256, shortlist_share=share))


@pytest.mark.parametrize("tokens", [9, 21])
def test_many_rows_choose_each_for_itself(tokens: int) -> None:
    check(sealed_context(), tokens=tokens, group=3, setting=RetrievalSetting(512))


@pytest.mark.parametrize("budget_tokens", [0, 16, 1 << 20])
def test_any_budget(isa: str, budget_tokens: int) -> None:
    check(sealed_context(), tokens=1, group=3, setting=RetrievalSetting(budget_tokens))


def test_without_the_estimate_only_what_was_chosen_counts(isa: str) -> None:
    check(sealed_context(), tokens=1, group=3, setting=RetrievalSetting(128), estimate=False)


def test_a_budget_for_everything_is_exact_attention() -> None:
    context = sealed_context()
    q_THD, exact_lse_TH = queries(context, tokens=2, group=3)
    native = Retrieval(q_THD, context.rows_S, layout=context.layout)
    native.select(exact_lse_TH, setting=RetrievalSetting(1 << 20))
    k_SKD = rotate(torch.cat([segment.keys_KND for segment in context.segments], dim=1)).transpose(0, 1)
    v_SKD = rotate(torch.cat([segment.values_KND for segment in context.segments], dim=1)).transpose(0, 1)
    run = TokenRun(k_SKD, v_SKD, torch.zeros(len(k_SKD), dtype=torch.int32))
    expected = reference.attend(q_THD, [run], position=0)
    for estimate in (True, False):
        part = native.attend(estimate=estimate)
        torch.testing.assert_close(part.out_THD, expected.out_THD, atol=1e-4, rtol=0)
        torch.testing.assert_close(part.lse_TH, expected.lse_TH, atol=1e-4, rtol=0)


def test_no_segment_is_an_empty_part() -> None:
    context = sealed_context(blocks=())
    q_THD, exact_lse_TH = queries(context, tokens=2, group=3)
    native = Retrieval(q_THD, context.rows_S, layout=context.layout)
    assert native.select(exact_lse_TH, setting=RetrievalSetting(256, shortlist_share=0.5)).shape == (2, 3, 0)
    part = native.attend()
    assert torch.equal(part.out_THD, torch.zeros_like(part.out_THD))
    assert torch.isneginf(part.lse_TH).all()


@pytest.mark.parametrize("share", [1.0, 0.4])
def test_results_do_not_depend_on_threads_or_on_other_rows(isa: str, share: float) -> None:
    context = sealed_context()
    setting = RetrievalSetting(256, shortlist_share=share)
    q_THD, exact_lse_TH = queries(context, tokens=10, group=3)
    parts, choices = [], []
    for threads in (1, 2, 5):
        native = Retrieval(q_THD, context.rows_S, layout=context.layout, threads=threads)
        choices.append(native.select(exact_lse_TH, setting=setting))
        parts.append(native.attend())
    for row in range(10):
        alone = Retrieval(q_THD[row : row + 1], context.rows_S, layout=context.layout)
        assert np.array_equal(alone.select(exact_lse_TH[row : row + 1], setting=setting)[0], choices[0][row])
        assert torch.equal(alone.attend().out_THD[0], parts[0].out_THD[row])
    for part, chosen_TKC in zip(parts, choices, strict=True):
        assert np.array_equal(chosen_TKC, choices[0])
        assert torch.equal(part.out_THD, parts[0].out_THD)
        assert torch.equal(part.lse_TH, parts[0].lse_TH)


@pytest.mark.parametrize("dtype", [DType.FP32, DType.BF16])
@pytest.mark.parametrize("share", [1.0, 0.4])
def test_one_call_equals_both_halves(isa: str, share: float, dtype: DType) -> None:
    context = sealed_context(dtype=dtype)
    setting = RetrievalSetting(256, shortlist_share=share)
    q_THD, lse_TH = queries(context, tokens=3, group=3)
    exact = Part(torch.randn(q_THD.shape, generator=torch.Generator().manual_seed(2)), lse_TH)
    meter, whole_meter = RetrievalMeter(), RetrievalMeter()
    native = Retrieval(q_THD, context.rows_S, layout=context.layout, meter=meter)
    native.select(lse_TH, setting=setting)
    expected, expected_read_TH = native.attend_apart(exact=exact)
    part, read_lse_TH = retrieve_in_memory(
        q_THD, context.rows_S, exact, layout=context.layout, setting=setting, meter=whole_meter
    )
    assert torch.equal(part.out_THD, expected.out_THD)
    assert torch.equal(part.lse_TH, expected.lse_TH)
    assert torch.equal(read_lse_TH, expected_read_TH)
    assert whole_meter == meter


def test_clusters_beyond_notice_are_left_out(isa: str) -> None:
    context = sealed_context(dtype=DType.BF16)
    setting = RetrievalSetting(0)
    q_THD, lse_TH = queries(context, tokens=1, group=3)
    native = Retrieval(q_THD, context.rows_S, layout=context.layout)
    native.select(lse_TH + 100, setting=setting)
    exact = Part(torch.randn(q_THD.shape, generator=torch.Generator().manual_seed(2)), lse_TH + 100)
    part, _ = native.attend_apart(exact=exact)
    assert torch.equal(part.out_THD, exact.out_THD)


@pytest.mark.parametrize("encoding", [Encoding.K8V4, Encoding.INT4])
def test_pages_may_lie_elsewhere(isa: str, encoding: Encoding) -> None:
    context = sealed_context(encoding)
    q_THD, exact_lse_TH = queries(context, tokens=2, group=3)
    native = Retrieval(q_THD, context.rows_S, layout=context.layout)
    chosen_TKC = native.select(exact_lse_TH, setting=RetrievalSetting(512))
    expected = native.attend()
    cold_S = context.rows_S
    cold_S["pages"][[0, 2]] = 0
    other = Retrieval(q_THD, cold_S, layout=context.layout)
    assert np.array_equal(other.select(exact_lse_TH, setting=RetrievalSetting(512)), chosen_TKC)
    with pytest.raises(ShapeError, match="lies in no memory"):
        other.attend()
    addresses_TKC, memory = copied_pages(context, chosen_TKC)
    actual = other.attend(addresses_TKC)
    assert len(memory) > 0
    assert torch.equal(actual.out_THD, expected.out_THD)
    assert torch.equal(actual.lse_TH, expected.lse_TH)


def copied_pages(context: Context, chosen_TKC: NDArray[np.int32]) -> tuple[NDArray[np.uint64], list[Tensor]]:
    """Copies of the pages of segments 0 and 2 that hold chosen clusters."""
    addresses_TKC = np.zeros(chosen_TKC.shape, dtype=np.uint64)
    copies: dict[tuple[int, int], Tensor] = {}
    size = context.layout.page.size_bytes
    for place, cluster in np.ndenumerate(chosen_TKC):
        segment, rest = divmod(int(cluster), SEGMENT_CLUSTERS)
        if segment == 1:
            continue
        offset = context.layout.page_offset(rest // BLOCK_CLUSTERS, place[1], blocks=16)
        page = copies.setdefault((segment, offset), context.slabs[segment].bytes[offset : offset + size].clone())
        addresses_TKC[place] = page.data_ptr()
    return addresses_TKC, list(copies.values())


def test_what_is_missing_is_estimated() -> None:
    context = sealed_context()
    q_THD, exact_lse_TH = queries(context, tokens=1, group=3)
    setting, meter = RetrievalSetting(256), RetrievalMeter()
    native = Retrieval(q_THD, context.rows_S, layout=context.layout, meter=meter)
    chosen_TKC = native.select(exact_lse_TH, setting=setting)
    addresses_TKC = np.zeros(chosen_TKC.shape, dtype=np.uint64)
    addresses_TKC[:, :, ::3] = MISSING
    part = native.attend(addresses_TKC)
    oracle = RetrievalReference(q_THD, context.segments, kv_heads=3)
    oracle.select(exact_lse_TH, setting=setting)
    read_TKC = np.where(addresses_TKC == MISSING, -1, chosen_TKC)
    expected, _ = oracle.attend(mask_of(read_TKC, oracle.ids_C))
    torch.testing.assert_close(part.out_THD, expected.out_THD, atol=2e-4, rtol=0)
    assert meter.chosen_tokens == int((read_TKC >= 0).sum()) * CLUSTER_TOKENS


@pytest.mark.parametrize("tokens", [1, 11])
def test_what_was_read_before_merges_in(isa: str, tokens: int) -> None:
    context = sealed_context()
    q_THD, lse_TH = queries(context, tokens=tokens, group=3)
    lse_TH[0, 2] = -torch.inf
    exact = Part(torch.randn(q_THD.shape, generator=torch.Generator().manual_seed(2)), lse_TH)
    exact.out_THD[0, 2] = 0.0
    native = Retrieval(q_THD, context.rows_S, layout=context.layout)
    native.select(lse_TH, setting=RetrievalSetting(256))
    apart, chosen_lse_TH = native.attend_apart()
    expected = merge([exact, apart])
    part, read_lse_TH = native.attend_apart(exact=exact)
    torch.testing.assert_close(part.out_THD, expected.out_THD, atol=1e-5, rtol=0)
    torch.testing.assert_close(part.lse_TH, expected.lse_TH, atol=1e-5, rtol=1e-6)
    torch.testing.assert_close(read_lse_TH, torch.logaddexp(lse_TH, chosen_lse_TH), atol=1e-5, rtol=1e-6)
    with pytest.raises(ShapeError, match="a part of"):
        native.attend_apart(exact=Part(exact.out_THD[:, :3], lse_TH))


@pytest.mark.parametrize("share", [1.0, 0.4])
def test_a_row_that_is_not_numbers_stays_so_and_stays_alone(isa: str, share: float) -> None:
    context = sealed_context()
    setting = RetrievalSetting(256, shortlist_share=share)
    q_THD, exact_lse_TH = queries(context, tokens=2, group=3)
    expected = Retrieval(q_THD, context.rows_S, layout=context.layout)
    expected.select(exact_lse_TH, setting=setting)
    q_nan_THD = q_THD.clone()
    q_nan_THD[1, 4, 7] = torch.nan
    native = Retrieval(q_nan_THD, context.rows_S, layout=context.layout)
    native.select(exact_lse_TH, setting=setting)
    out_THD = native.attend().out_THD
    assert out_THD[1, 4].isnan().all()
    assert torch.equal(out_THD[0], expected.attend().out_THD[0])
    assert not out_THD[1, [0, 1, 2, 6, 7, 8]].isnan().any()


def test_a_key_that_is_no_number_is_seen(isa: str) -> None:
    generator = torch.Generator().manual_seed(1)
    k_KND, v_KND = torch.randn(2, 1, 256, 64, generator=generator)
    k_KND[0, 77] = torch.nan
    layout = slab_layout(Encoding.K8V4, kv_heads=1, head_dim=64)
    slab = encode_slab(k_KND, v_KND, layout)
    seal(np.array([slab.address], dtype=np.uint64), layout=layout, blocks=4)
    for budget in (0, 16, 256):
        native = Retrieval(torch.ones(1, 1, 64), rows_of([slab]), layout=layout)
        native.select(torch.zeros(1, 1), setting=RetrievalSetting(budget))
        assert native.attend().out_THD.isnan().all()


@pytest.mark.parametrize("share", [1.0, 0.5])
def test_the_meter_counts_what_one_row_reads(share: float) -> None:
    context = sealed_context()
    q_THD, exact_lse_TH = queries(context, tokens=2, group=3)
    meter = RetrievalMeter()
    native = Retrieval(q_THD, context.rows_S, layout=context.layout, meter=meter)
    chosen_TKC = native.select(exact_lse_TH, setting=RetrievalSetting(256, shortlist_share=share))
    native.attend()
    clusters = sum(BLOCKS) * BLOCK_CLUSTERS
    scanned = int(clusters * share)
    lists = 2 * 3
    pages = sum(len(np.unique(row // BLOCK_CLUSTERS)) for row in chosen_TKC.reshape(lists, -1))
    assert meter.rows == 2
    assert meter.plane_bytes == lists * scanned * CLUSTER_TOKENS * (32 + 4)
    assert meter.summary_bytes == lists * clusters * (64 + 4) * (1 if share == 1 else 2)
    assert meter.chosen_tokens == lists * 256
    assert meter.cluster_bytes == lists * 256 * (32 + 32 + 4)
    assert meter.page_bytes == pages * context.layout.page.size_bytes + lists * 256 * 4


def test_wrong_shapes_are_named() -> None:
    context = sealed_context(blocks=(1,))
    q_THD, exact_lse_TH = queries(context, tokens=2, group=3)
    rows_S, layout = context.rows_S, context.layout
    with pytest.raises(ShapeError, match="have no index"):
        Retrieval(q_THD, rows_S, layout=slab_layout(Encoding.INT8, kv_heads=3, head_dim=64))
    with pytest.raises(ShapeError, match="queries"):
        Retrieval(q_THD[:, :8].contiguous(), rows_S, layout=layout)
    with pytest.raises(ShapeError, match="contiguous"):
        Retrieval(q_THD[:, :6], rows_S, layout=layout)
    with pytest.raises(ShapeError, match="indexed segments"):
        Retrieval(q_THD, np.zeros(1, dtype=np.uint64), layout=layout)
    native = Retrieval(q_THD, rows_S, layout=layout)
    with pytest.raises(ShapeError, match="log-sum-exps"):
        native.select(exact_lse_TH[:1], setting=RetrievalSetting(64))
    native.select(exact_lse_TH, setting=RetrievalSetting(64))
    with pytest.raises(ShapeError, match="addresses"):
        native.attend(np.zeros((2, 3, 5), dtype=np.uint64))


def test_the_native_core_has_the_same_numbers() -> None:
    assert _native.MISSING == MISSING
    assert _native.SEGMENT_CLUSTERS == SEGMENT_CLUSTERS
    assert retrieval.INDEXED_DTYPE.itemsize == 32
