"""Calibration's own part of `h3_config.yaml`. Else the file stays as it is, with its comments outside."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Final

import yaml

from h3kv.core.errors import ConfigError
from h3kv.quality.variants import Variant

SECTION: Final = "attention"


def settings_of(variant: Variant) -> dict[str, object]:
    """The keys of the section that make a node read as this variant does."""
    setting = variant.retrieval
    if setting is None:
        return {"encoding": variant.encoding.value, "mode": "exact"}
    return {
        "encoding": variant.encoding.value,
        "mode": "retrieval",
        "budget_tokens": setting.budget_tokens,
        "dense_layers": list(setting.dense_layers),
        "shortlist_share": setting.shortlist_share,
    }


def write_settings(file: Path, variant: Variant) -> None:
    """Put a variant into a file of settings, which may be new.

    Raises:
        ConfigError: the file cannot be read or written, or is no YAML of sections.
    """
    try:
        text = file.read_text(encoding="utf-8") if file.exists() else ""
        fresh = file.with_name(f".{file.name}.new")
        fresh.write_text(merge_settings(text, settings_of(variant), name=str(file)), encoding="utf-8")
        if file.exists():
            shutil.copymode(file, fresh)
        fresh.replace(file)
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"cannot change the settings in {file}: {error}; name another --config", field="config"
        ) from error


def merge_settings(text: str, keys: Mapping[str, object], *, name: str) -> str:
    """A file of settings with these keys in the section `attention`.

    Args:
        text: of the file; may be empty.
        keys: to set. Other keys of the section stay.
        name: of the file, for messages.

    Raises:
        ConfigError: not YAML, or not sections with keys.
    """
    try:
        root, tree = yaml.compose(text, Loader=yaml.SafeLoader), yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise ConfigError(f"{name} is not YAML: {error}", field="config") from error
    if tree is None:
        return f"{text}{'' if not text or text.endswith(chr(10)) else chr(10)}{_dump(keys)}"
    if not isinstance(root, yaml.MappingNode) or not isinstance(tree.get(SECTION) or {}, dict):
        raise ConfigError(f"{name} must hold sections with keys, such as `model: {{dtype: bf16}}`", field="config")
    section = {**(tree.get(SECTION) or {}), **keys}
    if root.flow_style:
        return yaml.safe_dump({**tree, SECTION: section}, sort_keys=False)
    lines = text.splitlines(keepends=True)
    if lines and not lines[-1].endswith("\n"):
        lines[-1] += "\n"
    place = next((pair for pair in root.value if pair[0].value == SECTION), None)
    if place is None:
        return f"{''.join(lines)}{_dump(section)}"
    start, end = place[0].start_mark.line, _end_line(place[1], lines)
    return f"{''.join(lines[:start])}{_dump(section)}{''.join(lines[end:])}"


def _end_line(node: yaml.Node, lines: list[str]) -> int:
    """The first line behind a section. Comments and empty lines before the next section belong to that."""
    end = node.end_mark.line + (1 if node.end_mark.column else 0)
    while end > node.start_mark.line + 1 and (not lines[end - 1].strip() or lines[end - 1].startswith("#")):
        end -= 1
    return end


def _dump(section: Mapping[str, object]) -> str:
    return yaml.safe_dump({SECTION: dict(section)}, sort_keys=False, default_flow_style=False)
