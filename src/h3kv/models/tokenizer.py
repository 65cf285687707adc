"""Text to token ids and back, exact to the byte."""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping, Sequence
from pathlib import Path

import tokenizers

from h3kv.core.errors import ModelCorruptError, ModelNotFoundError, ModelUnsupportedError, RequestError
from h3kv.models.chat_template import ChatTemplate, Messages, Tools
from h3kv.models.file_errors import file_errors
from h3kv.models.json_file import read_optional_json

SPECIAL_TOKENS = ("bos_token", "eos_token", "unk_token", "pad_token")
"""Special tokens by the names that chat templates and tokenizer_config.json use."""


class Tokenizer:
    """A model's vocabulary and chat format."""

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        *,
        eos_ids: frozenset[int],
        special_tokens: Mapping[str, str],
        chat_template: str | None,
        tool_template: str | None = None,
        path: str,
    ) -> None:
        """Wrap a pipeline.

        Args:
            backend: owned by this object from now on.
            eos_ids: tokens after which the model has nothing to say.
            special_tokens: values of `bos_token`, `eos_token` and the like.
            chat_template: Jinja source; None for a model without one.
            tool_template: the same, for chats with tools; None where one template serves both.
            path: the file or folder it came from.

        Raises:
            ModelUnsupportedError: tokens that are neither byte-level nor SentencePiece.
            ModelCorruptError: the chat template is not valid.
        """
        backend.no_truncation()
        backend.no_padding()
        self.backend = backend
        self.eos_ids = eos_ids
        self.special_tokens = dict(special_tokens)

        def compiled(source: str | None) -> ChatTemplate | None:
            return None if source is None else ChatTemplate(source, special_tokens=special_tokens, path=path)

        self.chat_template = compiled(chat_template)
        self._tool_template = compiled(tool_template)
        self._path = path
        added = backend.get_added_tokens_decoder()
        self._added = {token: each.content for token, each in added.items()}
        self.special_ids = frozenset(token for token, each in added.items() if each.special)
        self._is_byte_level = _is_byte_level(backend, path)
        self._bytes_of: dict[int, bytes] = {}

    @property
    def vocabulary_size(self) -> int:
        """Tokens that this tokenizer knows. A model's embedding may have more rows."""
        return self.backend.get_vocab_size()

    def encode(self, text: str, *, add_special_tokens: bool = False) -> list[int]:
        """Token ids of a text; names of special tokens in it become those tokens.

        Args:
            text: any length.
            add_special_tokens: put what the model expects before plain text, such as its begin token. Text from
                `apply_chat` has it already.

        Cost: linear in the text.
        """
        ids: list[int] = self.backend.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0].ids
        return ids

    def decode(self, ids: Sequence[int]) -> str:
        """The text that the tokens continue with, special tokens by name. Incomplete characters become U+FFFD."""
        return b"".join(map(self.token_bytes, ids)).decode("utf-8", errors="replace")

    def token_bytes(self, token: int) -> bytes:
        """The exact bytes of one token: perhaps a part of a character. Empty for ids that no text has."""
        if token not in self._bytes_of:
            self._bytes_of[token] = self._convert(token)
        return self._bytes_of[token]

    def apply_chat(self, messages: Messages, add_generation_prompt: bool = True, *, tools: Tools | None = None) -> str:
        """The conversation as the text that the model expects.

        Args:
            messages: oldest first.
            add_generation_prompt: end where the model's answer begins.
            tools: what it may call.

        Raises:
            RequestError: the model has no chat template, or it refuses these messages or has no place for tools.
        """
        template = (self._tool_template if tools else None) or self.chat_template
        if template is None:
            raise RequestError(f"the model in {self._path} has no chat template; give it a plain prompt")
        return template.render(messages, add_generation_prompt=add_generation_prompt, tools=tools)

    def _convert(self, token: int) -> bytes:
        if token in self._added:
            return self._added[token].encode()
        text = self.backend.id_to_token(token)
        if text is None:
            return b""
        if self._is_byte_level:
            return _spelled_bytes(text)
        if len(text) == 6 and text.startswith("<0x"):
            return bytes([int(text[3:5], 16)])
        return text.replace("\u2581", " ").encode()


