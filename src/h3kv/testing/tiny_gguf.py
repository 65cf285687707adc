"""Tiny GGUF files with the weights of a transformers model, laid out as llama.cpp's converter does."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import numpy.typing as npt
from gguf import GGMLQuantizationType as TensorType

from h3kv.testing.tiny_models import CHAT_TEMPLATE, MERGES, byte_tokenizer

_NAMES = {
    "embed_tokens": "token_embd",
    "norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "q_proj": "attn_q",
    "k_proj": "attn_k",
    "v_proj": "attn_v",
    "o_proj": "attn_output",
    "q_norm": "attn_q_norm",
    "k_norm": "attn_k_norm",
    "post_attention_layernorm": "ffn_norm",
    "gate_proj": "ffn_gate",
    "up_proj": "ffn_up",
    "down_proj": "ffn_down",
}


def write_tiny_gguf(
    path: Path,
    model: Any,
    *,
    matrices: TensorType = TensorType.F32,
    metadata: Mapping[str, object] | None = None,
    extra_tensors: Mapping[str, npt.NDArray[np.float32]] | None = None,
) -> None:
    """Write the weights and config of a transformers model, and the tokenizer of `byte_tokenizer`.

    Args:
        path: of the file.
        model: as `write_tiny_model` returns it.
        matrices: type that two-dimensional tensors are stored in.
        metadata: entries to add or replace; without the architecture's prefix where they begin with a dot.
        extra_tensors: tensors to add, under their GGUF names.
    """
    arch = "llama" if model.config.model_type == "mistral" else model.config.model_type
    writer = gguf.GGUFWriter(path, arch)
    given = {(f"{arch}{key}" if key.startswith(".") else key): value for key, value in (metadata or {}).items()}
    for key, value in (_metadata(arch, model.config) | given).items():
        _add(writer, key, value)
    for name, parameter in model.named_parameters():
        values = parameter.detach().numpy()
        if arch == "llama" and (found := re.search(r"\.([qk])_proj\.", name)):
            heads = model.config.num_attention_heads if found[1] == "q" else model.config.num_key_value_heads
            values = _interleave(values, heads)
        stored_as = matrices if values.ndim == 2 else TensorType.F32
        writer.add_tensor(_gguf_name(name), gguf.quantize(values, stored_as), raw_dtype=stored_as)
    for name, values in (extra_tensors or {}).items():
        writer.add_tensor(name, values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _metadata(arch: str, config: Any) -> dict[str, object]:
    tokenizer = byte_tokenizer()
    tokens = [tokenizer.id_to_token(index) for index in range(tokenizer.get_vocab_size())]
    return {
        f"{arch}.block_count": config.num_hidden_layers,
        f"{arch}.context_length": config.max_position_embeddings,
        f"{arch}.embedding_length": config.hidden_size,
        f"{arch}.feed_forward_length": config.intermediate_size,
        f"{arch}.attention.head_count": config.num_attention_heads,
        f"{arch}.attention.head_count_kv": config.num_key_value_heads,
        f"{arch}.attention.key_length": config.head_dim,
        f"{arch}.attention.value_length": config.head_dim,
        f"{arch}.attention.layer_norm_rms_epsilon": config.rms_norm_eps,
        f"{arch}.rope.freq_base": config.rope_parameters["rope_theta"],
        f"{arch}.rope.dimension_count": config.head_dim,
        f"{arch}.vocab_size": config.vocab_size,
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "gpt-2",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [1] * (len(tokens) - 3) + [3] * 3,
        "tokenizer.ggml.merges": [f"{left} {right}" for left, right in MERGES],
        "tokenizer.ggml.eos_token_id": len(tokens) - 1,
        "tokenizer.chat_template": CHAT_TEMPLATE,
    }


def _add(writer: gguf.GGUFWriter, key: str, value: object) -> None:
    match value:
        case bool():
            writer.add_bool(key, value)
        case int():
            writer.add_uint32(key, value)
        case float():
            writer.add_float32(key, value)
        case str():
            writer.add_string(key, value)
        case list():
            writer.add_array(key, value)
        case _:
            raise TypeError(f"{key}: {value!r}")


def _gguf_name(name: str) -> str:
    """'model.layers.3.self_attn.q_proj.weight' -> 'blk.3.attn_q.weight'."""
    *_, module, kind = name.split(".")
    layer = re.search(r"\.layers\.(\d+)\.", name)
    return f"{f'blk.{layer[1]}.' if layer else ''}{_NAMES[module]}.{kind}"


def _interleave(rows: npt.NDArray[np.float32], heads: int) -> npt.NDArray[np.float32]:
    """Rows of each head in the order (0, R, 1, R + 1, ...), for a rotation of neighbours."""
    pairs = rows.shape[0] // heads // 2
    return rows.reshape(heads, 2, pairs, *rows.shape[1:]).swapaxes(1, 2).reshape(rows.shape)
