"""Config and weights from a GGUF file, under the names of a Hugging Face checkpoint."""

from __future__ import annotations

import re
from collections.abc import Iterable

import torch
from torch import Tensor

from h3kv.core.errors import ModelCorruptError
from h3kv.models.config import Family, ModelConfig, check_config
from h3kv.models.fields import Fields
from h3kv.models.gguf_file import GgufFile
from h3kv.models.rope import RopeKind, RopeScaling, inverse_frequencies

_FAMILIES = {"llama": Family.LLAMA, "qwen2": Family.QWEN2, "qwen3": Family.QWEN3}
"""Architectures by their GGUF name. Mistral models carry the name llama."""

_NAMES = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}

_EMBEDDING = "token_embd.weight"
_ROPE_FREQS = "rope_freqs.weight"

_LLAMA3_FACTORS = (8.0, 32.0)
"""Llama 3.1 and 3.3, Llama 3.2. Their other numbers are the defaults of RopeScaling."""
_LLAMA3_CONTEXT = 8192


def config_from_gguf(file: GgufFile) -> ModelConfig:
    """The config that the metadata describes.

    Raises:
        ModelCorruptError: a key is missing, of the wrong type, or contradicts another.
        ModelUnsupportedError: a feature that this version does not implement; the message names it.
    """
    name = file.fields.get("general.architecture")
    family = _FAMILIES.get(str(name))
    if family is None:
        raise file.fields.unsupported(f"architecture '{name}' (only {', '.join(_FAMILIES)} are)")
    prefix = f"{name}."
    fields = Fields({key.removeprefix(prefix): value for key, value in file.metadata.items()}, file.path)
    tensors = set(file.names())
    _refuse_features(fields)
    heads, hidden_size = fields.count("attention.head_count"), fields.count("embedding_length")
    head_dim = fields.count("attention.key_length", hidden_size // heads)
    _refuse_head_features(fields, head_dim)
    with fields.scaling_errors():
        rope = _scaling(fields, file)
    config = ModelConfig(
        family=family,
        vocabulary_size=fields.count("vocab_size", _embedding_rows(file)),
        hidden_size=hidden_size,
        intermediate_size=fields.count("feed_forward_length"),
        layers=fields.count("block_count"),
        heads=heads,
        kv_heads=fields.count("attention.head_count_kv", heads),
        head_dim=head_dim,
        norm_eps=fields.number("attention.layer_norm_rms_epsilon"),
        rope_theta=fields.number("rope.freq_base", 10_000.0),
        rope=rope,
        max_context=fields.count("context_length"),
        tied_embeddings="output.weight" not in tensors,
        qkv_bias="blk.0.attn_q.bias" in tensors,
        output_bias="blk.0.attn_output.bias" in tensors,
        mlp_bias="blk.0.ffn_gate.bias" in tensors,
        qk_norm="blk.0.attn_q_norm.weight" in tensors,
    )
    check_config(config, file.path)
    return config


def _embedding_rows(file: GgufFile) -> int:
    if _EMBEDDING not in file.names():
        raise ModelCorruptError(f"{file.path} lacks the tensor '{_EMBEDDING}'; fetch the file again", path=file.path)
    return file.shape(_EMBEDDING)[0]


class GgufSource:
    """Implements `WeightSource` over a GGUF file."""

    def __init__(self, file: GgufFile, config: ModelConfig) -> None:
        self.path = file.path
        self._file = file
        self._gguf_names = {_hf_name(name): name for name in file.names() if name != _ROPE_FREQS}
        # Converters reorder the rows of these for a rotation of neighbours (x[2r], x[2r + 1]).
        is_llama = config.family is Family.LLAMA
        self._interleaved_heads = {"q_proj": config.heads, "k_proj": config.kv_heads} if is_llama else {}

    def names(self) -> Iterable[str]:
        """All tensors; those without a counterpart keep their GGUF name."""
        return self._gguf_names.keys()

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape of an existing tensor."""
        return self._file.shape(self._gguf_names[name])

    def read(self, name: str) -> Tensor:
        """An existing tensor, decoded to fp32, rows in the order of transformers."""
        tensor = torch.from_numpy(self._file.read(self._gguf_names[name]))
        for projection, heads in self._interleaved_heads.items():
            if f".{projection}." in name:
                return _split_pairs(tensor, heads)
        return tensor


def _hf_name(name: str) -> str:
    """'blk.3.attn_q.weight' -> 'model.layers.3.self_attn.q_proj.weight'."""
    parts = re.fullmatch(r"(?:blk\.(\d+)\.)?(\w+)\.(weight|bias)", name)
    if parts is None or parts[2] not in _NAMES:
        return name
    layer = "" if parts[1] is None else f"model.layers.{parts[1]}."
    return f"{layer}{_NAMES[parts[2]]}.{parts[3]}"


def _split_pairs(rows: Tensor, heads: int) -> Tensor:
    """Rows of each head from the order (0, R, 1, R + 1, ...) to (0, 1, ..., 2R - 1)."""
    pairs = rows.shape[0] // heads // 2
    return rows.view(heads, pairs, 2, *rows.shape[1:]).transpose(1, 2).reshape(rows.shape)


def _refuse_features(fields: Fields) -> None:
    if fields.get("expert_count"):
        raise fields.unsupported("'expert_count': mixture of experts")
    if fields.get("attention.sliding_window"):
        raise fields.unsupported("'attention.sliding_window': sliding-window attention")
    for key in ("attention.head_count", "attention.head_count_kv", "feed_forward_length"):
        if isinstance(fields.get(key), list):
            raise fields.unsupported(f"'{key}' that differs between layers")


def _refuse_head_features(fields: Fields, head_dim: int) -> None:
    if fields.count("attention.value_length", head_dim) != head_dim:
        raise fields.unsupported("'attention.value_length': values longer or shorter than keys")
    if fields.count("rope.dimension_count", head_dim) != head_dim:
        raise fields.unsupported("'rope.dimension_count': partial rotary embedding")


def _scaling(fields: Fields, file: GgufFile) -> RopeScaling:
    name = fields.get("rope.scaling.type") or "none"
    context = fields.count("context_length")
    if _ROPE_FREQS in file.names():
        return _llama3_scaling(fields, file)
    if name == "none":
        return RopeScaling(original_context=context)
    if name not in (RopeKind.LINEAR, RopeKind.YARN):
        raise fields.unsupported(f"rope scaling '{name}'")
    for key in ("attn_factor", "yarn_attn_factor", "yarn_ext_factor", "yarn_log_multiplier", "alpha"):
        if fields.get(f"rope.scaling.{key}") not in (None, 1.0):
            raise fields.unsupported(f"'rope.scaling.{key}'")
    return RopeScaling(
        kind=RopeKind(str(name)),
        factor=fields.number("rope.scaling.factor"),
        original_context=fields.count("rope.scaling.original_context_length", context),
        beta_fast=fields.number("rope.scaling.yarn_beta_fast", 32.0),
        beta_slow=fields.number("rope.scaling.yarn_beta_slow", 1.0),
    )


def _llama3_scaling(fields: Fields, file: GgufFile) -> RopeScaling:
    """The scaling whose divisors of each frequency are those that the file stores."""
    divisors_R = torch.from_numpy(file.read(_ROPE_FREQS)).flatten()
    head_dim, theta = 2 * len(divisors_R), fields.number("rope.freq_base", 10_000.0)
    plain_R, _ = inverse_frequencies(head_dim, theta, RopeScaling())
    for factor in _LLAMA3_FACTORS:
        scaling = RopeScaling(kind=RopeKind.LLAMA3, factor=factor, original_context=_LLAMA3_CONTEXT)
        scaled_R, _ = inverse_frequencies(head_dim, theta, scaling)
        if torch.allclose(plain_R / scaled_R, divisors_R, rtol=1e-3):
            return scaling
    raise fields.unsupported(f"'{_ROPE_FREQS}' with other divisors than those of Llama 3")
