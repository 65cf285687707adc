"""Pages of codes: the native core against plain torch, on every instruction set that this machine has."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from tests.unit.attention.coded_pages import CodedPages, coded_pages

from h3kv import _native
from h3kv.attention import codes, native, reference
from h3kv.attention.native import TORCH_DTYPES
from h3kv.attention.parts import Part
from h3kv.attention.token_rows import read_keys, read_values
from h3kv.attention.torch_pages import TorchPages
from h3kv.core.layout import SCALES_BYTES, PageLayout
from h3kv.core.types import DType, Encoding

CODES = [Encoding.INT8, Encoding.K8V4, Encoding.INT4]

# fp32 keeps three parts of queries and weights, the others one or two: 7 bits of a 4-bit key's query, 8 of a 4-bit
# value's weight. Chunks in bf16 are decoded into bf16.
TOLERANCE = {DType.FP32: 2e-5, DType.FP16: 1.5e-2, DType.BF16: 1.5e-2}


@pytest.fixture
def generator() -> torch.Generator:
    return torch.Generator().manual_seed(5)


def attend_all(pages: CodedPages, q_THD: torch.Tensor, position: int) -> list[Part]:
    """One part for each instruction set."""
    before, parts = _native.isa_current(), []
    try:
        for isa in _native.isa_list():
            _native.isa_select(isa)
            parts.append(native.attend(q_THD, pages.table_KN, layout=pages.layout, position=position))
    finally:
        _native.isa_select(before)
    return parts


@pytest.mark.parametrize("dtype", list(DType))
@pytest.mark.parametrize("encoding", CODES)
@pytest.mark.parametrize("head_dim", [16, 64, 80, 96, 128, 256])
def test_attention_equals_attention_over_what_the_codes_mean(
    dtype: DType, encoding: Encoding, head_dim: int, generator: torch.Generator
) -> None:
    pages = coded_pages(165, PageLayout(dtype, head_dim, encoding), kv_heads=2, generator=generator)
    for tokens in (1, 2, 4, 9, 40):
        q_THD = torch.randn(tokens, 6, head_dim, generator=generator).to(TORCH_DTYPES[dtype])
        expected = reference.attend(q_THD, [pages.decoded], position=165 - tokens)
        for part in attend_all(pages, q_THD, 165 - tokens):
            torch.testing.assert_close(part.out_THD, expected.out_THD, atol=TOLERANCE[dtype], rtol=0)
            torch.testing.assert_close(part.lse_TH, expected.lse_TH, atol=TOLERANCE[dtype], rtol=0)


@pytest.mark.parametrize("dtype", list(DType))
@pytest.mark.parametrize("encoding", CODES)
@pytest.mark.parametrize("rows", range(1, 17))
def test_few_rows_are_equal_bit_for_bit_on_every_instruction_set(
    dtype: DType, encoding: Encoding, rows: int, generator: torch.Generator
) -> None:
    pages = coded_pages(150, PageLayout(dtype, 80, encoding), kv_heads=1, generator=generator, fine=True)
    q_THD = (2 * torch.randn(1, rows, 80, generator=generator)).to(TORCH_DTYPES[dtype])
    for first, second in pairwise(attend_all(pages, q_THD, 149)):
        assert torch.equal(first.out_THD, second.out_THD)
        assert torch.equal(first.lse_TH, second.lse_TH)


@pytest.mark.parametrize("encoding", CODES)
@pytest.mark.parametrize("head_dim", [16, 64, 80, 128])
def test_append_in_any_pieces_writes_the_drawn_bytes(
    encoding: Encoding, head_dim: int, generator: torch.Generator
) -> None:
    layout = PageLayout(DType.FP32, head_dim, encoding)
    pages = coded_pages(128, layout, kv_heads=2, generator=generator)
    tokens = codes.CodedTokens.of(
        pages.k_SKD.transpose(0, 1).unflatten(1, (2, 64)), pages.v_SKD.transpose(0, 1).unflatten(1, (2, 64)), encoding
    )
    expected_page, expected_plane = codes.pack(tokens, layout)
    for pieces in ([128], [1, 4, 60, 3, 60]):
        pages.pages_KNB.fill_(0xFF)
        pages.planes_KNB.fill_(0xFF)
        start = 0
        for count in pieces:
            chosen = slice(start, start + count)
            native.append(pages.k_SKD[chosen], pages.v_SKD[chosen], pages.table_KN, layout=layout, index=start)
            start += count
        assert torch.equal(pages.pages_KNB[..., : expected_page.shape[-1]], expected_page)
        assert torch.equal(pages.planes_KNB[..., : expected_plane.shape[-1]], expected_plane)
        assert (pages.planes_KNB[..., layout.nibbles_bytes + SCALES_BYTES :] == 0xFF).all(), "places were touched"


@pytest.mark.parametrize("head_dim", [16, 64, 80, 128])
def test_residues_are_the_drawn_bytes_and_many_rows_read_all_of_them(
    isa: str, head_dim: int, generator: torch.Generator
) -> None:
    layout = PageLayout(DType.FP32, head_dim, Encoding.K8V4)
    pages = coded_pages(128, layout, kv_heads=2, generator=generator, fine=True)
    k_KNSD, v_KNSD = (x_SKD.transpose(0, 1).unflatten(1, (2, 64)) for x_SKD in (pages.k_SKD, pages.v_SKD))
    tokens = codes.CodedTokens.of(k_KNSD, v_KNSD, Encoding.K8V4)
    assert torch.equal(pages.residues_KNB, codes.pack_residues(tokens))
    assert torch.equal(codes.unpack_residues(pages.residues_KNB, head_dim), tokens.values.residues_XD)
    q_THD = torch.randn(20, 4, head_dim, generator=generator)
    part = native.attend(q_THD, pages.table_KN, layout=layout, position=127)
    expected = reference.attend(q_THD, [pages.decoded], position=127)
    torch.testing.assert_close(part.out_THD, expected.out_THD, atol=2e-5, rtol=0)


@pytest.mark.parametrize(("sharpness", "share"), [(0.2, 1.0), (2.0, 0.8), (8.0, 0.3)])
def test_few_rows_refine_the_tokens_that_weigh_much(
    isa: str, sharpness: float, share: float, generator: torch.Generator
) -> None:
    pages = coded_pages(300, PageLayout(DType.FP32, 64, Encoding.K8V4), kv_heads=2, generator=generator, fine=True)
    q_THD = sharpness * torch.randn(1, 6, 64, generator=generator)
    fine = native.attend(q_THD, pages.table_KN, layout=pages.layout, position=299)
    pages.table_KN["residues"] = 0
    coarse = native.attend(q_THD, pages.table_KN, layout=pages.layout, position=299)
    expected = reference.attend(q_THD, [pages.decoded], position=299)
    fine_error, coarse_error = ((part.out_THD - expected.out_THD).norm() for part in (fine, coarse))
    # Where all weights are small none is refined: their errors average out.
    assert fine_error <= share * coarse_error
    assert torch.equal(fine.lse_TH, coarse.lse_TH)


def test_values_that_weigh_much_only_until_their_batch_of_pages_ends_are_not_refined(
    isa: str, generator: torch.Generator
) -> None:
    layout = PageLayout(DType.FP32, 64, Encoding.K8V4)
    pages = coded_pages(256, layout, kv_heads=1, generator=generator, fine=True)
    direction_D = torch.nn.functional.normalize(torch.randn(64, generator=generator), dim=0)
    heavy_SKD = 40 * direction_D.view(1, 1, 64)
    native.append(heavy_SKD, heavy_SKD, pages.table_KN, layout=layout, index=69)
    q_THD = (4 * direction_D).expand(1, 3, 64).contiguous()
    fine = native.attend(q_THD, pages.table_KN, layout=layout, position=255)
    pages.table_KN["residues"][:, [0, 2, 3]] = 0
    assert torch.equal(native.attend(q_THD, pages.table_KN, layout=layout, position=255).out_THD, fine.out_THD)
    pages.table_KN["residues"] = 0
    assert not torch.equal(native.attend(q_THD, pages.table_KN, layout=layout, position=255).out_THD, fine.out_THD)


@pytest.mark.parametrize("encoding", CODES)
@pytest.mark.parametrize("tokens", [1, 30])
def test_positions_mask_permuted_tokens(isa: str, encoding: Encoding, tokens: int, generator: torch.Generator) -> None:
    pages = coded_pages(114, PageLayout(DType.FP32, 64, encoding), kv_heads=2, generator=generator)
    positions_S = torch.randperm(114, generator=generator).to(torch.int32)
    for page in range(2):
        pages.table_KN["positions"][:, page] = positions_S[64 * page :].data_ptr()
    run = reference.TokenRun(pages.decoded.k_SKD, pages.decoded.v_SKD, positions_S)
    q_THD = torch.randn(tokens, 6, 64, generator=generator)
    expected = reference.attend(q_THD, [run], position=57)
    part = native.attend(q_THD, pages.table_KN, layout=pages.layout, position=57)
    torch.testing.assert_close(part.out_THD, expected.out_THD, atol=2e-5, rtol=0)
    order = positions_S.argsort()
    torch.testing.assert_close(read_keys(pages.table_KN, pages.layout), run.k_SKD[order])
    torch.testing.assert_close(read_values(pages.table_KN, pages.layout), run.v_SKD[order])


@pytest.mark.parametrize("encoding", CODES)
@pytest.mark.parametrize("tokens", [1, 30])
def test_pages_may_begin_at_a_cluster_and_be_empty(
    isa: str, encoding: Encoding, tokens: int, generator: torch.Generator
) -> None:
    layout = PageLayout(DType.FP32, 64, encoding)
    pages = coded_pages(128, layout, kv_heads=1, generator=generator)
    table_KN = pages.table_KN
    for part, size_bytes in (
        ("keys", layout.keys_bytes),
        ("values", layout.values_bytes),
        ("nibbles", layout.nibbles_bytes),
    ):
        table_KN[part][0, 0] += 2 * size_bytes // 4
    table_KN["scales"][0, 0] += 2 * 2 * 16
    table_KN["count"] = [[20, 0]]
    q_THD = torch.randn(tokens, 3, 64, generator=generator)
    part = native.attend(q_THD, table_KN, layout=layout, position=1000)
    chosen = slice(32, 52)
    run = reference.TokenRun(pages.decoded.k_SKD[chosen], pages.decoded.v_SKD[chosen], torch.arange(20))
    torch.testing.assert_close(part.out_THD, reference.attend(q_THD, [run], position=1000).out_THD, atol=2e-5, rtol=0)


@pytest.mark.parametrize("encoding", CODES)
@pytest.mark.parametrize("tokens", [1, 40])
@pytest.mark.parametrize("which", ["key", "value", "query"])
def test_what_is_not_a_number_is_never_hidden(
    isa: str, encoding: Encoding, tokens: int, which: str, generator: torch.Generator
) -> None:
    layout = PageLayout(DType.BF16, 64, encoding)
    pages = coded_pages(100, layout, kv_heads=1, generator=generator)
    q_THD = torch.randn(tokens, 2, 64, generator=generator).bfloat16()
    bad = {"key": pages.k_SKD, "value": pages.v_SKD, "query": q_THD[-1:]}[which]
    bad[0, 0, 3] = torch.inf if which == "value" else torch.nan
    native.append(pages.k_SKD, pages.v_SKD, pages.table_KN, layout=layout, index=0)
    part = native.attend(q_THD, pages.table_KN, layout=layout, position=100 - tokens)
    assert part.out_THD[-1, 0].isnan().all()


@pytest.mark.parametrize("encoding", CODES)
@pytest.mark.parametrize("tokens", [1, 5, 40])
def test_runs_and_threads_change_nothing(encoding: Encoding, tokens: int, generator: torch.Generator) -> None:
    layout = PageLayout(DType.BF16, 64, encoding)
    pages = coded_pages(64 * 33 + 9, layout, kv_heads=2, generator=generator, fine=True)
    q_THD = (2 * torch.randn(tokens, 6, 64, generator=generator)).bfloat16()
    position = 64 * 33 + 9 - tokens
    whole = native.attend(q_THD, pages.table_KN, layout=pages.layout, position=position, threads=1)
    for step, threads in ((4, 2), (12, 3), (34, 2)):
        attention = native.Attention(q_THD, pages.table_KN, layout=pages.layout, position=position, threads=threads)
        for end in range(step, 34, step):
            attention.run(end)
        part = attention.run(34)
        assert torch.equal(part.out_THD, whole.out_THD)
        assert torch.equal(part.lse_TH, whole.lse_TH)


@pytest.mark.parametrize("dtype", list(DType))
@pytest.mark.parametrize("encoding", CODES)
def test_torch_pages_write_the_same_bytes_and_attend_alike(
    dtype: DType, encoding: Encoding, generator: torch.Generator
) -> None:
    layout = PageLayout(dtype, 64, encoding)
    pages = coded_pages(100, layout, kv_heads=2, generator=generator, fine=True)
    before = pages.pages_KNB.clone(), pages.planes_KNB.clone()
    arena = torch.frombuffer(_memory_of(pages), dtype=torch.uint8)
    kernels = TorchPages(arena, layout)
    for start, end in ((0, 1), (1, 70), (70, 100)):
        kernels.append(pages.k_SKD[start:end], pages.v_SKD[start:end], pages.table_KN, layout=layout, index=start)
    assert torch.equal(pages.pages_KNB, before[0])
    assert torch.equal(pages.planes_KNB, before[1])
    q_THD = torch.randn(3, 4, 64, generator=generator).to(TORCH_DTYPES[dtype])
    part = kernels.attend(q_THD, pages.table_KN, layout=layout, position=97)
    expected = reference.attend(q_THD, [pages.decoded], position=97)
    torch.testing.assert_close(part.out_THD, expected.out_THD, atol=2e-5, rtol=0)
    kernels.close()


def _memory_of(pages: CodedPages) -> memoryview:
    """The memory that holds pages and planes."""
    base = pages.pages_KNB
    whole = base.new_empty(0).set_(base.untyped_storage(), 0, (base.untyped_storage().nbytes(),))
    return memoryview(whole.numpy())
