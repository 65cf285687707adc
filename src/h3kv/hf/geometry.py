"""From a transformers configuration to the geometry of its KV, or to the name of what is in the way."""

from __future__ import annotations

from typing import Any, Final, NoReturn

import torch

from h3kv.core.errors import ModelUnsupportedError
from h3kv.core.layout import CacheLayout
from h3kv.h3_kv_cache import cache_layout

FULL_ATTENTION: Final = "full_attention"
"""The layer type, as transformers calls it, of layers in which each token sees all before it."""

UNSUPPORTED: Final = {
    "sliding_window": "sliding-window attention",
    "attention_chunk_size": "chunked attention",
    "kv_lora_rank": "latent attention, whose keys and values differ in size",
    "num_kv_shared_layers": "layers that share keys and values",
    "attn_logit_softcapping": "capped attention scores",
}
"""Fields that are empty or zero in the models that this cache serves, and what they ask for."""


def layout_of(config: Any, dtype: torch.dtype | None) -> CacheLayout:
    """Geometry of a model's KV.

    Args:
        config: of a decoder, or of a model around one.
        dtype: of keys and values; the configuration's where None, else torch's default.

    Raises:
        ModelUnsupportedError: the model has layers or attention of another kind; the message names it.
        ConfigError: head dimension or dtype are out of range.
    """
    if config.is_encoder_decoder:
        _refuse(config, "an encoder beside the decoder")
    text = config.get_text_config(decoder=True)
    layer_types = getattr(text, "layer_types", None)
    strange = sorted({kind for kind in layer_types or () if kind != FULL_ATTENTION})
    if strange:
        _refuse(text, f"layers of type {', '.join(strange)}")
    for field, name in UNSUPPORTED.items():
        # Where layers have types, those decide: a window size may stand there unused.
        if getattr(text, field, None) and not (field == "sliding_window" and layer_types):
            _refuse(text, f"{name} ({field} = {getattr(text, field)})")
    heads = text.num_attention_heads
    return cache_layout(
        layers=text.num_hidden_layers,
        kv_heads=getattr(text, "num_key_value_heads", None) or heads,
        head_dim=getattr(text, "head_dim", None) or text.hidden_size // heads,
        dtype=dtype or getattr(text, "dtype", None) or torch.get_default_dtype(),
    )


def _refuse(config: Any, what: str) -> NoReturn:
    raise ModelUnsupportedError(
        f"H3Cache does not serve this {config.model_type} model: it has {what}; use transformers' own cache for it",
        path=getattr(config, "name_or_path", ""),
    )
