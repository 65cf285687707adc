"""What a cache of pages gives to a chunk of several rows."""

from __future__ import annotations

import pytest
import torch

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
