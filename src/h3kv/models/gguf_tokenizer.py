"""Rebuilds a `tokenizers` pipeline from GGUF metadata.

GGUF stores the vocabulary, but only a name for how text is cut before merging. The patterns behind each name are those
of the tokenizer.json that such models come with.
"""

from __future__ import annotations

from typing import Final

from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, processors
from tokenizers import Tokenizer as Pipeline

from h3kv.core.errors import ModelCorruptError
from h3kv.models.fields import Fields
from h3kv.models.gguf_file import GgufFile
from h3kv.models.gguf_sentencepiece import sentencepiece_pipeline
from h3kv.models.tokenizer import Tokenizer

_CONTROL: Final = 3
"""Type of tokens that text names but never contains."""
_USER_DEFINED: Final = 4
"""Type of tokens that are cut out of text before anything else."""

_END_TOKENS = ("<|im_end|>", "<|eot_id|>", "<|eom_id|>", "<|endoftext|>", "<|end_of_text|>", "</s>")
"""Tokens that end an answer in every model which has them. GGUF keeps one id where checkpoints list several."""

_GGUF_NAMES = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}

_GPT2_WORDS = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_LLAMA3_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_CUTS = {
    "default": (r"[\p{P}\$\+<=>\^~\|]+", _GPT2_WORDS, r"\p{N}+", r"[0-9][0-9][0-9]"),
    "gpt-2": (_GPT2_WORDS,),
    "smollm": (r"\p{N}", _GPT2_WORDS),
    "llama-bpe": (_LLAMA3_WORDS,),
    "qwen2": (_LLAMA3_WORDS.replace(r"\p{N}{1,3}", r"\p{N}"),),
}
"""Patterns by the name of the pre-tokenizer. Each cuts the pieces that the one before left."""


def tokenizer_from_gguf(file: GgufFile) -> Tokenizer:
    """The tokenizer that the metadata describes.

    Raises:
        ModelCorruptError: metadata is missing or contradicts itself.
        ModelUnsupportedError: a tokenizer or pre-tokenizer that is not known; the message names it.
    """
    fields = file.fields
    tokens = fields.strings("tokenizer.ggml.tokens")
    special_tokens = _special_tokens(fields, tokens)
    template, tool_template = fields.get("tokenizer.chat_template"), fields.get("tokenizer.chat_template.tool_use")
    match model := fields.get("tokenizer.ggml.model"):
        case "gpt2":
            pipeline, adds_bos = _byte_level_pipeline(fields, tokens), _pre(fields) == "llama-bpe"
        case "llama":
            pipeline, adds_bos = sentencepiece_pipeline(fields, tokens), True
        case _:
            raise fields.unsupported(f"tokenizer '{model}' (only 'gpt2' and 'llama' are)")
    _add_tokens(pipeline, fields, tokens)
    if "bos_token" in special_tokens and fields.flag("tokenizer.ggml.add_bos_token", adds_bos):
        _begin_with(pipeline, special_tokens["bos_token"])
    return Tokenizer(
        pipeline,
        eos_ids=_eos_ids(fields, tokens),
        special_tokens=special_tokens,
        chat_template=template if isinstance(template, str) else None,
        tool_template=tool_template if isinstance(tool_template, str) else None,
        path=file.path,
    )


def _pre(fields: Fields) -> str:
    pre = str(fields.get("tokenizer.ggml.pre") or "default")
    if pre not in _CUTS:
        raise fields.unsupported(f"pre-tokenizer '{pre}' (only {', '.join(_CUTS)} are)")
    return pre


def _byte_level_pipeline(fields: Fields, tokens: list[str]) -> Pipeline:
    pre = _pre(fields)
    vocabulary = {token: index for index, token in enumerate(tokens)}
    pairs = [merge.split(" ") for merge in fields.strings("tokenizer.ggml.merges")]
    try:
        # Llama 3 takes a word that is a token as it is, even where no merges lead to it.
        bpe = models.BPE(vocabulary, [(left, right) for left, right in pairs], ignore_merges=pre == "llama-bpe")
    except Exception as error:  # `tokenizers` raises nothing more specific.
        raise _corrupt(fields, f"merges do not fit the vocabulary ({error})") from error
    pipeline = Pipeline(bpe)
    if pre == "qwen2":
        pipeline.normalizer = normalizers.NFC()
    cuts = [pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in _CUTS[pre]]
    letters = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    pipeline.pre_tokenizer = pre_tokenizers.Sequence([*cuts, letters])
    pipeline.decoder = decoders.ByteLevel()
    return pipeline


def _begin_with(pipeline: Pipeline, token: str) -> None:
    special_tokens = [(token, pipeline.token_to_id(token))]
    pipeline.post_processor = processors.TemplateProcessing(single=f"{token} $A", special_tokens=special_tokens)


def _add_tokens(pipeline: Pipeline, fields: Fields, tokens: list[str]) -> None:
    types = fields.numbers("tokenizer.ggml.token_type", len(tokens))
    pipeline.add_tokens(
        [
            AddedToken(token, special=kind == _CONTROL, normalized=False)
            for token, kind in zip(tokens, types, strict=True)
            if kind in (_CONTROL, _USER_DEFINED)
        ]
    )


def _special_tokens(fields: Fields, tokens: list[str]) -> dict[str, str]:
    found: dict[str, str] = {}
    for name, gguf_name in _GGUF_NAMES.items():
        index = fields.get(f"tokenizer.ggml.{gguf_name}_token_id")
        if isinstance(index, int) and 0 <= index < len(tokens):
            found[name] = tokens[index]
    return found


def _eos_ids(fields: Fields, tokens: list[str]) -> frozenset[int]:
    stated = (fields.get(f"tokenizer.ggml.{name}_token_id") for name in ("eos", "eot", "eom"))
    named = (tokens.index(token) for token in _END_TOKENS if token in tokens)
    return frozenset(index for index in (*stated, *named) if isinstance(index, int))


def _corrupt(fields: Fields, problem: str) -> ModelCorruptError:
    return ModelCorruptError(f"tokenizer metadata in {fields.path}: {problem}; fetch the file again", path=fields.path)
