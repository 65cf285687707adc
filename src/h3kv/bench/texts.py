"""Texts to measure perplexity on."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

from h3kv.core.errors import ConfigError

if TYPE_CHECKING:  # torch is not needed to read a text
    from h3kv.models.loader import LoadedModel

ROOT: Final = Path(__file__).parents[3]
"""Of the repository, in a checkout."""

DEFAULTS: Final = (
    ("wikitext2", ROOT / "../shared/data/wikitext-2/valid.txt"),
    ("demo", ROOT / "examples/demo/document_long.txt"),
)
"""Names and files; the first that is there is taken."""


@dataclass(frozen=True, slots=True)
class NamedText:
    """A text and its name in metrics."""

    name: str
    text: str


def read_text(path: Path | None) -> NamedText:
    """The text of a file, or the default one.

    Raises:
        ConfigError: it cannot be read, or there is no default outside a checkout.
    """
    if path is not None:
        return NamedText(path.stem, _read(path))
    for name, default in DEFAULTS:
        if default.exists():
            return NamedText(name, _read(default))
    raise ConfigError("there is no text to measure on: give one with --text", field="text")


def take_tokens(model: LoadedModel, named: NamedText, count: int) -> list[int]:
    """The first tokens of a text.

    Raises:
        ConfigError: it has fewer.
    """
    tokens = model.tokenizer.encode(named.text)
    if len(tokens) < count:
        raise ConfigError(f"the text {named.name} has {len(tokens)} tokens: {count} are needed", field="text")
    return list(tokens[:count])


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read {path} as UTF-8: {error}; choose another --text", field="text") from error
