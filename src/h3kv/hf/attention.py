"""The attention implementation `"h3"` of transformers, with its mask.

Shapes: B rows of the batch, T tokens of a chunk, S all tokens, H query heads, D head dim.
"""

from __future__ import annotations

from typing import Any, Final

import torch
from torch import Tensor
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import causal_mask_function

from h3kv.core.errors import ConfigError, RequestError
from h3kv.hf.chunk import ChunkStates

NAME: Final = "h3"

REFUSED: Final = {
    "softcap": "capped attention scores",
    "s_aux": "attention sinks of the model's own",
    "sinks": "attention sinks of the model's own",
    "position_bias": "a position bias",
    "sliding_window": "sliding-window attention",
    "output_attentions": "attention weights as an output",
    "cu_seq_lens_q": "several sequences packed into one row",
}
"""Arguments that ask for something else than plain causal attention, and what that is."""


def register() -> None:
    """Make transformers know the implementation. Doing it again changes nothing."""
    AttentionInterface.register(NAME, attention_forward)
    AttentionMaskInterface.register(NAME, mask_forward)


def mask_forward(**arguments: Any) -> Tensor | None:
    """Which tokens are real, bool [B, S]; None where all are. Causality needs no mask.

    Raises:
        RequestError: the model asks for another mask than the causal one.
    """
    if arguments.get("mask_function", causal_mask_function) is not causal_mask_function:
        raise RequestError(
            'the attention "h3" is causal over all tokens; this model or call asks for another mask, such as a sliding '
            'window or packed sequences: use attn_implementation="sdpa" without an H3Cache for it'
        )
    real_BS: Tensor | None = arguments.get("attention_mask")
    return real_BS


def attention_forward(
    module: torch.nn.Module, query: Tensor, *states: Tensor | None, **arguments: Any
) -> tuple[Tensor, None]:
    """Attention over everything that an `H3Cache` holds, [B, T, H, D] contiguous; no weights.

    Args:
        module: the attention layer.
        query: [B, H, T, D], of the chunk.
        states: what `H3Cache.update` gave, twice, for keys and values, then what `mask_forward` gave.
        arguments: `scaling`, and whatever else the model passes; what would change the result is refused by name.

    Raises:
        ConfigError: there is no H3Cache.
        RequestError: something is asked for that this attention does not do.
        ShapeError, TierFullError: as `h3_attention.attend`.
    """
    key, value, *masks = states
    attention_mask = masks[0] if masks else arguments.get("attention_mask")
    if not isinstance(key, ChunkStates) or key is not value:
        raise ConfigError(
            'the attention implementation "h3" needs an H3Cache: pass '
            "past_key_values=H3Cache(model.config, device_bytes=...) and leave use_cache on",
            field="past_key_values",
        )
    _check(module, query, attention_mask, arguments)
    out_BTHD: Tensor = key.cache.attend(query, key, attention_mask, scale=arguments.get("scaling"))
    return out_BTHD, None


def _check(module: torch.nn.Module, query: Tensor, attention_mask: Tensor | None, arguments: dict[str, Any]) -> None:
    asked = [what for name, what in REFUSED.items() if arguments.get(name) not in {None, False}]
    if arguments.get("dropout"):
        asked.append(f"dropout = {arguments['dropout']} (call model.eval())")
    is_causal = arguments.get("is_causal")
    if not (getattr(module, "is_causal", True) if is_causal is None else is_causal):
        asked.append("attention that is not causal")
    if attention_mask is not None and attention_mask.ndim != 2:
        asked.append(f"a mask of {attention_mask.ndim} dimensions (pass the padding as [batch, all tokens])")
    if asked:
        raise RequestError(f'the attention "h3" does not do {", ".join(asked)}')
    if torch.is_grad_enabled() and query.requires_grad:
        raise RequestError(
            'the attention "h3" is for inference: compute under torch.inference_mode() or torch.no_grad()'
        )
