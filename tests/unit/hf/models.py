"""Tiny random models of transformers, and what they answer without H3."""

from __future__ import annotations

import functools
import inspect
from typing import Any

import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM, Qwen2Config, Qwen2ForCausalLM

import h3kv.hf  # noqa: F401  (registers the attention)

VOCABULARY = 97
PAD = 0

CACHE = "cache" if "cache" in inspect.signature(LlamaForCausalLM.forward).parameters else "past_key_values"
"""What this version of transformers calls the argument; newer ones accept the older name with a warning."""

SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 4096,
    "pad_token_id": PAD,
    "bos_token_id": 1,
    "eos_token_id": None,
    "initializer_range": 0.2,
}


@functools.cache
def model_of(family: str, attention: str, dtype: torch.dtype = torch.float32) -> Any:
    """The same weights for each family, whatever the attention. Nobody changes them."""
    torch.manual_seed(3)
    if family == "llama":
        model: Any = LlamaForCausalLM(LlamaConfig(**SIZES, head_dim=16, attn_implementation=attention))
    else:
        model = Qwen2ForCausalLM(Qwen2Config(**SIZES, attn_implementation=attention))
    return model.eval().to(dtype)


def ids_of(*lengths: int, seed: int = 7) -> Tensor:
    """Random prompts of these lengths, [B, T]; shorter ones have padding on the left."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.full((len(lengths), max(lengths)), PAD)
    for row, length in enumerate(lengths):
        ids[row, max(lengths) - length :] = torch.randint(2, VOCABULARY, (length,), generator=generator)
    return ids


def greedy(model: Any, ids: Tensor, cache: Any, *, tokens: int, **arguments: Any) -> Tensor:
    """Greedy continuation, prompt included, by the model's own `generate`. Padding on the left is masked."""
    answer: Tensor = model.generate(
        ids,
        attention_mask=((ids != PAD).cumsum(-1) > 0).long(),
        max_new_tokens=tokens,
        do_sample=False,
        **{CACHE: cache},
        **arguments,
    )
    return answer
