"""Memory that runs out while weights are read, not before."""

import math
import subprocess
import sys
from collections.abc import Callable, Iterable
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from h3kv.core.errors import HostMemoryError
from h3kv.core.types import DType
from h3kv.models.config import Family, ModelConfig
from h3kv.models.rope import RopeScaling
from h3kv.models.weights import expected_shapes, load_weights
from h3kv.testing.tiny_models import write_tiny_model

CONFIG = ModelConfig(
    family=Family.LLAMA,
    vocabulary_size=64,
    hidden_size=16,
    intermediate_size=32,
    layers=2,
    heads=2,
    kv_heads=1,
    head_dim=8,
    norm_eps=1e-5,
    rope_theta=10_000.0,
    rope=RopeScaling(original_context=64),
    max_context=64,
    tied_embeddings=True,
    qkv_bias=False,
    output_bias=False,
    mlp_bias=False,
    qk_norm=False,
)
BEYOND_ALL_MEMORY = 1 << 55
"""Bytes. No machine maps so many, so that asking for them fails at once."""


class GreedySource:
    """Zeros, until one tensor asks for more memory than there is."""

    path = "greedy"

    def __init__(self, greedy_name: str, ask: Callable[[], object]) -> None:
        self._shapes = expected_shapes(CONFIG)
        self._greedy_name, self._ask = greedy_name, ask
        self.names_read: list[str] = []

    def names(self) -> Iterable[str]:
        return self._shapes.keys()

    def shape(self, name: str) -> tuple[int, ...]:
        return self._shapes[name]

    def read(self, name: str) -> Tensor:
        self.names_read.append(name)
        if name == self._greedy_name:
            self._ask()
        return torch.zeros(self._shapes[name])


def ask_torch() -> object:
    return torch.empty(BEYOND_ALL_MEMORY, dtype=torch.uint8)


def ask_numpy() -> object:
    return np.empty(BEYOND_ALL_MEMORY, dtype=np.uint8)


def ask_python() -> object:
    return bytearray(BEYOND_ALL_MEMORY)


@pytest.mark.parametrize("ask", [ask_torch, ask_numpy, ask_python])
def test_memory_that_runs_out_in_the_middle_names_the_model_and_the_cure(ask: Callable[[], object]) -> None:
    source = GreedySource("model.layers.1.mlp.up_proj.weight", ask)
    with pytest.raises(
        HostMemoryError, match=r"out of memory in loading greedy in bf16.*choose a smaller model"
    ) as caught:
        load_weights(CONFIG, source, dtype=DType.BF16, device=torch.device("cpu"))
    assert source.names_read[-1] == "model.layers.1.mlp.up_proj.weight"
    assert caught.value.needed_bytes == 2 * sum(math.prod(shape) for shape in expected_shapes(CONFIG).values())


LOAD_UNDER_A_LIMIT = """
import resource, sys
import torch
from h3kv.core.errors import HostMemoryError
from h3kv.models import load_model

torch.set_num_threads(1)
with open("/proc/self/statm") as pages:
    mapped_bytes = int(pages.read().split()[0]) * resource.getpagesize()
limit_bytes = mapped_bytes + 16 * 2**20
resource.setrlimit(resource.RLIMIT_AS, (limit_bytes, limit_bytes))
try:
    load_model(sys.argv[1], available_bytes=1 << 40)
except HostMemoryError as error:
    print(error)
"""


@pytest.mark.skipif(not Path("/proc/self/statm").is_file(), reason="the limit is set above what /proc says is mapped")
def test_limit_of_the_process_that_weights_do_not_fit_ends_with_the_cure(tmp_path: Path) -> None:
    write_tiny_model(tmp_path, hidden_size=128, vocab_size=32_768)
    ended = subprocess.run(
        [sys.executable, "-c", LOAD_UNDER_A_LIMIT, str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert "free memory" in ended.stdout, ended.stderr
