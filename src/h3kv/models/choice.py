"""Which operators a model runs on: the native core's where it can, else torch's."""

from __future__ import annotations

import torch

from h3kv.attention.choice import has_native
from h3kv.models.kernels import Kernels
from h3kv.models.native_kernels import NativeKernels
from h3kv.models.torch_kernels import TorchKernels


def choose_kernels(device: torch.device, head_dim: int) -> Kernels:
    """Operators for weights on a device; together with the page kernels, so that a model has one arithmetic."""
    return NativeKernels() if has_native(device, head_dim) else TorchKernels()
