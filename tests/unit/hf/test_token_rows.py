"""Rows read back from pages that the plain reference packed."""

from __future__ import annotations

import pytest
import torch
from tests.unit.attention.pages import random_pages

from h3kv.attention.token_rows import read_keys, read_values
from h3kv.core.types import DType


@pytest.mark.parametrize("dtype", list(DType))
@pytest.mark.parametrize("head_dim", [16, 64, 80, 128])
@pytest.mark.parametrize("counts", [[64, 64, 1], [7], [64]])
def test_rows_are_the_tokens_that_were_packed(dtype: DType, head_dim: int, counts: list[int]) -> None:
    pages = random_pages(counts, dtype=dtype, kv_heads=3, head_dim=head_dim, generator=torch.Generator().manual_seed(4))
    assert torch.equal(read_keys(pages.table_KN, pages.layout), pages.tokens.k_SKD)
    assert torch.equal(read_values(pages.table_KN, pages.layout), pages.tokens.v_SKD)
