"""What codes may lose, and what they may not."""

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from h3kv.attention.codes import CodedTokens, encode, pack, rotate, unpack
from h3kv.core.layout import PageLayout
from h3kv.core.types import DType, Encoding

HEAD_DIMS = st.sampled_from([16, 64, 80, 96, 128, 256])
CODES = st.sampled_from([Encoding.INT8, Encoding.K8V4, Encoding.INT4])


def rows(seed: int, count: int, head_dim: int, magnitude: float, shift: float) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(count, head_dim, generator=generator) * magnitude + shift


@given(
    st.integers(0, 1 << 30), HEAD_DIMS, st.sampled_from([15, 255]), st.sampled_from([1e-4, 0.1, 1.0, 50.0, 1000.0]),
    st.sampled_from([0.0, 1.0, -300.0]),
)  # fmt: skip
@settings(max_examples=100)
def test_a_number_is_at_most_half_a_step_from_its_code(
    seed: int, head_dim: int, levels: int, magnitude: float, shift: float
) -> None:
    x_SD = rows(seed, 8, head_dim, magnitude, shift)
    coded = encode(x_SD, levels)
    scale_S1 = coded.scale_X.float()[:, None]
    # The ends of a row move by the rounding of scale and offset: 2^-11 of each, and what is below fp16's smallest step.
    slack = (x_SD.abs().amax(-1, keepdim=True) + levels * scale_S1) * 2**-11 + (levels + 1) * 2**-25
    assert ((x_SD - coded.decode()).abs() <= scale_S1 / 2 + slack).all()


@given(st.integers(0, 1 << 30), HEAD_DIMS)
@settings(max_examples=30)
def test_the_rotation_keeps_products_and_is_its_own_inverse(seed: int, head_dim: int) -> None:
    x_SD, y_SD = rows(seed, 4, head_dim, 1.0, 0.3), rows(seed + 1, 4, head_dim, 2.0, 0.0)
    torch.testing.assert_close(rotate(x_SD) @ rotate(y_SD).T, x_SD @ y_SD.T, atol=1e-3, rtol=1e-5)
    torch.testing.assert_close(rotate(rotate(x_SD)), x_SD, atol=1e-5, rtol=1e-5)


@given(st.integers(0, 1 << 30), HEAD_DIMS, CODES)
@settings(max_examples=40)
def test_permuted_tokens_have_permuted_codes_and_pages_give_them_back(
    seed: int, head_dim: int, encoding: Encoding
) -> None:
    layout = PageLayout(DType.FP32, head_dim, encoding)
    k_SD, v_SD = rows(seed, 64, head_dim, 1.0, 0.0), rows(seed + 1, 64, head_dim, 1.0, 0.0)
    order = torch.randperm(64, generator=torch.Generator().manual_seed(seed))
    tokens = CodedTokens.of(k_SD, v_SD, encoding)
    permuted = unpack(*pack(CodedTokens.of(k_SD[order], v_SD[order], encoding), layout), layout)
    for whole, moved in ((tokens.keys, permuted.keys), (tokens.values, permuted.values)):
        assert torch.equal(whole.codes_XD[order], moved.codes_XD)
        assert torch.equal(whole.scale_X[order], moved.scale_X)
        assert torch.equal(whole.offset_X[order], moved.offset_X)


@given(st.integers(0, 1 << 30), st.sampled_from([torch.nan, torch.inf, -torch.inf, 1e6]), CODES)
@settings(max_examples=30)
def test_what_no_code_can_say_is_nan(seed: int, bad: float, encoding: Encoding) -> None:
    x_SD = rows(seed, 3, 64, 1.0, 0.0)
    x_SD[1, 5] = bad
    tokens = CodedTokens.of(x_SD, x_SD, encoding)
    for decoded in tokens.decode():
        assert decoded[1].isnan().all()
        assert not decoded[::2].isnan().any()
