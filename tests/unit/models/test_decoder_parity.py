"""Logits against transformers, on tiny random models of every family with every rope type."""

from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path

import pytest
import torch
from torch import Tensor

from h3kv.core.limits import LANE_TOKENS
from h3kv.core.types import DType
from h3kv.models import Decoder, RopeKind, RopeScaling, TorchKernels, load_model
from h3kv.models.decoder import KvCache
from h3kv.models.native_kernels import NativeKernels
from h3kv.models.rope import ntk_theta
from h3kv.node import cache_layout
from h3kv.testing.contiguous_cache import ContiguousCache
from h3kv.testing.resident_cache import ResidentCache
from h3kv.testing.tiny_models import SIZES, write_tiny_model

TOKENS = 100
TOLERANCE = 1e-4

FAMILIES = {
    "llama": {},
    "llama-biased": {"attention_bias": True, "mlp_bias": True},
    "llama-tied": {"tie_word_embeddings": True, "num_key_value_heads": 1},
    "llama-no-head-dim": {"head_dim": None, "num_key_value_heads": 4},
    "mistral": {"sliding_window": None},
    "qwen2": {"tie_word_embeddings": True},
    "qwen3": {"num_key_value_heads": 1},
    "qwen3-biased": {"attention_bias": True},
}
ROPES: dict[str, dict[str, object]] = {
    "default": {"rope_type": "default", "rope_theta": 500.0},
    "linear": {"rope_type": "linear", "rope_theta": 1e4, "factor": 3.0},
    "llama3": {
        "rope_type": "llama3",
        "rope_theta": 1e4,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    },
    "yarn": {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 128},
    "yarn-tuned": {
        "rope_type": "yarn",
        "rope_theta": 1e4,
        "factor": 4.0,
        "original_max_position_embeddings": 128,
        "beta_fast": 16.0,
        "beta_slow": 2.0,
        "truncate": False,
        "mscale": 0.7,
        "mscale_all_dim": 0.3,
    },
}
CHUNKS = {"one": [TOKENS], "ragged": [1, 31, 5, 62, 1], "single tokens": [1] * TOKENS}


@dataclass(frozen=True)
class Case:
    decoder: Decoder
    ids_T: Tensor
    expected_TV: Tensor
    dtype: DType = DType.FP32
    native: bool = False

    def cache(self) -> KvCache:
        """An empty cache that goes with the kernels."""
        if self.native:
            return ResidentCache(cache_layout(self.decoder.config, self.dtype), tokens=TOKENS)
        return ContiguousCache(self.decoder.config.layers)


@pytest.fixture(scope="module", params=list(product(FAMILIES, ROPES)), ids="-".join)
def torch_case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Case:
    family, rope = request.param
    folder = tmp_path_factory.mktemp("model")
    oracle = write_tiny_model(folder, family.split("-")[0], rope_parameters=ROPES[rope], **FAMILIES[family])
    return against(oracle, folder)


@pytest.fixture(params=["torch", "native"])
def case(request: pytest.FixtureRequest, torch_case: Case) -> Case:
    """The plain operators over an oracle cache, then the native ones over pages."""
    if request.param == "torch":
        return torch_case
    if torch_case.decoder.config.head_dim % LANE_TOKENS:
        pytest.skip("a node takes the torch path for head dimensions that are no multiple of 16")
    decoder = Decoder(torch_case.decoder.config, torch_case.decoder.weights, NativeKernels())
    return replace(torch_case, decoder=decoder, native=True)


def against(oracle: torch.nn.Module, folder: Path, rope: RopeScaling | None = None) -> Case:
    ids_T = torch.randint(0, oracle.config.vocab_size, (TOKENS,), generator=torch.Generator().manual_seed(1))
    with torch.inference_mode():
        expected_TV = oracle(ids_T[None]).logits[0]
    model = load_model(folder, dtype=DType.FP32, rope=rope)
    return Case(Decoder(model.config, model.weights, TorchKernels()), ids_T, expected_TV)


def all_logits(case: Case, chunks: list[int]) -> Tensor:
    cache = case.cache()
    return torch.cat([case.decoder.forward(ids, cache, logits="all") for ids in torch.split(case.ids_T, chunks)])


@pytest.mark.parametrize("chunks", CHUNKS.values(), ids=CHUNKS)
def test_logits_equal_those_of_transformers(case: Case, chunks: list[int]) -> None:
    assert case.expected_TV.std() > 1.0, "an oracle without spread would prove nothing"
    difference = (all_logits(case, chunks) - case.expected_TV).abs().max().item()
    assert difference <= TOLERANCE


def test_logits_of_the_last_token_alone_equal_its_row_of_all(case: Case) -> None:
    cache = case.cache()
    head_T, tail_T = case.ids_T[:70], case.ids_T[70:]
    none_0V = case.decoder.forward(head_T, cache, logits="none")
    last_1V = case.decoder.forward(tail_T, cache, logits="last")
    assert none_0V.shape == (0, case.decoder.config.vocabulary_size)
    assert last_1V.shape == (1, case.decoder.config.vocabulary_size)
    assert last_1V.dtype == torch.float32
    assert cache.tokens == TOKENS
    assert (last_1V[0] - case.expected_TV[-1]).abs().max().item() <= TOLERANCE
    if isinstance(cache, ContiguousCache):
        cache.check_integrity()


@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_static_ntk_equals_the_larger_base_in_transformers(tmp_path: Path, family: str) -> None:
    scaling = RopeScaling(kind=RopeKind.NTK, factor=2.5)
    rope = {"rope_type": "default", "rope_theta": ntk_theta(SIZES["head_dim"], 1e4, scaling.factor)}
    oracle = write_tiny_model(tmp_path / "stretched", family, rope_parameters=rope)
    write_tiny_model(tmp_path / "plain", family, rope_parameters={"rope_type": "default", "rope_theta": 1e4})
    case = against(oracle, tmp_path / "plain", scaling)
    assert (all_logits(case, CHUNKS["ragged"]) - case.expected_TV).abs().max().item() <= TOLERANCE
    assert case.decoder.config.max_context == int(2.5 * SIZES["max_position_embeddings"])


def test_yarn_given_at_load_equals_yarn_in_the_config(tmp_path: Path) -> None:
    rope = ROPES["yarn"] | {"original_max_position_embeddings": SIZES["max_position_embeddings"]}
    oracle = write_tiny_model(tmp_path / "stretched", rope_parameters=rope)
    write_tiny_model(tmp_path / "plain", rope_parameters={"rope_type": "default", "rope_theta": 1e4})
    case = against(oracle, tmp_path / "plain", RopeScaling(kind=RopeKind.YARN, factor=4.0))
    assert (all_logits(case, CHUNKS["ragged"]) - case.expected_TV).abs().max().item() <= TOLERANCE


@pytest.mark.parametrize("dtype", [DType.BF16, DType.FP16])
@pytest.mark.parametrize("native", [False, True])
def test_half_precision_stays_near_full_precision(tmp_path: Path, dtype: DType, native: bool) -> None:
    oracle = write_tiny_model(tmp_path, "qwen3")
    case = against(oracle, tmp_path)
    model = load_model(tmp_path, dtype=dtype)
    decoder = Decoder(model.config, model.weights, NativeKernels() if native else TorchKernels())
    half = replace(case, decoder=decoder, dtype=dtype, native=native)
    spread = case.expected_TV.std().item()
    assert (all_logits(half, CHUNKS["ragged"]) - case.expected_TV).abs().mean().item() <= 0.02 * spread