def tokenizer_from_folder(folder: Path) -> Tokenizer:
    """The tokenizer in a Hugging Face model folder.

    Raises:
        ModelNotFoundError: there is no tokenizer.json, or a file may not be read.
        ModelCorruptError: a file is damaged.
        ModelUnsupportedError: as `Tokenizer`.
    """
    path = folder / "tokenizer.json"
    with file_errors(folder):
        if not path.is_file():
            raise ModelNotFoundError(
                f"{folder} holds no tokenizer.json; fetch the model again, or save its tokenizer with transformers",
                path=str(folder),
            )
        return _wrapped(folder, _pipeline(path))


def _pipeline(path: Path) -> tokenizers.Tokenizer:
    content = path.read_bytes()
    try:
        return tokenizers.Tokenizer.from_buffer(content)
    except Exception as error:  # `tokenizers` raises nothing more specific.
        raise ModelCorruptError(f"{path} is not a valid tokenizer ({error}); fetch it again", path=str(path)) from error


def _wrapped(folder: Path, backend: tokenizers.Tokenizer) -> Tokenizer:
    """The pipeline with what the other files of the folder say about it."""
    settings = read_optional_json(folder / "tokenizer_config.json")
    special_tokens = _special_tokens(settings)
    eos_ids = _eos_ids(folder, "generation_config.json") | _eos_ids(folder, "config.json")
    if (eos := backend.token_to_id(special_tokens.get("eos_token", ""))) is not None:
        eos_ids |= {eos}
    templates = _chat_templates(folder, settings)
    return Tokenizer(
        backend,
        eos_ids=eos_ids,
        special_tokens=special_tokens,
        chat_template=templates.get("default"),
        tool_template=templates.get("tool_use"),
        path=str(folder),
    )


def _special_tokens(settings: Mapping[str, object]) -> dict[str, str]:
    """Entries such as `eos_token`, given as text or as an object with `content`."""
    found: dict[str, str] = {}
    for key in SPECIAL_TOKENS:
        value = settings.get(key)
        if isinstance(value, dict):
            value = value.get("content")
        if isinstance(value, str):
            found[key] = value
    return found


def _eos_ids(folder: Path, name: str) -> frozenset[int]:
    value = read_optional_json(folder / name).get("eos_token_id")
    values = value if isinstance(value, list) else [value]
    return frozenset(token for token in values if isinstance(token, int))


def _chat_templates(folder: Path, settings: Mapping[str, object]) -> dict[str, str]:
    """Templates by their names. That of a model which has one is `default`."""
    path = folder / "chat_template.jinja"
    if path.is_file():
        try:
            return {"default": path.read_text(encoding="utf-8")}
        except UnicodeDecodeError as error:
            raise ModelCorruptError(f"{path} is not UTF-8 text ({error}); fetch it again", path=str(path)) from error
    template = settings.get("chat_template")
    named: dict[object, object] = {"default": template}
    if isinstance(template, list):
        named = {entry.get("name"): entry.get("template") for entry in template if isinstance(entry, dict)}
    return {str(name): source for name, source in named.items() if isinstance(source, str)}


def _is_byte_level(backend: tokenizers.Tokenizer, path: str) -> bool:
    """Whether token texts spell bytes in GPT-2's letters. Otherwise they are SentencePiece pieces."""
    state = json.loads(backend.decoder.__getstate__()) if backend.decoder is not None else {}
    kinds = {part["type"] for part in state.get("decoders", [state]) if "type" in part}
    if "ByteLevel" in kinds:
        return True
    if kinds & {"ByteFallback", "Metaspace"}:
        return False
    raise ModelUnsupportedError(
        f"tokenizer decoder {sorted(kinds)} is not supported, found in {path}; choose another model", path=path
    )


def _spelled_bytes(text: str) -> bytes:
    """The bytes that GPT-2's letters spell. A token with any other letter stands for its own text."""
    letters = byte_of_letter()
    if letters.keys() >= set(text):
        return bytes(letters[letter] for letter in text)
    return text.encode()


@functools.cache
def byte_of_letter() -> dict[str, int]:
    """GPT-2's spelling of bytes: printable ones as themselves, the others as the letters from U+0100 on."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(0x100 + index): byte for index, byte in enumerate(others)}
