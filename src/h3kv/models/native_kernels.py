"""The operators on the native core: decode reads every weight once, at memory speed.

Chunks of more than `_native.LINEAR_ROWS_MAX` tokens are bound by arithmetic, so their products are torch's; rotation is
native for any length. Shapes: see `kernels.py`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from h3kv import _native
from h3kv.attention.native import CODES
from h3kv.core.errors import ShapeError
from h3kv.core.limits import HEAD_DIM_MAX, LANE_TOKENS
from h3kv.models.kernels import HeadGeometry, Linear, QkNorms
from h3kv.models.rope import RotaryRows
from h3kv.models.torch_kernels import TorchKernels

_FEATURES_MULTIPLE = 32
"""Input features come in whole vectors of bf16 pairs."""


class NativeKernels(TorchKernels):
    """Implements `Kernels` for models in CPU memory. Sums are fp32; a row's result does not depend on its neighbours.

    Products accumulate in fp32 and are rounded once, after bias, gate and residual. What the core does not take (odd
    feature counts, strided inputs) falls to `TorchKernels`.
    """

    def norm_linear(self, x_TI: Tensor, norm_I: Tensor, eps: float, linear: Linear) -> Tensor:
        """`linear(rms_norm(x) * norm)`."""
        if not _takes(x_TI):
            return super().norm_linear(x_TI, norm_I, eps, linear)
        out_TO = x_TI.new_empty((len(x_TI), len(linear.weight)))
        _product(x_TI, linear, out_TO, norm_I=norm_I, eps=eps)
        return out_TO

    def norm_gate_up(self, x_TI: Tensor, norm_I: Tensor, eps: float, gate_up: Linear) -> Tensor:
        """`silu(gate) * up` of the normalised input."""
        if not _takes(x_TI):
            return super().norm_gate_up(x_TI, norm_I, eps, gate_up)
        out_TG = x_TI.new_empty((len(x_TI), len(gate_up.weight) // 2))
        _product(x_TI, gate_up, out_TG, norm_I=norm_I, eps=eps, gated=True)
        return out_TG

    def linear_add(self, x_TI: Tensor, linear: Linear, residual_TO: Tensor) -> Tensor:
        """`residual + linear(x)`, written into the residual for short chunks."""
        if not _takes(x_TI) or not residual_TO.is_contiguous():
            return super().linear_add(x_TI, linear, residual_TO)
        _product(x_TI, linear, residual_TO, residual_TO=residual_TO)
        return residual_TO

    def logits(self, x_TI: Tensor, norm_I: Tensor, eps: float, lm_head: Linear) -> Tensor:
        """`lm_head(rms_norm(x) * norm)` in fp32, without a rounding to the model's type in between."""
        if not _takes(x_TI):
            return super().logits(x_TI, norm_I, eps, lm_head)
        out_TV = x_TI.new_empty((len(x_TI), len(lm_head.weight)), dtype=torch.float32)
        _product(x_TI, lm_head, out_TV, norm_I=norm_I, eps=eps)
        return out_TV

    def rotate(
        self, qkv_TE: Tensor, rotary: RotaryRows, heads: HeadGeometry, norms: QkNorms | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys and values as new contiguous tensors; queries and keys normalised and rotated."""
        head_dim = heads.head_dim
        if head_dim % LANE_TOKENS != 0 or head_dim > HEAD_DIM_MAX or not qkv_TE.is_contiguous():
            return super().rotate(qkv_TE, rotary, heads, norms)
        tokens = len(qkv_TE)
        features = heads.q_features + 2 * heads.kv_features
        if qkv_TE.shape[1] != features or rotary.cos_TR.shape != (tokens, head_dim // 2):
            raise ShapeError(f"{tuple(qkv_TE.shape)} features and {tuple(rotary.cos_TR.shape)} angles for {heads}")
        q_THD = qkv_TE.new_empty((tokens, heads.heads, head_dim))
        k_TKD = qkv_TE.new_empty((tokens, heads.kv_heads, head_dim))
        v_TKD = torch.empty_like(k_TKD)
        _native.rotate(
            qkv_TE.data_ptr(),
            q_THD.data_ptr(),
            k_TKD.data_ptr(),
            v_TKD.data_ptr(),
            rotary.cos_TR.data_ptr(),
            rotary.sin_TR.data_ptr(),
            _address(norms.q_D if norms else None),
            _address(norms.k_D if norms else None),
            tokens,
            heads.heads,
            heads.kv_heads,
            head_dim,
            norms.eps if norms else 0.0,
            CODES[qkv_TE.dtype],
            torch.get_num_threads(),
        )
        return q_THD, k_TKD, v_TKD


def _takes(x_TI: Tensor) -> bool:
    tokens, features = x_TI.shape
    return tokens <= _native.LINEAR_ROWS_MAX and features % _FEATURES_MULTIPLE == 0 and x_TI.is_contiguous()


def _address(tensor: Tensor | None) -> int:
    return 0 if tensor is None else tensor.data_ptr()


def _product(
    x_TI: Tensor,
    linear: Linear,
    out_TO: Tensor,
    *,
    norm_I: Tensor | None = None,
    eps: float = 0.0,
    residual_TO: Tensor | None = None,
    gated: bool = False,
) -> None:
    """Fill `out_TO` with the gate, the residual and the bias applied; see `native/include/h3/linear.hpp`.

    Raises:
        ShapeError: the weight or another operand disagrees with the input in type or size.
    """
    weight, features = linear.weight, x_TI.shape[1]
    given = [operand for operand in (weight, norm_I, linear.bias, residual_TO) if operand is not None]
    if any(operand.dtype != x_TI.dtype or not operand.is_contiguous() for operand in given):
        raise ShapeError(f"weight, norm, bias and residual must be contiguous and {x_TI.dtype}, like the input")
    rows = out_TO.shape[1] * (2 if gated else 1)
    if weight.shape != (rows, features) or (norm_I is not None and norm_I.shape[0] != features):
        raise ShapeError(f"{tuple(x_TI.shape)} times {tuple(weight.shape)} does not give {tuple(out_TO.shape)}")
    if linear.bias is not None and linear.bias.shape[0] != rows:
        raise ShapeError(f"a bias of {linear.bias.shape[0]} for {rows} rows")
    _native.linear(
        x_TI.data_ptr(),
        _address(norm_I),
        linear.weight.data_ptr(),
        _address(linear.bias),
        _address(residual_TO),
        out_TO.data_ptr(),
        len(x_TI),
        x_TI.shape[1],
        out_TO.shape[1],
        eps,
        CODES[x_TI.dtype],
        gated,
        out_TO.dtype is torch.float32 and x_TI.dtype is not torch.float32,
        torch.get_num_threads(),
    )
