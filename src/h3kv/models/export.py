"""Writes a loaded model as a Hugging Face folder that transformers and vLLM read."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Sequence
from pathlib import Path

from safetensors.torch import save_file
from torch import Tensor

from h3kv.attention.native import TORCH_DTYPES
from h3kv.core.errors import ModelUnsupportedError
from h3kv.core.types import DType
from h3kv.models.config import Family, ModelConfig
from h3kv.models.kernels import Linear
from h3kv.models.loader import LoadedModel
from h3kv.models.rope import RopeKind, ntk_theta
from h3kv.models.tokenizer import Tokenizer
from h3kv.models.weights import LayerWeights, Weights, layer_prefix

_ARCHITECTURES = {
    Family.LLAMA: "LlamaForCausalLM",
    Family.MISTRAL: "MistralForCausalLM",
    Family.QWEN2: "Qwen2ForCausalLM",
    Family.QWEN3: "Qwen3ForCausalLM",
}

_CHOOSE_ATTENTION_BIAS = (Family.LLAMA, Family.QWEN3)
"""Families whose config.json says whether attention's four projections have biases."""

_SHARD_BYTES = 2 << 30
"""Weights of one file, and so what the export takes in memory beside the model."""


def export_folder(model: LoadedModel, folder: Path, *, dtype: DType = DType.BF16) -> None:
    """Write config.json, *.safetensors in `dtype`, and the tokenizer's files.

    The static rope scaling becomes a part of the config; NTK as the larger base that it amounts to. The config is
    written last, so that an interrupted export is not taken for a model.

    Args:
        model: not modified.
        folder: made if it is not there; files of these names are overwritten.
        dtype: of the weights in the files.

    Raises:
        ModelUnsupportedError: the model has a combination of biases and norms that no Hugging Face family has.
    """
    settings = hf_settings(model.config, dtype)
    _check_expressible(model)
    folder.mkdir(parents=True, exist_ok=True)
    _write_weights(dict(named_tensors(model.config, model.weights)), folder, dtype)
    _write_tokenizer(model.tokenizer, folder, max_context=model.config.max_context)
    _write_json(folder / "config.json", settings | {"eos_token_id": sorted(model.tokenizer.eos_ids)})


def hf_settings(config: ModelConfig, dtype: DType) -> dict[str, object]:
    """The content of config.json, in the spelling that transformers 4 and 5 both read."""
    theta = config.rope_theta
    if config.rope.kind is RopeKind.NTK:
        theta = ntk_theta(config.head_dim, theta, config.rope.factor)
    settings = {
        "architectures": [_ARCHITECTURES[config.family]],
        "model_type": str(config.family),
        "vocab_size": config.vocabulary_size,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.layers,
        "num_attention_heads": config.heads,
        "num_key_value_heads": config.kv_heads,
        "head_dim": config.head_dim,
        "hidden_act": "silu",
        "rms_norm_eps": config.norm_eps,
        "rope_theta": theta,
        "rope_scaling": _rope_scaling(config),
        "max_position_embeddings": config.max_context,
        "tie_word_embeddings": config.tied_embeddings,
        "torch_dtype": str(TORCH_DTYPES[dtype]).removeprefix("torch."),
    }
    if config.family in _CHOOSE_ATTENTION_BIAS:
        settings["attention_bias"] = config.qkv_bias
    if config.family is Family.LLAMA:
        settings["mlp_bias"] = config.mlp_bias
    if config.family is Family.MISTRAL:
        settings["sliding_window"] = None  # Absent would mean 4096.
    return settings


def named_tensors(config: ModelConfig, weights: Weights) -> Iterator[tuple[str, Tensor]]:
    """Every tensor of a checkpoint, as views of the fused weights."""
    yield "model.embed_tokens.weight", weights.embedding_VI
    for index, layer in enumerate(weights.layers):
        for name, tensor in _layer_tensors(config, layer):
            yield layer_prefix(index) + name, tensor
    yield "model.norm.weight", weights.final_norm_I
    if not config.tied_embeddings:
        yield "lm_head.weight", weights.lm_head.weight


def _layer_tensors(config: ModelConfig, layer: LayerWeights) -> Iterator[tuple[str, Tensor]]:
    heads = config.head_geometry
    qkv_names = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
    yield "input_layernorm.weight", layer.attention_norm_I
    yield from _split(layer.qkv, qkv_names, (heads.q_features, heads.kv_features, heads.kv_features))
    if layer.qk_norms is not None:
        yield "self_attn.q_norm.weight", layer.qk_norms.q_D
        yield "self_attn.k_norm.weight", layer.qk_norms.k_D
    yield from _split(layer.output, ("self_attn.o_proj",), (config.hidden_size,))
    yield "post_attention_layernorm.weight", layer.mlp_norm_I
    yield from _split(layer.gate_up, ("mlp.gate_proj", "mlp.up_proj"), (config.intermediate_size,) * 2)
    yield from _split(layer.down, ("mlp.down_proj",), (config.hidden_size,))


