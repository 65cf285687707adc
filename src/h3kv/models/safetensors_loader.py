"""Config and weights from a Hugging Face folder: config.json and *.safetensors, in one file or several."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from torch import Tensor

from h3kv.core.errors import ModelCorruptError, ModelNotFoundError, ModelUnsupportedError
from h3kv.models.config import ModelConfig
from h3kv.models.file_errors import file_errors
from h3kv.models.hf_config import config_from_hf
from h3kv.models.json_file import read_json

_INDEX = "model.safetensors.index.json"
_FLOAT_TYPES = ("F32", "F16", "BF16")


def config_from_folder(folder: Path) -> ModelConfig:
    """The config in a model folder.

    Raises:
        ModelNotFoundError: there is no config.json that may be read.
        ModelCorruptError, ModelUnsupportedError: as `config_from_hf`.
    """
    path = folder / "config.json"
    with file_errors(path):
        if not path.is_file():
            raise ModelNotFoundError(
                f"{folder} holds no config.json, so it is not a complete model folder; fetch it again or correct the "
                "path",
                path=str(folder),
            )
        return config_from_hf(read_json(path), str(path))


@contextlib.contextmanager
def open_folder(folder: Path) -> Iterator[SafetensorsSource]:
    """The weights of a model folder, mapped into memory while the context lasts.

    Raises:
        ModelNotFoundError: there are no safetensors, or none that may be read.
        ModelCorruptError: a file is missing or truncated.
        ModelUnsupportedError: tensors that are not floating-point numbers.
    """
    with contextlib.ExitStack() as stack:
        yield SafetensorsSource(folder, stack)


class SafetensorsSource:
    """Implements `WeightSource` over the files of one folder."""

    def __init__(self, folder: Path, stack: contextlib.ExitStack) -> None:
        self.path = str(folder)
        self._files: dict[str, Any] = {}  # Values are `safe_open`, whose type hints are partial.
        with file_errors(folder):
            for path in _files(folder):
                file = stack.enter_context(_open(path))
                self._files |= dict.fromkeys(file.keys(), file)
        self._check_types()

    def names(self) -> Iterable[str]:
        """All tensors."""
        return self._files.keys()

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape of an existing tensor."""
        return tuple(self._files[name].get_slice(name).get_shape())

    def read(self, name: str) -> Tensor:
        """An existing tensor in the dtype of the file."""
        tensor: Tensor = self._files[name].get_tensor(name)
        return tensor

    def _check_types(self) -> None:
        for name, file in self._files.items():
            dtype = file.get_slice(name).get_dtype()
            if dtype not in _FLOAT_TYPES:
                raise ModelUnsupportedError(
                    f"tensor '{name}' of type {dtype} is not supported, found in {self.path}; "
                    f"choose a model in one of {', '.join(_FLOAT_TYPES)}",
                    path=self.path,
                )


def _files(folder: Path) -> list[Path]:
    """The files that the index names, else all that are there."""
    index = folder / _INDEX
    if not index.is_file():
        found = sorted(folder.glob("*.safetensors"))
        if not found:
            raise ModelNotFoundError(
                f"{folder} holds no *.safetensors; fetch the model again in that format", path=str(folder)
            )
        return found
    weight_map = read_json(index).get("weight_map")
    if not isinstance(weight_map, dict) or not all(isinstance(name, str) for name in weight_map.values()):
        message = f"{index} holds no weight_map from tensors to file names; fetch it again"
        raise ModelCorruptError(message, path=str(index))
    return [folder / name for name in sorted(set(weight_map.values()))]


def _open(path: Path) -> safe_open:
    try:
        path.open("rb").close()  # Says why a file cannot be read, where `safe_open` takes it for missing.
        return safe_open(path, framework="pt")
    except FileNotFoundError as error:
        raise ModelCorruptError(
            f"{path} is missing although {_INDEX} names it: the download is incomplete, fetch it again", path=str(path)
        ) from error
    except SafetensorError as error:
        raise ModelCorruptError(
            f"{path} is not a complete safetensors file ({error}); fetch it again", path=str(path)
        ) from error
