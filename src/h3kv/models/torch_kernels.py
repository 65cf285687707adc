"""The operators in plain torch: the reference for other kernels, and the path for devices.

Shapes: see `kernels.py`.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from h3kv.models.kernels import HeadGeometry, Linear, QkNorms
from h3kv.models.rope import RotaryRows


class TorchKernels:
    """Implements `Kernels` on any device and dtype. Norms and rotation are computed in fp32."""

    def norm_linear(self, x_TI: Tensor, norm_I: Tensor, eps: float, linear: Linear) -> Tensor:
        """`linear(rms_norm(x) * norm)`."""
        return functional.linear(_rms_norm(x_TI, norm_I, eps), linear.weight, linear.bias)

    def norm_gate_up(self, x_TI: Tensor, norm_I: Tensor, eps: float, gate_up: Linear) -> Tensor:
        """`silu(gate) * up` of the normalised input."""
        gate_TG, up_TG = self.norm_linear(x_TI, norm_I, eps, gate_up).chunk(2, dim=-1)
        return functional.silu(gate_TG).mul_(up_TG)

    def linear_add(self, x_TI: Tensor, linear: Linear, residual_TO: Tensor) -> Tensor:
        """`residual + linear(x)`."""
        sum_TO = torch.addmm(residual_TO, x_TI, linear.weight.t())
        return sum_TO if linear.bias is None else sum_TO.add_(linear.bias)

    def logits(self, x_TI: Tensor, norm_I: Tensor, eps: float, lm_head: Linear) -> Tensor:
        """`lm_head(rms_norm(x) * norm)` in fp32."""
        return self.norm_linear(x_TI, norm_I, eps, lm_head).float()

    def rotate(
        self, qkv_TE: Tensor, rotary: RotaryRows, heads: HeadGeometry, norms: QkNorms | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys and values; queries and keys normalised and rotated. Values are a view of `qkv_TE`."""
        keys_end = heads.heads + heads.kv_heads
        fused_TXD = qkv_TE.view(len(qkv_TE), keys_end + heads.kv_heads, heads.head_dim)
        q_THD, k_TKD, v_TKD = fused_TXD[:, : heads.heads], fused_TXD[:, heads.heads : keys_end], fused_TXD[:, keys_end:]
        if norms is not None:
            q_THD, k_TKD = _rms_norm(q_THD, norms.q_D, norms.eps), _rms_norm(k_TKD, norms.k_D, norms.eps)
        return _rotate(q_THD, rotary), _rotate(k_TKD, rotary), v_TKD


def _rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return functional.rms_norm(x, weight.shape, weight, eps)


def _rotate(x_THD: Tensor, rotary: RotaryRows) -> Tensor:
    cos_T1R, sin_T1R = rotary.cos_TR.unsqueeze(1), rotary.sin_TR.unsqueeze(1)
    left_THR, right_THR = x_THD.float().chunk(2, dim=-1)
    rotated = (left_THR * cos_T1R - right_THR * sin_T1R, right_THR * cos_T1R + left_THR * sin_T1R)
    return torch.cat(rotated, dim=-1).to(x_THD.dtype)
