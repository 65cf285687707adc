"""What a cache of pages gives to a chunk of several rows."""

from __future__ import annotations

import pytest
import torch

from h3kv.attention import native
from h3kv.attention.batch import PagedBatch
from h3kv.attention.recall import RecallSample
from h3kv.core.types import Encoding
from h3kv.testing.engines import layout_of
from h3kv.testing.resident_cache import ResidentCache

PAST, ROWS = 700, 70
"""Tokens before the chunk, and in it: it crosses two pages."""


@pytest.mark.parametrize("encoding", list(Encoding))
def test_rows_apart_have_the_numbers_of_single_tokens(encoding: Encoding) -> None:
    layout = layout_of(encoding)
    page, random = layout.slab.page, torch.Generator().manual_seed(3)
    shape = (PAST + ROWS, layout.slab.kv_heads, page.head_dim)
    k_TKD, v_TKD = (torch.randn(shape, generator=random) for _ in range(2))
    q_QHD = 3 * torch.randn(ROWS, 2 * layout.slab.kv_heads, page.head_dim, generator=random)
    single, apart = (ResidentCache(layout, tokens=PAST + ROWS) for _ in range(2))
    for cache in (single, apart):
        cache.append(0, k_TKD[:PAST], v_TKD[:PAST])
        cache.advance(PAST)
    apart.are_rows_apart = True
    found_QHD = apart.attend(0, q_QHD, k_TKD[PAST:], v_TKD[PAST:])
    apart.advance(ROWS)
    for row in range(ROWS):
        token = slice(PAST + row, PAST + row + 1)
        expected_QHD = single.attend(0, q_QHD[row : row + 1], k_TKD[token], v_TKD[token])
        single.advance(1)
        assert torch.equal(found_QHD[row], expected_QHD[0])


def test_every_layer_that_retrieves_has_its_turn_in_every_sequence() -> None:
    sample = RecallSample()
    first, second = sample.open_turn(), sample.open_turn()
    assert [first.take((1, 2, 4)) for _ in range(4)] == [1, 2, 4, 1]
    assert [second.take((1, 2, 4)) for _ in range(4)] == [2, 4, 1, 2]
    assert first.take(()) is None


@pytest.mark.parametrize("encoding", list(Encoding))
@pytest.mark.parametrize("rows", [256, 300, 450])
def test_attention_in_steps_has_the_numbers_of_one_call(encoding: Encoding, rows: int) -> None:
    layout = layout_of(encoding)
    page, random = layout.slab.page, torch.Generator().manual_seed(4)
    shape = (PAST + rows, layout.slab.kv_heads, page.head_dim)
    k_TKD, v_TKD = (torch.randn(shape, generator=random) for _ in range(2))
    q_QHD = 3 * torch.randn(rows, 2 * layout.slab.kv_heads, page.head_dim, generator=random)
    whole, stepped = (ResidentCache(layout, tokens=PAST + rows) for _ in range(2))
    for cache in (whole, stepped):
        cache.append(0, k_TKD[:PAST], v_TKD[:PAST])
        cache.advance(PAST)
    steps = stepped.attend_steps(0, q_QHD, k_TKD[PAST:], v_TKD[PAST:])
    count = 0
    while True:
        try:
            next(steps)
            count += 1
        except StopIteration as end:
            found_QHD = end.value
            break
    assert count == rows // native.rows_per_step(q_QHD.shape[1], layout.slab.kv_heads) - 1
    assert torch.equal(found_QHD, whole.attend(0, q_QHD, k_TKD[PAST:], v_TKD[PAST:]))


@pytest.mark.parametrize("encoding", list(Encoding))
def test_tokens_of_a_batch_have_the_numbers_that_each_has_alone(encoding: Encoding) -> None:
    layout = layout_of(encoding)
    page, random = layout.slab.page, torch.Generator().manual_seed(5)
    lengths = [0, 1, 63, 64, 700, 2500]
    caches: list[tuple[ResidentCache, ResidentCache]] = []
    for length in lengths:
        pair = (ResidentCache(layout, tokens=length + 1), ResidentCache(layout, tokens=length + 1))
        if length:
            k_TKD, v_TKD = (
                torch.randn(length, layout.slab.kv_heads, page.head_dim, generator=random) for _ in range(2)
            )
            for cache in pair:
                for layer in range(layout.layers):
                    cache.append(layer, k_TKD, v_TKD)
                cache.advance(length)
        caches.append(pair)
    heads = 2 * layout.slab.kv_heads
    batch = PagedBatch([alone for alone, _ in caches], layout)
    assert batch.positions == lengths
    for layer in range(layout.layers):
        q_BHD = 3 * torch.randn(len(lengths), heads, page.head_dim, generator=random)
        k_BKD, v_BKD = (
            torch.randn(len(lengths), layout.slab.kv_heads, page.head_dim, generator=random) for _ in range(2)
        )
        found_BHD = batch.attend(layer, q_BHD, k_BKD, v_BKD)
        for row, (_, alone) in enumerate(caches):
            at = slice(row, row + 1)
            assert torch.equal(found_BHD[at], alone.attend(layer, q_BHD[at], k_BKD[at], v_BKD[at]))
    batch.advance()
    assert [alone.tokens for alone, _ in caches] == [length + 1 for length in lengths]