def _split(fused: Linear, names: Sequence[str], rows: Sequence[int]) -> Iterator[tuple[str, Tensor]]:
    start = 0
    for name, count in zip(names, rows, strict=True):
        yield f"{name}.weight", fused.weight[start : start + count]
        if fused.bias is not None:
            yield f"{name}.bias", fused.bias[start : start + count]
        start += count


def _check_expressible(model: LoadedModel) -> None:
    config, family = model.config, model.config.family
    qkv_bias = config.qkv_bias if family in _CHOOSE_ATTENTION_BIAS else family is Family.QWEN2
    # What the model has, and what config.json makes of it.
    parts = {
        "query, key and value biases": (config.qkv_bias, qkv_bias),
        "a bias of attention's output": (config.output_bias, qkv_bias and family is not Family.QWEN2),
        "MLP biases": (config.mlp_bias, config.mlp_bias and family is Family.LLAMA),
        "query and key norms": (config.qk_norm, family is Family.QWEN3),
    }
    wrong = [f"{'has' if found else 'lacks'} {part}" for part, (found, expected) in parts.items() if found != expected]
    if wrong:
        raise ModelUnsupportedError(
            f"{model.path} {' and '.join(wrong)}, unlike any {family} model of transformers, so it cannot be exported; "
            "choose another model",
            path=str(model.path),
        )


def _rope_scaling(config: ModelConfig) -> dict[str, object] | None:
    rope = config.rope
    scaling: dict[str, object] = {"rope_type": str(rope.kind), "factor": rope.factor}
    match rope.kind:
        case RopeKind.DEFAULT | RopeKind.NTK:
            return None
        case RopeKind.LINEAR:
            return scaling
        case RopeKind.LLAMA3:
            scaling |= {"low_freq_factor": rope.low_freq_factor, "high_freq_factor": rope.high_freq_factor}
        case RopeKind.YARN:
            scaling |= {"beta_fast": rope.beta_fast, "beta_slow": rope.beta_slow, "truncate": rope.truncate}
            if rope.attention_factor is not None:
                scaling["attention_factor"] = rope.attention_factor
    return scaling | {"original_max_position_embeddings": rope.original_context}


def _write_weights(tensors: dict[str, Tensor], folder: Path, dtype: DType) -> None:
    shards = list(_shards({name: math.prod(tensor.shape) * dtype.size_bytes for name, tensor in tensors.items()}))
    weight_map: dict[str, str] = {}
    for number, names in enumerate(shards, 1):
        file = "model.safetensors" if len(shards) == 1 else f"model-{number:05}-of-{len(shards):05}.safetensors"
        weight_map |= dict.fromkeys(names, file)
        shard = {name: tensors[name].to("cpu", TORCH_DTYPES[dtype]) for name in names}
        save_file(shard, folder / file, metadata={"format": "pt"})
    if len(shards) > 1:
        _write_json(folder / "model.safetensors.index.json", {"metadata": {}, "weight_map": weight_map})


def _shards(sizes_bytes: dict[str, int]) -> Iterator[list[str]]:
    """Names in order, cut so that each group stays within `_SHARD_BYTES` unless one tensor alone exceeds it."""
    group: list[str] = []
    for name, size_bytes in sizes_bytes.items():
        if group and sum(sizes_bytes[held] for held in group) + size_bytes > _SHARD_BYTES:
            yield group
            group = []
        group.append(name)
    yield group


def _write_tokenizer(tokenizer: Tokenizer, folder: Path, *, max_context: int) -> None:
    tokenizer.backend.save(str(folder / "tokenizer.json"))
    settings: dict[str, object] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": max_context,
        "clean_up_tokenization_spaces": False,
        **tokenizer.special_tokens,
    }
    if tokenizer.chat_template is not None:
        settings["chat_template"] = tokenizer.chat_template.source
    _write_json(folder / "tokenizer_config.json", settings)
    _write_json(folder / "generation_config.json", {"eos_token_id": sorted(tokenizer.eos_ids)})


def _write_json(path: Path, content: dict[str, object]) -> None:
    path.write_text(json.dumps(content, indent=2, ensure_ascii=False), encoding="utf-8")
