"""Tiny random models in Hugging Face's format, made by transformers: input for tests, and an independent oracle.

Weights are scaled so that logits spread over several units: nearly equal logits would hide mistakes.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import tokenizers
import torch
from tokenizers import decoders, models, pre_tokenizers

TEXT_END = "<|endoftext|>"
TURN_START, TURN_END = "<|im_start|>", "<|im_end|>"

CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)

MERGES = (("t", "h"), ("th", "e"))

SIZES: Mapping[str, object] = {
    "vocab_size": 320,
    "hidden_size": 96,
    "intermediate_size": 160,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "max_position_embeddings": 512,
}


def write_tiny_model(
    folder: Path, family: str = "llama", *, seed: int = 0, shard_size: str = "1GB", **settings: object
) -> Any:
    """Write a model folder and give back the transformers model behind it: fp32, eager attention.

    Args:
        folder: made if it is not there.
        family: a transformers model type: llama, mistral, qwen2, qwen3.
        seed: of the weights.
        shard_size: weights beyond it go into several files with an index.
        settings: fields of the config, in place of those in `SIZES`.
    """
    from transformers import AutoConfig, AutoModelForCausalLM

    tokenizer = byte_tokenizer()
    end = tokenizer.token_to_id(TURN_END)
    config = AutoConfig.for_model(family, **{**SIZES, "eos_token_id": end, "bos_token_id": None, **settings})
    auto: Any = AutoModelForCausalLM
    model = auto.from_config(config, attn_implementation="eager", dtype=torch.float32).eval()
    randomise(model, seed)
    model.save_pretrained(folder, max_shard_size=shard_size)
    write_tokenizer(folder, tokenizer)
    return model


@torch.no_grad()
def randomise(model: torch.nn.Module, seed: int) -> None:
    """Give every parameter a value that matters: no bias is zero and no norm is one."""
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in sorted(model.named_parameters()):
        noise = torch.randn(parameter.shape, generator=generator)
        if parameter.dim() == 2:
            parameter.copy_(1.5 / math.sqrt(parameter.shape[1]) * noise)
        elif name.endswith("bias"):
            parameter.copy_(0.5 * noise)
        else:
            parameter.copy_(1.0 + 0.3 * noise)


def byte_tokenizer() -> tokenizers.Tokenizer:
    """One token for each byte, one for each merge, then three special tokens."""
    tokens = [*sorted(pre_tokenizers.ByteLevel.alphabet()), *(left + right for left, right in MERGES)]
    tokenizer = tokenizers.Tokenizer(models.BPE({token: index for index, token in enumerate(tokens)}, list(MERGES)))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([TEXT_END, TURN_START, TURN_END])
    return tokenizer


def write_tokenizer(folder: Path, tokenizer: tokenizers.Tokenizer) -> None:
    """Write tokenizer.json and tokenizer_config.json with `CHAT_TEMPLATE`."""
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": TURN_START,
        "eos_token": TURN_END,
        "chat_template": CHAT_TEMPLATE,
        "clean_up_tokenization_spaces": False,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings), encoding="utf-8")
