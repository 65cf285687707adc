"""The native operators against plain torch in fp32, on every instruction set that this machine has."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from h3kv import _native
from h3kv.core.errors import ShapeError
from h3kv.models.kernels import HeadGeometry, Linear, QkNorms
from h3kv.models.native_kernels import NativeKernels
from h3kv.models.rope import RotaryRows
from h3kv.models.torch_kernels import TorchKernels

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
# Inputs are rounded to the type before the product and the result once: two to four units in the last place.
RELATIVE = {torch.float32: 2e-6, torch.bfloat16: 2e-2, torch.float16: 3e-3}


def wide(linear: Linear) -> Linear:
    return Linear(linear.weight.float(), None if linear.bias is None else linear.bias.float())


def close(actual: Tensor, expected: Tensor, dtype: torch.dtype) -> None:
    scale = expected.abs().max().item()
    torch.testing.assert_close(actual.float(), expected, atol=RELATIVE[dtype] * scale, rtol=0)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("tokens", [1, 2, 3, 5, 8])
@pytest.mark.parametrize("bias", [False, True])
def test_products_equal_torch(isa: str, dtype: torch.dtype, tokens: int, bias: bool) -> None:
    torch.manual_seed(5)
    native, plain = NativeKernels(), TorchKernels()
    x_TI, norm_I = torch.randn(tokens, 96).to(dtype), torch.rand(96).to(dtype)
    linear = Linear(torch.randn(70, 96).to(dtype), torch.randn(70).to(dtype) if bias else None)
    expected = plain.norm_linear(x_TI.float(), norm_I.float(), 1e-5, wide(linear))
    close(native.norm_linear(x_TI, norm_I, 1e-5, linear), expected, dtype)
    logits_TV = native.logits(x_TI, norm_I, 1e-5, linear)
    assert logits_TV.dtype is torch.float32
    close(logits_TV, expected, dtype)
    gate_up = plain.norm_gate_up(x_TI.float(), norm_I.float(), 1e-5, wide(linear))
    close(native.norm_gate_up(x_TI, norm_I, 1e-5, linear), gate_up, dtype)
    residual_TO = torch.randn(tokens, 70).to(dtype)
    summed = plain.linear_add(x_TI.float(), wide(linear), residual_TO.float())
    close(native.linear_add(x_TI, linear, residual_TO), summed, dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("tokens", [8, 9, 21, _native.LINEAR_ROWS_MAX])
def test_a_token_does_not_feel_its_neighbours(isa: str, dtype: torch.dtype, tokens: int) -> None:
    native = NativeKernels()
    x_TI, norm_I = torch.randn(tokens, 160).to(dtype), torch.rand(160).to(dtype)
    linear, down = Linear(torch.randn(34, 160).to(dtype)), Linear(torch.randn(160, 160).to(dtype))
    rows = x_TI.split(1)
    kernels: list[Callable[[torch.Tensor], torch.Tensor]] = [
        lambda x: native.norm_linear(x, norm_I, 1e-5, linear),
        lambda x: native.norm_gate_up(x, norm_I, 1e-5, linear),
        lambda x: native.logits(x, norm_I, 1e-5, linear),
        lambda x: native.linear_add(x, down, x.clone()),
    ]
    for kernel in kernels:
        assert torch.equal(kernel(x_TI), torch.cat([kernel(row) for row in rows]))


@pytest.mark.parametrize("features", [40, 96])
def test_what_the_core_does_not_take_falls_to_torch(features: int) -> None:
    native, plain = NativeKernels(), TorchKernels()
    x_TI, norm_I, linear = torch.randn(40, features), torch.rand(features), Linear(torch.randn(8, features))
    assert torch.equal(native.norm_linear(x_TI, norm_I, 1e-5, linear), plain.norm_linear(x_TI, norm_I, 1e-5, linear))
    strided = torch.randn(features, 2).t()
    close(
        native.norm_linear(strided, norm_I, 1e-5, linear), plain.norm_linear(strided, norm_I, 1e-5, linear), x_TI.dtype
    )


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("tokens", [1, 50])
@pytest.mark.parametrize("normalised", [False, True])
def test_rotation_equals_torch(isa: str, dtype: torch.dtype, tokens: int, normalised: bool) -> None:
    torch.manual_seed(9)
    heads = HeadGeometry(6, 2, 64)
    qkv_TE = torch.randn(tokens, 10 * 64).to(dtype)
    angles_TR = torch.rand(tokens, 32) * 6
    rotary = RotaryRows(angles_TR.cos(), angles_TR.sin())
    norms = QkNorms(torch.rand(64).to(dtype), torch.rand(64).to(dtype), 1e-6) if normalised else None
    wide_norms = None if norms is None else QkNorms(norms.q_D.float(), norms.k_D.float(), norms.eps)
    expected = TorchKernels().rotate(qkv_TE.float(), rotary, heads, wide_norms)
    for actual, wanted in zip(NativeKernels().rotate(qkv_TE, rotary, heads, norms), expected, strict=True):
        assert actual.is_contiguous()
        close(actual, wanted, dtype)


def test_results_do_not_depend_on_the_number_of_threads() -> None:
    native = NativeKernels()
    x_TI, norm_I, linear = torch.randn(3, 64), torch.rand(64), Linear(torch.randn(130, 64))
    threads = torch.get_num_threads()
    results = []
    try:
        for count in (1, 2, 3):
            torch.set_num_threads(count)
            results.append(native.norm_linear(x_TI, norm_I, 1e-5, linear))
    finally:
        torch.set_num_threads(threads)
    assert all(torch.equal(result, results[0]) for result in results)


def test_operands_that_disagree_are_refused() -> None:
    native = NativeKernels()
    x_TI, norm_I = torch.randn(2, 64), torch.rand(64)
    with pytest.raises(ShapeError, match="contiguous"):
        native.norm_linear(x_TI, norm_I, 1e-5, Linear(torch.randn(8, 64).bfloat16()))
    with pytest.raises(ShapeError, match="does not give"):
        native.norm_linear(x_TI, norm_I, 1e-5, Linear(torch.randn(8, 96)))
    with pytest.raises(ShapeError, match="bias"):
        native.norm_linear(x_TI, norm_I, 1e-5, Linear(torch.randn(8, 64), torch.randn(7)))
    rotary = RotaryRows(torch.ones(1, 32), torch.ones(1, 32))
    with pytest.raises(ShapeError, match="angles"):
        native.rotate(torch.randn(2, 256), rotary, HeadGeometry(2, 1, 64), None)
