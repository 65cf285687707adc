"""The native attention against the fp64 reference, on every instruction set that this machine has."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from tests.unit.attention.pages import Pages, random_pages

from h3kv import _native
from h3kv.attention import native, reference
from h3kv.attention.native import PAGE_DTYPE, TORCH_DTYPES
from h3kv.core import limits
from h3kv.core.errors import ShapeError
from h3kv.core.layout import PageLayout
from h3kv.core.types import DType

# Weights are rounded to 8 bits of mantissa before they meet bf16 values; averaged over tokens 2^-9 stays below this.
TOLERANCE = {DType.FP32: 1e-5, DType.FP16: 1e-5, DType.BF16: 4e-3}


@pytest.fixture
def generator() -> torch.Generator:
    return torch.Generator().manual_seed(11)


def check(pages: Pages, *, heads: int, tokens: int, position: int, generator: torch.Generator) -> None:
    """Compare one call with the reference."""
    layout = pages.layout
    q_THD = torch.randn(tokens, heads, layout.head_dim, generator=generator).to(TORCH_DTYPES[layout.dtype])
    part = native.attend(q_THD, pages.table_KN, layout=layout, position=position)
    expected = reference.attend(q_THD, [pages.tokens], position=position)
    torch.testing.assert_close(part.out_THD, expected.out_THD, atol=TOLERANCE[layout.dtype], rtol=0)
    torch.testing.assert_close(part.lse_TH, expected.lse_TH, atol=1e-4, rtol=0)


@pytest.mark.parametrize("dtype", list(DType))
@pytest.mark.parametrize("head_dim", [64, 80, 96, 128])
@pytest.mark.parametrize("grouping", [(1, 1), (9, 3), (8, 1), (10, 2)])
def test_decode_equals_the_reference(
    isa: str, dtype: DType, head_dim: int, grouping: tuple[int, int], generator: torch.Generator
) -> None:
    heads, kv_heads = grouping
    pages = random_pages([64, 64, 37], dtype=dtype, kv_heads=kv_heads, head_dim=head_dim, generator=generator)
    check(pages, heads=heads, tokens=1, position=164, generator=generator)


@pytest.mark.parametrize("dtype", list(DType))
@pytest.mark.parametrize("head_dim", [80, 96, 128])
def test_long_chunks_of_other_head_sizes(isa: str, dtype: DType, head_dim: int, generator: torch.Generator) -> None:
    pages = random_pages([64, 64, 64, 30], dtype=dtype, kv_heads=2, head_dim=head_dim, generator=generator)
    check(pages, heads=8, tokens=100, position=122, generator=generator)


@pytest.mark.parametrize("dtype", list(DType))
def test_a_question_over_many_parts(isa: str, dtype: DType, generator: torch.Generator) -> None:
    counts = [64] * 50 + [9]
    pages = random_pages(counts, dtype=dtype, kv_heads=1, head_dim=64, generator=generator)
    check(pages, heads=3, tokens=30, position=sum(counts) - 30, generator=generator)


@pytest.mark.parametrize("dtype", list(DType))
@pytest.mark.parametrize("tokens", [1, 100])
def test_what_is_not_a_number_is_never_hidden(isa: str, dtype: DType, tokens: int, generator: torch.Generator) -> None:
    pages = random_pages([64, 64], dtype=dtype, kv_heads=1, head_dim=64, generator=generator)
    position = 128 - tokens
    q_THD = torch.randn(tokens, 2, 64, generator=generator).to(TORCH_DTYPES[dtype])
    q_THD[-1, 0, 5] = torch.nan
    part = native.attend(q_THD, pages.table_KN, layout=pages.layout, position=position)
    assert part.out_THD[-1, 0].isnan().all()
    assert part.lse_TH[-1, 0].isnan()
    assert not part.out_THD[-1, 1].isnan().any()
    pages.tokens.k_SKD[3, 0, 7] = torch.nan
    native.append(pages.tokens.k_SKD, pages.tokens.v_SKD, pages.table_KN, layout=pages.layout, index=0)
    for seen in (pages.table_KN, pages.table_KN[:, :1]):
        part = native.attend(q_THD, seen, layout=pages.layout, position=position)
        assert part.out_THD[-1].isnan().all()
        assert part.lse_TH[-1].isnan().all()


def test_a_lone_token_that_is_not_a_number_is_not_an_empty_row(isa: str, generator: torch.Generator) -> None:
    pages = random_pages([1], dtype=DType.FP32, kv_heads=1, head_dim=64, generator=generator)
    part = native.attend(torch.full((1, 1, 64), torch.nan), pages.table_KN, layout=pages.layout, position=0)
    assert part.out_THD.isnan().all()
    assert part.lse_TH.isnan().all()


@pytest.mark.parametrize("dtype", list(DType))
@pytest.mark.parametrize("tokens", [2, 10, 11, 63, 200, 512])
def test_chunks_of_any_length_are_causal(isa: str, dtype: DType, tokens: int, generator: torch.Generator) -> None:
    counts = [64] * 9 + [5]
    pages = random_pages(counts, dtype=dtype, kv_heads=3, head_dim=64, generator=generator)
    check(pages, heads=9, tokens=tokens, position=sum(counts) - tokens, generator=generator)


@pytest.mark.parametrize("dtype", list(DType))
@pytest.mark.parametrize("counts", [[1], [16, 16, 48], [3, 0, 64, 17, 1], [33, 0]])
@pytest.mark.parametrize("tokens", [1, 40])
def test_ragged_and_empty_pages(
    isa: str, dtype: DType, counts: list[int], tokens: int, generator: torch.Generator
) -> None:
    pages = random_pages(counts, dtype=dtype, kv_heads=2, head_dim=64, generator=generator)
    check(pages, heads=4, tokens=tokens, position=max(0, sum(counts) - tokens), generator=generator)


@pytest.mark.parametrize("dtype", list(DType))
@pytest.mark.parametrize("tokens", [1, 30])
def test_permuted_tokens_are_masked_by_their_positions(
    isa: str, dtype: DType, tokens: int, generator: torch.Generator
) -> None:
    pages = random_pages([64, 50], dtype=dtype, kv_heads=2, head_dim=64, generator=generator, shuffled=True)
    check(pages, heads=6, tokens=tokens, position=57, generator=generator)


@pytest.mark.parametrize("tokens", [1, 50])
def test_no_visible_token_gives_zero_and_minus_infinity(isa: str, tokens: int, generator: torch.Generator) -> None:
    pages = random_pages([64], dtype=DType.BF16, kv_heads=1, head_dim=64, generator=generator)
    q_THD = torch.randn(tokens, 2, 64, generator=generator).bfloat16()
    for table_KN, position in ((pages.table_KN, -tokens), (pages.table_KN[:, :0], 0)):
        part = native.attend(q_THD, table_KN, layout=pages.layout, position=position)
        assert torch.equal(part.out_THD, torch.zeros(tokens, 2, 64))
        assert torch.isneginf(part.lse_TH).all()


@pytest.mark.parametrize("dtype", list(DType))
def test_scores_a_hundred_apart_stay_finite_and_right(isa: str, dtype: DType, generator: torch.Generator) -> None:
    counts = [64] * 40
    pages = random_pages(counts, dtype=dtype, kv_heads=1, head_dim=64, generator=generator)
    q_THD = torch.zeros(1, 1, 64, dtype=TORCH_DTYPES[dtype])
    # One token far above all others, then one far below: the running maximum moves late and by a lot.
    for score in (100.0, -100.0):
        index = 40 * 64 - 30
        q_THD[0, 0, 0] = 8.0
        k_SKD = pages.tokens.k_SKD.clone()
        k_SKD[:, 0, 0] = 0.0
        k_SKD[index, 0, 0] = score
        table_KN = pages.table_KN.copy()
        native.append(k_SKD, pages.tokens.v_SKD, table_KN, layout=pages.layout, index=0)
        part = native.attend(q_THD, table_KN, layout=pages.layout, position=len(k_SKD))
        run = reference.TokenRun(k_SKD, pages.tokens.v_SKD, pages.tokens.positions_S)
        expected = reference.attend(q_THD, [run], position=len(k_SKD))
        torch.testing.assert_close(part.out_THD, expected.out_THD, atol=TOLERANCE[dtype], rtol=0)
        torch.testing.assert_close(part.lse_TH, expected.lse_TH, atol=1e-4, rtol=0)


@pytest.mark.parametrize("dtype", list(DType))
@pytest.mark.parametrize("tokens", [1, 100])
def test_results_do_not_depend_on_the_number_of_threads(dtype: DType, tokens: int, generator: torch.Generator) -> None:
    pages = random_pages([64] * 70, dtype=dtype, kv_heads=2, head_dim=64, generator=generator)
    q_THD = torch.randn(tokens, 6, 64, generator=generator).to(TORCH_DTYPES[dtype])
    parts = [
        native.attend(q_THD, pages.table_KN, layout=pages.layout, position=70 * 64 - tokens, threads=threads)
        for threads in (1, 2, 3, 5)
    ]
    for part in parts[1:]:
        assert torch.equal(part.out_THD, parts[0].out_THD)
        assert torch.equal(part.lse_TH, parts[0].lse_TH)


def test_query_and_output_types_are_free(generator: torch.Generator) -> None:
    pages = random_pages([64, 20], dtype=DType.FP32, kv_heads=1, head_dim=64, generator=generator)
    q_THD = torch.randn(2, 3, 64, generator=generator).bfloat16()
    wide = native.attend(q_THD.float(), pages.table_KN, layout=pages.layout, position=80)
    narrow = native.attend(q_THD, pages.table_KN, layout=pages.layout, position=80, out_dtype=torch.float16)
    assert torch.equal(narrow.out_THD, wide.out_THD.half())
    assert torch.equal(narrow.lse_TH, wide.lse_TH)


@pytest.mark.parametrize("dtype", list(DType))
@pytest.mark.parametrize("head_dim", [64, 80, 128])
def test_append_writes_the_documented_layout(dtype: DType, head_dim: int, generator: torch.Generator) -> None:
    layout = PageLayout(dtype, head_dim)
    k_SKD = torch.randn(150, 2, head_dim, generator=generator).to(TORCH_DTYPES[dtype])
    v_SKD = torch.randn(150, 2, head_dim, generator=generator).to(TORCH_DTYPES[dtype])
    memory = torch.zeros(2, 3, layout.size_bytes, dtype=torch.uint8)
    table_KN = np.zeros((2, 3), dtype=PAGE_DTYPE)
    table_KN["keys"] = [[memory[head, page].data_ptr() for page in range(3)] for head in range(2)]
    table_KN["values"] = table_KN["keys"] + layout.keys_bytes
    for start, end in ((0, 1), (1, 70), (70, 71), (71, 150)):
        native.append(k_SKD[start:end], v_SKD[start:end], table_KN, layout=layout, index=start)
    for head in range(2):
        for page in range(3):
            chosen = slice(64 * page, 64 * page + 64)
            assert torch.equal(
                memory[head, page], reference.pack_page(k_SKD[chosen, head], v_SKD[chosen, head], layout)
            )


def test_shapes_that_disagree_are_refused(generator: torch.Generator) -> None:
    pages = random_pages([64], dtype=DType.FP32, kv_heads=2, head_dim=64, generator=generator)
    good = torch.zeros(1, 4, 64)
    for q_THD in (good[:, :3], good[..., :48], good.double(), torch.zeros(64, 4, 1).transpose(0, 2)):
        with pytest.raises(ShapeError):
            native.attend(q_THD, pages.table_KN, layout=pages.layout, position=0)
    with pytest.raises(ShapeError, match="page table"):
        native.attend(good, pages.table_KN["keys"], layout=pages.layout, position=0)
    with pytest.raises(ShapeError, match="output"):
        native.attend(good, pages.table_KN, layout=pages.layout, position=0, out_dtype=torch.float64)
    with pytest.raises(ShapeError, match="above 0"):
        native.attend(good, pages.table_KN, layout=pages.layout, position=0, scale=0.0)
    with pytest.raises(ShapeError, match="do not fit"):
        native.append(torch.zeros(65, 2, 64), torch.zeros(65, 2, 64), pages.table_KN, layout=pages.layout, index=0)
    with pytest.raises(ShapeError, match="keys"):
        native.append(torch.zeros(1, 2, 64), torch.zeros(1, 2, 64).half(), pages.table_KN, layout=pages.layout, index=0)
    other = PageLayout(DType.BF16, 64)
    with pytest.raises(ShapeError, match="for pages"):
        native.append(torch.zeros(1, 2, 64), torch.zeros(1, 2, 64), pages.table_KN, layout=other, index=0)


@pytest.mark.parametrize("dtype", list(DType))
@pytest.mark.parametrize("tokens", [1, 3, 30, 100])
@pytest.mark.parametrize("step", [4, 12, 40])
def test_attention_in_runs_is_bitwise_the_same(
    isa: str, dtype: DType, tokens: int, step: int, generator: torch.Generator
) -> None:
    counts = [64] * 42 + [9]
    pages = random_pages(counts, dtype=dtype, kv_heads=2, head_dim=64, generator=generator)
    q_THD = torch.randn(tokens, 6, 64, generator=generator).to(TORCH_DTYPES[dtype])
    position = sum(counts) - tokens
    whole = native.attend(q_THD, pages.table_KN, layout=pages.layout, position=position)
    attention = native.Attention(q_THD, pages.table_KN, layout=pages.layout, position=position)
    for end in range(step, len(counts), step):
        attention.run(end)
    part = attention.run(len(counts))
    assert torch.equal(part.out_THD, whole.out_THD)
    assert torch.equal(part.lse_TH, whole.lse_TH)


def test_numbers_shared_with_the_native_core_agree() -> None:
    assert _native.PART_TOKENS == limits.PART_TOKENS
    assert _native.BATCH_PAGES == limits.ATTEND_BATCH_PAGES
    assert _native.PAGE_TOKENS == limits.BLOCK_TOKENS
    assert _native.HEAD_DIM_MAX == limits.HEAD_DIM_MAX
    assert _native.LANE_TOKENS == limits.LANE_TOKENS
    assert _native.PANEL_DIMS == limits.PANEL_DIMS


def test_an_unknown_instruction_set_is_refused() -> None:
    with pytest.raises(ValueError, match="not available"):
        _native.isa_select("mmx")
