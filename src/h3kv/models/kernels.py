"""The operators that a decoder layer is made of, and the records they take.

Shapes: T tokens of a chunk, I/O input and output features, H query heads, K KV heads, D head dim,
E = (H + 2K) * D fused query, key and value features, G gate features, R = D/2 rotated pairs.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from h3kv.models.rope import RotaryRows


@dataclass(frozen=True, slots=True)
class Linear:
    """A matrix multiplication: `x_TI @ weight.T + bias`."""

    weight: Tensor
    """[O, I], row-major contiguous."""
    bias: Tensor | None = None
    """[O]"""


@dataclass(frozen=True, slots=True)
class QkNorms:
    """RMS norms of each query and key head, before rotation."""

    q_D: Tensor
    k_D: Tensor
    eps: float


@dataclass(frozen=True, slots=True)
class HeadGeometry:
    """How the fused projection divides into heads: H queries, then K keys, then K values."""

    heads: int
    kv_heads: int
    head_dim: int

    @property
    def q_features(self) -> int:
        """Features of all query heads."""
        return self.heads * self.head_dim

    @property
    def kv_features(self) -> int:
        """Features of all key heads; as many again are values."""
        return self.kv_heads * self.head_dim


class Kernels(Protocol):
    """Everything a layer computes besides attention. Tensors are in the model's dtype on the model's device.

    Inputs may have any row stride; the last dimension is contiguous. The same holds for results.
    """

    def norm_linear(self, x_TI: Tensor, norm_I: Tensor, eps: float, linear: Linear) -> Tensor:
        """`linear(rms_norm(x) * norm)`, [T, O]. `x_TI` is not modified."""
        ...

    def norm_gate_up(self, x_TI: Tensor, norm_I: Tensor, eps: float, gate_up: Linear) -> Tensor:
        """`silu(gate) * up` of the normalised input, [T, G].

        Rows of `gate_up.weight` [2G, I]: the gate's first, then up's. `x_TI` is not modified.
        """
        ...

    def linear_add(self, x_TI: Tensor, linear: Linear, residual_TO: Tensor) -> Tensor:
        """`residual + linear(x)`, [T, O]. May write into `residual_TO` and return it."""
        ...

    def logits(self, x_TI: Tensor, norm_I: Tensor, eps: float, lm_head: Linear) -> Tensor:
        """`lm_head(rms_norm(x) * norm)`, fp32 [T, V]. `x_TI` is not modified."""
        ...

    def rotate(
        self, qkv_TE: Tensor, rotary: RotaryRows, heads: HeadGeometry, norms: QkNorms | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Queries [T, H, D], keys [T, K, D] and values [T, K, D]; queries and keys normalised and rotated.

        Pair r of a head is (x[r], x[r + R]), the convention of transformers. Results may be views of `qkv_TE`, which
        may be overwritten.
        """
        ...
