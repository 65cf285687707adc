"""The files of this repository, as the tidy tests read them."""

import ast
import functools
import os
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
GENERATED = {".git", ".venv", "build", "dist", "__pycache__"}
"""Folders that nobody writes by hand. Others that begin with a dot and end with `_cache` belong here too."""

SHIPPED = ("src", "services")

API = ROOT / "src/h3kv/api"
"""Written by tools/genproto.py."""


def files(*suffixes: str, under: str = ".") -> Iterator[Path]:
    """Files below a folder that end so, in a fixed order."""
    for folder, folders, names in os.walk(ROOT / under):
        folders[:] = sorted(name for name in folders if is_written_by_hand(Path(folder), name))
        yield from (Path(folder) / name for name in sorted(names) if name.endswith(suffixes))


def is_written_by_hand(folder: Path, name: str) -> bool:
    return name not in GENERATED and not is_cache(name) and folder / name != API


def is_cache(name: str) -> bool:
    return (name.startswith(".") and name.endswith("_cache")) or name in {".hypothesis"} or name.endswith(".egg-info")


@functools.cache
def parsed(file: Path) -> ast.Module:
    return ast.parse(file.read_text(encoding="utf-8"), filename=str(file))


def shown(file: Path) -> str:
    return file.relative_to(ROOT).as_posix()


def shipped(*suffixes: str) -> Iterator[Path]:
    """Files of what runs in production: the library and the services."""
    for folder in SHIPPED:
        yield from files(*suffixes, under=folder)


def module_name(file: Path) -> str:
    """`src/h3kv/core/types.py` is `h3kv.core.types`; a package is named by its folder."""
    below = ROOT / "src" if file.is_relative_to(ROOT / "src") else ROOT
    parts = file.relative_to(below).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imports(file: Path) -> Iterator[str]:
    """Dotted names that a file imports anywhere in it; `from a import b` gives both `a` and `a.b`."""
    for node in ast.walk(parsed(file)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module is not None:
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def dotted(node: ast.expr) -> str:
    """`os.environ` for the expression of that name; empty for anything that is not names and dots."""
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute):
        below = dotted(node.value)
        return f"{below}.{node.attr}" if below else ""
    return ""
