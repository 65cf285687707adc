"""Reads a Hugging Face `config.json`, in the spelling of transformers 4 and 5."""

from __future__ import annotations

import math
from collections.abc import Mapping

from h3kv.models.config import Family, ModelConfig, check_config
from h3kv.models.fields import Fields
from h3kv.models.rope import RopeKind, RopeScaling


def config_from_hf(raw: Mapping[str, object], path: str) -> ModelConfig:
    """The config that `raw`, the content of `path`, describes.

    Raises:
        ModelCorruptError: a key is missing, of the wrong type, or contradicts another.
        ModelUnsupportedError: a feature that this version does not implement; the message names it.
    """
    fields = Fields(raw, path)
    family = _family(fields)
    _refuse_features(fields)
    heads = fields.count("num_attention_heads")
    hidden_size = fields.count("hidden_size")
    has_attention_bias = family in (Family.LLAMA, Family.QWEN3) and fields.flag("attention_bias", False)
    theta, rope = _rope(fields)
    config = ModelConfig(
        family=family,
        vocabulary_size=fields.count("vocab_size"),
        hidden_size=hidden_size,
        intermediate_size=fields.count("intermediate_size"),
        layers=fields.count("num_hidden_layers"),
        heads=heads,
        kv_heads=fields.count("num_key_value_heads", heads),
        head_dim=fields.count("head_dim", hidden_size // heads),
        norm_eps=fields.number("rms_norm_eps", 1e-6),
        rope_theta=theta,
        rope=rope,
        max_context=_max_context(fields, rope),
        tied_embeddings=fields.flag("tie_word_embeddings", False),
        qkv_bias=has_attention_bias or family is Family.QWEN2,
        output_bias=has_attention_bias,
        mlp_bias=family is Family.LLAMA and fields.flag("mlp_bias", False),
        qk_norm=family is Family.QWEN3,
    )
    check_config(config, path)
    return config


def _family(fields: Fields) -> Family:
    model_type = fields.get("model_type")
    try:
        return Family(str(model_type))
    except ValueError:
        raise fields.unsupported(f"model type '{model_type}' (only {', '.join(Family)} are)") from None


def _refuse_features(fields: Fields) -> None:
    if fields.get("quantization_config") is not None:
        raise fields.unsupported("'quantization_config': quantised weights")
    activation = fields.get("hidden_act") or "silu"
    if activation not in ("silu", "swish"):
        raise fields.unsupported(f"activation '{activation}'")
    slides = fields.flag("use_sliding_window", fields.get("model_type") == Family.MISTRAL)
    if slides and fields.get("sliding_window") is not None:
        raise fields.unsupported("'sliding_window': sliding-window attention")
    layer_types = fields.get("layer_types") or ()
    if isinstance(layer_types, list | tuple):
        for layer_type in layer_types:
            if layer_type != "full_attention":
                raise fields.unsupported(f"layer type '{layer_type}'")
    for key in ("num_local_experts", "num_experts"):
        if fields.get(key):
            raise fields.unsupported(f"'{key}': mixture of experts")


def _rope(fields: Fields) -> tuple[float, RopeScaling]:
    """The base and the scaling: `rope_parameters` of transformers 5, else `rope_theta` and `rope_scaling`."""
    raw = fields.get("rope_parameters") or fields.get("rope_scaling") or {}
    if not isinstance(raw, dict) or any(isinstance(value, dict) for value in raw.values()):
        raise fields.unsupported("rope that differs between layers")
    rope = Fields(raw, fields.path)
    for source in (fields, rope):
        if source.number("partial_rotary_factor", 1.0) != 1.0:
            raise fields.unsupported("'partial_rotary_factor': partial rotary embedding")
    theta = rope.number("rope_theta", fields.number("rope_theta", 10_000.0))
    with fields.scaling_errors():
        return theta, _scaling(rope, fields.count("max_position_embeddings"))


def _scaling(rope: Fields, positions: int) -> RopeScaling:
    name = rope.get("rope_type") or rope.get("type") or RopeKind.DEFAULT
    if name == "dynamic":
        raise rope.unsupported("rope type 'dynamic' (cached keys would change with the length: set static type 'ntk')")
    if name not in tuple(RopeKind):
        raise rope.unsupported(f"rope type '{name}'")
    kind = RopeKind(str(name))
    if kind is RopeKind.DEFAULT:
        return RopeScaling(original_context=positions)
    original = rope.count("original_max_position_embeddings", positions)
    if kind is RopeKind.YARN:
        return _yarn(rope, original, positions)
    if kind is RopeKind.LLAMA3:
        return RopeScaling(
            kind=kind,
            factor=rope.number("factor"),
            original_context=original,
            low_freq_factor=rope.number("low_freq_factor"),
            high_freq_factor=rope.number("high_freq_factor"),
        )
    return RopeScaling(kind=kind, factor=rope.number("factor"), original_context=original)


def _yarn(rope: Fields, original: int, positions: int) -> RopeScaling:
    factor = rope.number("factor", positions / original)
    attention_factor = None
    if rope.get("attention_factor") is not None:
        attention_factor = rope.number("attention_factor")
    elif rope.get("mscale") and rope.get("mscale_all_dim"):
        growth = 0.1 * math.log(factor)
        attention_factor = (growth * rope.number("mscale") + 1) / (growth * rope.number("mscale_all_dim") + 1)
    return RopeScaling(
        kind=RopeKind.YARN,
        factor=factor,
        original_context=original,
        beta_fast=rope.number("beta_fast", 32.0),
        beta_slow=rope.number("beta_slow", 1.0),
        attention_factor=attention_factor,
        truncate=rope.flag("truncate", True),
    )


def _max_context(fields: Fields, rope: RopeScaling) -> int:
    """The stated positions; with YaRN some files state the trained ones, so what the factor reaches if more."""
    positions = fields.count("max_position_embeddings")
    if rope.kind is RopeKind.YARN:
        return max(positions, int((rope.original_context or positions) * rope.factor))
    return positions
