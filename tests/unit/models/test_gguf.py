from pathlib import Path

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType, GGUFReader

from h3kv.core.errors import ModelCorruptError, ModelUnsupportedError
from h3kv.core.types import DType
from h3kv.models import Decoder, RopeKind, TorchKernels, load_model
from h3kv.models.config import Family
from h3kv.models.gguf_file import GgufFile
from h3kv.models.gguf_loader import config_from_gguf
from h3kv.models.rope import RopeScaling, inverse_frequencies
from h3kv.testing.contiguous_cache import ContiguousCache
from h3kv.testing.tiny_gguf import write_tiny_gguf
from h3kv.testing.tiny_models import write_tiny_model

IDS_T = torch.arange(3, 90)
TYPE_FIELD = 4
"""Part of a tensor's entry in which the reader keeps its type."""


def logits(path: Path) -> torch.Tensor:
    model = load_model(path, dtype=DType.FP32)
    decoder = Decoder(model.config, model.weights, TorchKernels())
    return decoder.forward(IDS_T, ContiguousCache(model.config.layers), logits="all")


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> torch.nn.Module:
    return write_tiny_model(tmp_path_factory.mktemp("llama"))


@pytest.mark.parametrize(
    ("family", "settings"),
    [
        ("llama", {"attention_bias": True}),
        ("mistral", {"sliding_window": None, "tie_word_embeddings": True}),
        ("qwen2", {}),
        ("qwen3", {"tie_word_embeddings": True}),
    ],
)
def test_logits_equal_those_of_transformers(tmp_path: Path, family: str, settings: dict[str, object]) -> None:
    oracle = write_tiny_model(tmp_path / "folder", family, **settings)
    write_tiny_gguf(tmp_path / "model.gguf", oracle)
    with torch.inference_mode():
        expected_TV = oracle(IDS_T[None]).logits[0]
    assert (logits(tmp_path / "model.gguf") - expected_TV).abs().max().item() <= 1e-4


@pytest.mark.parametrize("kind", ["BF16", "F16", "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1"])
def test_quantised_matrices_are_decoded(tmp_path: Path, llama: torch.nn.Module, kind: str) -> None:
    write_tiny_gguf(tmp_path / "model.gguf", llama, matrices=GGMLQuantizationType[kind])
    model = load_model(tmp_path / "model.gguf", dtype=DType.FP32)
    error = model.weights.layers[1].down.weight - llama.model.layers[1].mlp.down_proj.weight
    assert 0 < error.abs().max().item() < 0.1


def test_yarn_and_linear_scaling_are_read(tmp_path: Path, llama: torch.nn.Module) -> None:
    for name in ("yarn", "linear"):
        metadata = {
            ".rope.scaling.type": name,
            ".rope.scaling.factor": 4.0,
            ".rope.scaling.original_context_length": 128,
        }
        write_tiny_gguf(tmp_path / f"{name}.gguf", llama, metadata=metadata)
        config = config_from_gguf(GgufFile(tmp_path / f"{name}.gguf"))
        assert config.rope == RopeScaling(kind=RopeKind(name), factor=4.0, original_context=128)


@pytest.mark.parametrize("factor", [8.0, 32.0])
def test_llama3_scaling_is_recognised_by_its_stored_divisors(
    tmp_path: Path, llama: torch.nn.Module, factor: float
) -> None:
    scaling = RopeScaling(kind=RopeKind.LLAMA3, factor=factor, original_context=8192)
    plain_R, _ = inverse_frequencies(64, 10_000.0, RopeScaling())
    scaled_R, _ = inverse_frequencies(64, 10_000.0, scaling)
    write_tiny_gguf(tmp_path / "m.gguf", llama, extra_tensors={"rope_freqs.weight": (plain_R / scaled_R).numpy()})
    assert load_model(tmp_path / "m.gguf").config.rope == scaling


def test_mistral_carries_the_name_of_llama(tmp_path: Path) -> None:
    write_tiny_gguf(tmp_path / "m.gguf", write_tiny_model(tmp_path / "m", "mistral", sliding_window=None))
    assert config_from_gguf(GgufFile(tmp_path / "m.gguf")).family is Family.LLAMA


