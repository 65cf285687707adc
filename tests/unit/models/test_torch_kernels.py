"""Each operator against its formula, written out."""

import pytest
import torch
from torch import Tensor

from h3kv.models.kernels import HeadGeometry, Linear, QkNorms
from h3kv.models.rope import RopeScaling, Rotary
from h3kv.models.torch_kernels import TorchKernels

KERNELS = TorchKernels()
EPS = 1e-5


def tensor(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def normalised(x: Tensor, weight: Tensor) -> Tensor:
    return x / (x.square().mean(-1, keepdim=True) + EPS).sqrt() * weight


@pytest.mark.parametrize("bias", [None, tensor(7, seed=3)])
def test_norm_linear_is_a_projection_of_the_normalised_input(bias: Tensor | None) -> None:
    x_TI, norm_I, weight_OI = tensor(5, 12), tensor(12, seed=1), tensor(7, 12, seed=2)
    expected_TO = normalised(x_TI, norm_I) @ weight_OI.T + (0 if bias is None else bias)
    torch.testing.assert_close(KERNELS.norm_linear(x_TI, norm_I, EPS, Linear(weight_OI, bias)), expected_TO)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_logits_are_fp32_whatever_the_type_of_the_model(dtype: torch.dtype) -> None:
    x_TI, norm_I, weight_OI = (tensor(*shape).to(dtype) for shape in ((5, 12), (12,), (7, 12)))
    logits_TO = KERNELS.logits(x_TI, norm_I, EPS, Linear(weight_OI))
    expected_TO = normalised(x_TI.float(), norm_I.float()) @ weight_OI.float().T
    assert logits_TO.dtype == torch.float32
    assert (logits_TO - expected_TO).abs().max() <= 0.02 * expected_TO.abs().max()


def test_norm_gate_up_takes_the_gate_from_the_first_rows() -> None:
    x_TI, norm_I = tensor(5, 12), tensor(12, seed=1)
    gate_up = Linear(tensor(8, 12, seed=2), tensor(8, seed=3))
    fused_TG = normalised(x_TI, norm_I) @ gate_up.weight.T + gate_up.bias
    gate_TG, up_TG = fused_TG[:, :4], fused_TG[:, 4:]
    torch.testing.assert_close(KERNELS.norm_gate_up(x_TI, norm_I, EPS, gate_up), gate_TG * gate_TG.sigmoid() * up_TG)


@pytest.mark.parametrize("bias", [None, tensor(7, seed=3)])
def test_linear_add_adds_to_the_residual(bias: Tensor | None) -> None:
    x_TI, weight_OI, residual_TO = tensor(5, 12), tensor(7, 12, seed=2), tensor(5, 7, seed=4)
    expected_TO = residual_TO + x_TI @ weight_OI.T + (0 if bias is None else bias)
    torch.testing.assert_close(KERNELS.linear_add(x_TI, Linear(weight_OI, bias), residual_TO), expected_TO)


@pytest.mark.parametrize("has_norms", [False, True])
def test_rotate_turns_pairs_of_each_query_and_key_head(has_norms: bool) -> None:
    heads = HeadGeometry(heads=4, kv_heads=2, head_dim=6)
    norms = QkNorms(tensor(6, seed=1), tensor(6, seed=2), EPS) if has_norms else None
    rows = Rotary(head_dim=6, theta=50.0, scaling=RopeScaling(), device=torch.device("cpu")).rows(9, 3)
    qkv_TE = tensor(3, 48)
    q_THD, k_TKD, v_TKD = KERNELS.rotate(qkv_TE, rows, heads, norms)
    assert torch.equal(v_TKD, qkv_TE[:, 36:].view(3, 2, 6))
    for got, source, weight in (
        (q_THD, qkv_TE[:, :24], norms and norms.q_D),
        (k_TKD, qkv_TE[:, 24:36], norms and norms.k_D),
    ):
        plain = source.view(3, -1, 6)
        plain = plain if weight is None else normalised(plain, weight)
        pairs = torch.complex(plain[..., :3], plain[..., 3:])
        turned = pairs * torch.complex(rows.cos_TR, rows.sin_TR).unsqueeze(1)
        torch.testing.assert_close(got, torch.cat((turned.real, turned.imag), dim=-1))


def test_rotate_accepts_rows_of_a_wider_matrix() -> None:
    heads = HeadGeometry(heads=2, kv_heads=1, head_dim=4)
    rows = Rotary(head_dim=4, theta=50.0, scaling=RopeScaling(), device=torch.device("cpu")).rows(0, 3)
    wide = tensor(3, 40)
    for got, expected in zip(
        KERNELS.rotate(wide[:, :16], rows, heads, None),
        KERNELS.rotate(wide[:, :16].contiguous(), rows, heads, None),
        strict=True,
    ):
        assert torch.equal(got, expected)
