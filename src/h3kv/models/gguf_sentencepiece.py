"""Rebuilds a SentencePiece pipeline, the tokenizer of Llama 2 and Mistral, from GGUF metadata."""

from __future__ import annotations

from tokenizers import Tokenizer as Pipeline
from tokenizers import decoders, models, normalizers

from h3kv.models.fields import Fields

_SPACE = "\u2581"
"""How pieces spell a space."""


def sentencepiece_pipeline(fields: Fields, tokens: list[str]) -> Pipeline:
    """Pieces merged in the order of their scores; bytes for what no piece spells.

    Raises:
        ModelCorruptError: scores are missing.
    """
    scores = dict(zip(tokens, fields.numbers("tokenizer.ggml.scores", len(tokens)), strict=True))
    vocabulary = {token: index for index, token in enumerate(tokens)}
    pipeline = Pipeline(models.BPE(vocabulary, _merges(scores), byte_fallback=True))
    spaces = normalizers.Replace(" ", _SPACE)
    prefix = [normalizers.Prepend(_SPACE)] if fields.flag("tokenizer.ggml.add_space_prefix", True) else []
    pipeline.normalizer = normalizers.Sequence([*prefix, spaces])
    pipeline.decoder = decoders.Sequence([decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse()])
    return pipeline


def _merges(scores: dict[str, float]) -> list[tuple[str, str]]:
    """Every way to make a piece of two others, best piece first."""
    splits = [
        (score, token[:cut], token[cut:])
        for token, score in scores.items()
        for cut in range(1, len(token))
        if token[:cut] in scores and token[cut:] in scores
    ]
    splits.sort(key=lambda split: (split[0], len(split[1]), len(split[2])), reverse=True)
    return [(left, right) for _, left, right in splits]
