"""The choice between the native core's operators and torch's."""

from __future__ import annotations

import pytest
import torch

from h3kv.models.choice import choose_kernels
from h3kv.models.native_kernels import NativeKernels
from h3kv.models.torch_kernels import TorchKernels


@pytest.mark.parametrize(
    ("device", "head_dim", "kind"),
    [("cpu", 64, NativeKernels), ("cpu", 24, TorchKernels), ("meta", 64, TorchKernels)],
)
def test_the_native_core_takes_whole_lanes_in_main_memory(device: str, head_dim: int, kind: type[TorchKernels]) -> None:
    assert type(choose_kernels(torch.device(device), head_dim)) is kind
