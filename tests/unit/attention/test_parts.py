"""Merging parts: any split equals one softmax."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.unit.attention.pages import random_pages

from h3kv.attention import native, reference
from h3kv.attention.parts import Part, merge
from h3kv.core.errors import ShapeError
from h3kv.core.types import DType


@given(st.lists(st.integers(0, 60), min_size=1, max_size=6), st.integers(0, 2**31), st.sampled_from([1.0, 30.0]))
def test_parts_of_any_split_merge_to_one_softmax(sizes: list[int], seed: int, spread: float) -> None:
    generator = torch.Generator().manual_seed(seed)
    total = sum(sizes)
    q_THD = torch.randn(3, 4, 16, generator=generator) * spread
    k_SKD = torch.randn(total, 2, 16, generator=generator)
    v_SKD = torch.randn(total, 2, 16, generator=generator)
    run = reference.TokenRun(k_SKD, v_SKD, torch.arange(total))
    whole = reference.attend(q_THD, [run], position=total)
    starts = [0, *itertools.accumulate(sizes)]
    parts = [
        reference.attend(q_THD, [reference.TokenRun(k_SKD[a:b], v_SKD[a:b], run.positions_S[a:b])], position=total)
        for a, b in itertools.pairwise(starts)
    ]
    merged = merge(parts)
    torch.testing.assert_close(merged.out_THD, whole.out_THD, atol=1e-5, rtol=0)
    torch.testing.assert_close(merged.lse_TH, whole.lse_TH, atol=1e-4, rtol=1e-6)


@pytest.mark.parametrize("gap", [100.0, -100.0, 1e4, 0.0, float("-inf")])
def test_gaps_of_any_size_stay_finite(gap: float) -> None:
    a = Part(torch.ones(1, 1, 4), torch.zeros(1, 1))
    b = Part(torch.full((1, 1, 4), 3.0) if gap > -torch.inf else torch.zeros(1, 1, 4), torch.full((1, 1), gap))
    merged = merge([a, b])
    weight = torch.sigmoid(torch.tensor(gap))
    torch.testing.assert_close(merged.out_THD, 1 + (b.out_THD - 1) * weight)
    torch.testing.assert_close(merged.lse_TH, torch.logaddexp(a.lse_TH, b.lse_TH))


def test_empty_parts_change_nothing() -> None:
    empty = Part(torch.zeros(2, 1, 4), torch.full((2, 1), -torch.inf))
    full = Part(torch.randn(2, 1, 4), torch.randn(2, 1))
    for parts in ([empty, full], [full, empty], [empty, full, empty]):
        merged = merge(parts)
        assert torch.equal(merged.out_THD, full.out_THD)
        assert torch.equal(merged.lse_TH, full.lse_TH)
    nothing = merge([empty, empty])
    assert torch.equal(nothing.out_THD, empty.out_THD)
    assert torch.isneginf(nothing.lse_TH).all()


def test_native_parts_merge_to_the_native_whole() -> None:
    generator = torch.Generator().manual_seed(3)
    pages = random_pages([64, 64, 64, 9], dtype=DType.FP32, kv_heads=3, head_dim=64, generator=generator)
    q_THD = torch.randn(5, 9, 64, generator=generator)
    position = 64 * 3 + 4
    whole = native.attend(q_THD, pages.table_KN, layout=pages.layout, position=position)
    parts = [
        native.attend(q_THD, pages.table_KN[:, chosen], layout=pages.layout, position=position)
        for chosen in (slice(0, 1), slice(1, 3), slice(3, 4))
    ]
    merged = merge(parts)
    torch.testing.assert_close(merged.out_THD, whole.out_THD, atol=1e-5, rtol=0)
    torch.testing.assert_close(merged.lse_TH, whole.lse_TH, atol=1e-5, rtol=0)


def test_parts_that_cannot_merge_are_refused() -> None:
    with pytest.raises(ShapeError, match="at least one"):
        merge([])
    with pytest.raises(ShapeError, match="differ"):
        merge([Part(torch.zeros(1, 1, 4), torch.zeros(1, 1)), Part(torch.zeros(1, 1, 8), torch.zeros(1, 1))])