@pytest.mark.parametrize("kept", [0, 3, 100, 5_000, 100_000, -64], ids=lambda kept: f"{kept} bytes")
def test_truncated_files_are_refused(tmp_path: Path, llama: torch.nn.Module, kept: int) -> None:
    path = tmp_path / "model.gguf"
    write_tiny_gguf(path, llama)
    path.write_bytes(path.read_bytes()[:kept])
    with pytest.raises(ModelCorruptError, match="fetch it again") as caught:
        load_model(path)
    assert caught.value.path == str(path)


def test_other_files_are_not_taken_for_gguf(tmp_path: Path) -> None:
    (tmp_path / "model.gguf").write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n")
    with pytest.raises(ModelCorruptError, match="fetch it again"):
        load_model(tmp_path / "model.gguf")


def test_numbers_of_unknown_quantisation_types_are_refused_by_name(tmp_path: Path, llama: torch.nn.Module) -> None:
    write_tiny_gguf(tmp_path / "model.gguf", llama)
    patch_type(tmp_path / "model.gguf", 99)
    with pytest.raises(ModelUnsupportedError, match=r"type number 99 .* such as Q8_0"):
        load_model(tmp_path / "model.gguf")


def test_types_without_a_decoder_are_refused_by_name(tmp_path: Path, llama: torch.nn.Module) -> None:
    write_tiny_gguf(tmp_path / "model.gguf", llama)
    patch_type(tmp_path / "model.gguf", GGMLQuantizationType.I32)
    with pytest.raises(ModelUnsupportedError, match=r"type I32 .* such as Q8_0"):
        load_model(tmp_path / "model.gguf")


def patch_type(path: Path, number: int) -> None:
    reader = GGUFReader(path, "r+")
    reader.tensors[5].field.parts[TYPE_FIELD][0] = number
    reader.data.flush()


@pytest.mark.parametrize(
    ("metadata", "feature"),
    [
        ({"general.architecture": "gemma2"}, "architecture 'gemma2'"),
        ({".expert_count": 8}, "mixture of experts"),
        ({".attention.sliding_window": 4096}, "sliding-window"),
        ({".attention.head_count_kv": [2, 2, 1]}, "differs between layers"),
        ({".attention.value_length": 32}, "value_length"),
        ({".rope.dimension_count": 32}, "partial rotary"),
        ({".rope.scaling.type": "longrope"}, "longrope"),
        ({".rope.scaling.type": "yarn", ".rope.scaling.attn_factor": 0.5}, "attn_factor"),
        ({"tokenizer.ggml.model": "bert"}, "tokenizer 'bert'"),
        ({"tokenizer.ggml.pre": "tekken"}, "pre-tokenizer 'tekken'"),
        ({"split.count": 3}, "merge them"),
    ],
)
def test_unsupported_features_are_refused_by_name(
    tmp_path: Path, llama: torch.nn.Module, metadata: dict[str, object], feature: str
) -> None:
    write_tiny_gguf(tmp_path / "model.gguf", llama, metadata=metadata)
    with pytest.raises(ModelUnsupportedError, match=feature):
        load_model(tmp_path / "model.gguf")


def test_unknown_rope_divisors_are_refused(tmp_path: Path, llama: torch.nn.Module) -> None:
    divisors_R = np.linspace(1.0, 5.0, 32, dtype=np.float32)
    write_tiny_gguf(tmp_path / "model.gguf", llama, extra_tensors={"rope_freqs.weight": divisors_R})
    with pytest.raises(ModelUnsupportedError, match=r"rope_freqs\.weight"):
        load_model(tmp_path / "model.gguf")


@pytest.mark.parametrize(
    ("metadata", "problem"),
    [
        ({".embedding_length": 100}, "contradict each other"),
        ({".block_count": 2}, "holds unexpected tensors"),
        ({".block_count": 4}, "lacks tensors"),
        ({".vocab_size": 300}, "contradict each other"),
        ({".attention.head_count": 3}, "do not divide"),
        ({"tokenizer.ggml.token_type": [1, 1]}, "token_type"),
        ({"tokenizer.ggml.merges": ["no pair of tokens"]}, "merges"),
    ],
)
def test_contradictory_metadata_is_refused(
    tmp_path: Path, llama: torch.nn.Module, metadata: dict[str, object], problem: str
) -> None:
    write_tiny_gguf(tmp_path / "model.gguf", llama, metadata=metadata)
    with pytest.raises(ModelCorruptError, match=problem) as caught:
        load_model(tmp_path / "model.gguf")
    assert "again" in str(caught.value)
