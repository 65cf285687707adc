import json
import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from h3kv.core.errors import ModelUnsupportedError
from h3kv.core.types import DType
from h3kv.models import Decoder, LoadedModel, RopeKind, RopeScaling, TorchKernels, export, load_model
from h3kv.models.export import export_folder, named_tensors
from h3kv.testing.contiguous_cache import ContiguousCache
from h3kv.testing.tiny_gguf import write_tiny_gguf
from h3kv.testing.tiny_models import write_tiny_model

IDS_T = torch.arange(3, 90)
SCALINGS = {
    "none": None,
    "linear": RopeScaling(kind=RopeKind.LINEAR, factor=2.0),
    "ntk": RopeScaling(kind=RopeKind.NTK, factor=2.0),
    "yarn": RopeScaling(kind=RopeKind.YARN, factor=2.0, original_context=64, beta_fast=20.0, attention_factor=1.1),
    "llama3": RopeScaling(kind=RopeKind.LLAMA3, factor=4.0, original_context=64, high_freq_factor=3.0),
}
FAMILIES = {
    "llama": {"attention_bias": True, "mlp_bias": True},
    "mistral": {"sliding_window": None},
    "qwen2": {"tie_word_embeddings": True},
    "qwen3": {},
}


def logits(model: LoadedModel) -> torch.Tensor:
    decoder = Decoder(model.config, model.weights, TorchKernels())
    return decoder.forward(IDS_T, ContiguousCache(model.config.layers), logits="all")


def transformers_logits(folder: Path) -> torch.Tensor:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
    with torch.inference_mode():
        return model(IDS_T[None]).logits[0]


def all_equal(model: LoadedModel, other: LoadedModel) -> bool:
    pairs = zip(named_tensors(model.config, model.weights), named_tensors(other.config, other.weights), strict=True)
    return all(name == again and torch.equal(tensor, copy) for (name, tensor), (again, copy) in pairs)


@pytest.mark.parametrize("family", FAMILIES)
def test_transformers_gives_the_same_logits_from_the_exported_folder(tmp_path: Path, family: str) -> None:
    write_tiny_model(tmp_path / "source", family, **FAMILIES[family])
    model = load_model(tmp_path / "source", dtype=DType.FP32)
    export_folder(model, tmp_path / "copy", dtype=DType.FP32)
    copy = load_model(tmp_path / "copy", dtype=DType.FP32)
    assert copy.config == model.config
    assert all_equal(copy, model)
    assert (transformers_logits(tmp_path / "copy") - logits(model)).abs().max().item() <= 1e-4


@pytest.mark.parametrize("rope", SCALINGS.values(), ids=SCALINGS)
def test_static_scaling_becomes_a_part_of_the_config(tmp_path: Path, rope: RopeScaling | None) -> None:
    write_tiny_model(tmp_path / "source")
    model = load_model(tmp_path / "source", dtype=DType.FP32, rope=rope)
    export_folder(model, tmp_path / "copy", dtype=DType.FP32)
    copy = load_model(tmp_path / "copy", dtype=DType.FP32)
    assert copy.config.max_context == model.config.max_context
    assert torch.equal(logits(copy), logits(model))
    assert (transformers_logits(tmp_path / "copy") - logits(model)).abs().max().item() <= 1e-4


def test_dequantised_gguf_is_exported_in_bf16_with_its_tokenizer(tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    write_tiny_gguf(tmp_path / "model.gguf", write_tiny_model(tmp_path / "source"))
    model = load_model(tmp_path / "model.gguf", dtype=DType.BF16)
    export_folder(model, tmp_path / "copy")
    copy, theirs = load_model(tmp_path / "copy", dtype=DType.BF16), AutoTokenizer.from_pretrained(tmp_path / "copy")
    messages = [{"role": "user", "content": "the end"}]
    assert all_equal(copy, model)
    assert json.loads((tmp_path / "copy" / "config.json").read_text())["torch_dtype"] == "bfloat16"
    assert copy.tokenizer.eos_ids == model.tokenizer.eos_ids
    assert copy.tokenizer.apply_chat(messages) == model.tokenizer.apply_chat(messages)
    assert theirs.apply_chat_template(
        messages, tokenize=False, add_generation_prompt=True
    ) == copy.tokenizer.apply_chat(messages)


def test_large_models_are_written_in_shards_that_read_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_tiny_model(tmp_path / "source")
    model = load_model(tmp_path / "source")
    monkeypatch.setattr(export, "_SHARD_BYTES", 200_000)
    export_folder(model, tmp_path / "copy")
    sizes = [path.stat().st_size for path in (tmp_path / "copy").glob("*.safetensors")]
    assert len(sizes) == math.ceil(sum(sizes) / 200_000)
    assert all_equal(load_model(tmp_path / "copy"), model)


@pytest.mark.parametrize(
    ("family", "changes", "named"),
    [
        ("llama", {"output_bias": True}, "has a bias of attention's output"),
        ("llama", {"qkv_bias": True}, "lacks a bias of attention's output"),
        ("llama", {"qk_norm": True}, "has query and key norms"),
        ("mistral", {"qkv_bias": True, "output_bias": True}, "has query, key and value biases and has a bias of"),
        ("mistral", {"mlp_bias": True}, "has MLP biases"),
        ("qwen2", {"qkv_bias": False}, "lacks query, key and value biases"),
        ("qwen2", {"output_bias": True}, "has a bias of attention's output"),
        ("qwen3", {"mlp_bias": True}, "has MLP biases"),
        ("qwen3", {"qk_norm": False}, "lacks query and key norms"),
    ],
)
def test_combinations_that_no_family_has_are_refused_by_name(
    tmp_path: Path, family: str, changes: dict[str, bool], named: str
) -> None:
    write_tiny_model(tmp_path / "source", family, **({"sliding_window": None} if family == "mistral" else {}))
    model = load_model(tmp_path / "source")
    with pytest.raises(ModelUnsupportedError, match=f"{named}.* cannot be exported"):
        export_folder(replace(model, config=replace(model.config, **changes)), tmp_path / "copy")
    assert not (tmp_path / "copy").exists()
